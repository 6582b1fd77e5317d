"""Orders beyond one machine: the same work orders on an engine that keeps a queue.

`engine` has the values, `durable` is the engine on a database (SQLite file or Postgres), `ledger` its workers and
attempts, `content` the workspaces and patches on their way, `orders` what a submitter sends and gets back, `mirror` a
queued order as a local run, `runner` what a worker does with one order. Nothing of an engine's types leaves this room,
and nothing here is imported unless a command asks for it.
"""
