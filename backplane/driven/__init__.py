"""What all hosts share that drive somebody else's agent: reading the order, the agent's program, and its one run.

How an agent is spoken with is another room's affair, and how it is configured a host's. A host needs `order` at its
start; the rest is loaded when there is a run.
"""
