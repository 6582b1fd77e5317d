"""Starts and ends processes; no other package of backplane starts one.

A program and its descendants are killed when the block or call that runs them ends.
Import each module by its own name, so that locking a file loads no event loop.
"""
