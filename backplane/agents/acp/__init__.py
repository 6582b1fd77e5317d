"""Driver of every agent that speaks the Agent Client Protocol, version 1."""
