"""Runs work orders from a queue, on one machine or many.

`engine` has the values, `durable` the engine on a database (SQLite file or Postgres), `ledger` its workers and budget,
`worker` a worker's threads, `content` the store of workspaces and patches, `orders` the submitter's side, `runner` the
worker's side. The engine's own types stay in this room; only commands that need it import it.
"""
