"""Kimi: `server` is its program's local server (REST, and a WebSocket for events), `agent` one run on it, `reader` its
events as the contract's.
"""
