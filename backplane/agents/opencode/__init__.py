"""opencode: the store of its conversations; it is driven over the Agent Client Protocol."""
