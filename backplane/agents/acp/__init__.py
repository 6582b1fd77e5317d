"""The Agent Client Protocol, version 1, from the client's side: the agent of a run, and its updates as events.

Which program speaks it, how it is configured and what its quirks are is a host's affair.
"""
