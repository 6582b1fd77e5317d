"""Receipts: the journal while a run lives, the sealed record after it, and the store of all of them.

Events come in as canonical bytes and are never held in memory as a whole. Each file is imported by its own name: the
way to the first spawn is short of milliseconds, and most callers want one of them.
"""
