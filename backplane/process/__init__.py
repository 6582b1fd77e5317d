"""Starts processes; no other room does.

When a block here ends, or a call returns, nothing that it started is alive. What the bytes mean is not known here.
Each file is imported by its own name, so that to lock a file loads no event loop.
"""
