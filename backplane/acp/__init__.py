"""The Agent Client Protocol, version 1, from the client's side: a session with an agent, and its updates as events.

Which program speaks it, how it is configured and what its quirks are is a host's affair.
"""

from backplane.acp.client import Client, Session
from backplane.acp.failure import code_of, said
from backplane.acp.story import Call, Story

__all__ = ["Call", "Client", "Session", "Story", "code_of", "said"]
