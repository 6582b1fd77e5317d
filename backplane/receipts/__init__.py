"""Keeps a journal of each live run, seals its receipt at the end, and stores all receipts.

Events come in as canonical bytes; a whole trace is never in memory. Import each module by its own name, because this
saves milliseconds before the first process is started, and most callers need only one.
"""
