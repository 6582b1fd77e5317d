"""The Agent Client Protocol, version 1, from the client's side: the agent of a run, and its updates as events.

`start` says which program speaks it and how it is configured; what it can is its host's affair.
"""
