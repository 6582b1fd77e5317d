"""The shapes that cross a process line, exact on the wire as `abp/v0.1` has them.

Frozen structs and their canonical form; no I/O, no decisions.
"""
