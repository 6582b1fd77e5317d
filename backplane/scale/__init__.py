"""Orders beyond one machine: the same work orders on an engine that keeps a queue.

`engine` is the one interface and its values, `memory` an engine inside one process, `durable` the one on a database
(SQLite file or Postgres), `ledger` its workers and attempts, `content` the workspaces and patches on their way,
`orders` what a submitter sends and gets back, `runner` what a worker does with one order. Nothing of an engine's types
leaves this room, and nothing here is imported unless a command asks for it.
"""
