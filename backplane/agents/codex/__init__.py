"""Driver of Codex, by its app-server."""
