"""Agents that tell their work as JSON lines and are steered over the same pipe, from the host's side.

The client carries control requests both ways and hands on what is told; the story makes events of that. Which program
speaks it, how it is configured and what its quirks are is a host's affair.
"""

from backplane.streamjson import answers
from backplane.streamjson.client import Client, Refused
from backplane.streamjson.failure import code_of
from backplane.streamjson.story import Result, Story

__all__ = ["Client", "Refused", "Result", "Story", "answers", "code_of"]
