"""Claude Code, steered over JSON lines: the agent of a run, its messages as events, its questions.

`start` says which program speaks it and how it is configured; what it can is its host's affair.
"""
