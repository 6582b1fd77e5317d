"""Defines the values that processes exchange, exactly as `abp/v0.1` has them on the wire.

Frozen structs and their canonical form; no I/O, no decisions.
"""
