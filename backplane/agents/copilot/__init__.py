"""Copilot CLI: `agent` speaks with its headless server, `reader` turns its session's events into the contract's.

Bodies behind a header with their length; see `protocol.jsonrpc.FramedPeer`.
"""
