"""Agents that tell their work as JSON lines and are steered over the same pipe, from the host's side.

The client carries control requests both ways and hands on what is told; the story makes events of that. Which program
speaks it, how it is configured and what its quirks are is a host's affair.
"""

from backplane.agents.claude import answers
from backplane.agents.claude.client import Client, Refused
from backplane.agents.claude.failure import code_of
from backplane.agents.claude.story import Result, Story

__all__ = ["Client", "Refused", "Result", "Story", "answers", "code_of"]
