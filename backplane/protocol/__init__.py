"""Converts between bytes and checked messages at both ends of a connection, without any I/O.

`lines` splits bytes at LF and reads one line as strict JSON. `messages` has the table of messages with their senders
and extensions. `host` is the host's end, and `control` the control plane's end, which a host does not load. `jsonrpc`
is JSON-RPC 2.0, and `mcp` has the answers that all our servers of the Model Context Protocol give.
"""
