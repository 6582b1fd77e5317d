"""Vendors' agents as hosts drive them: one session each, a room a protocol."""
