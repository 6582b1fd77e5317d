"""Claude Code, steered over JSON lines: the agent of a run, its messages as events, its questions.

Which program speaks it, how it is configured and what its quirks are is a host's affair.
"""
