"""Driver of Kimi, by its local server."""
