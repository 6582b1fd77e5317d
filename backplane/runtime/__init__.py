"""Runs orders: each from its order to its sealed receipt.

- The way of an order: `plane` → `admit` → `drive` (one task) → `place` → `channel` → `inbound` → `finalize`. `run` is
  the caller's handle, `events` are what it reads, `ending` decides how the run ends, `places` bounds runs at once.
- What an order asks for: `options`, `orders`, `requirements`, `servers`, `instructions`, `budgets`, `cache`; `faults`
  and `readiness` check without a run.
- Where a host comes from: `backends`, `plugins`, `memory`, `replay`; `hello` asks a host without an order.
- How a host is started: `setup` (sandbox and folders), `held_key` (without the model's key), `warm` (before its order).
- How a host's question is answered: `approvals`, `hooks`, `hook_calls`, `door`; `checkpoints` saves the files before
  a tool, and `functions` are tools of the program.
- What stays of a run: `state` (the folder), `witness` (judged claims), `results` (applied and rewound).
"""
