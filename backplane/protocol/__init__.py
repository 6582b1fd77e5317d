"""Both ends of the line, without any I/O: bytes to checked messages, and messages to bytes.

`lines` splits bytes at LF and reads one line as strict JSON. `messages` has the table of messages: who may send each,
and when. `host` is a host's end, `control` the control plane's, which a host does not load. `jsonrpc` is JSON-RPC 2.0,
and `mcp` has what servers of the Model Context Protocol share.
"""
