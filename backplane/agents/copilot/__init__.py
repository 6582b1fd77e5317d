"""Driver of Copilot CLI, by its headless server."""
