"""Agents that serve an app over JSON-RPC lines, from the app's side: threads, turns in them, items in a turn.

The client carries calls and hands on what is told and asked; the story makes events of that; the work is one run.
Which program speaks it, how it is configured and what its quirks are is a host's affair.
"""
