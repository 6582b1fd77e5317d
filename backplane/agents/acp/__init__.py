"""The Agent Client Protocol, version 1, from the client's side: a session with an agent, its updates as events.

The client carries calls and hands on what is told and asked; the story makes events of that; the work is one run.
Which program speaks it, how it is configured and what its quirks are is a host's affair.
"""

from backplane.agents.acp.client import Client, Session
from backplane.agents.acp.failure import code_of, said
from backplane.agents.acp.story import Call, Story
from backplane.agents.acp.work import Turn, Ways

__all__ = ["Call", "Client", "Session", "Story", "Turn", "Ways", "code_of", "said"]
