"""A run as people see it: one picture of its events and receipt, drawn as lines or as HTML. Pure.

What is drawn is written by `cli` (and by whoever serves a page); what it is read from is `receipts`' affair.
"""
