"""Driver of Claude Code, by JSON lines."""
