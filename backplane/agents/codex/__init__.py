"""Codex's app-server over JSON-RPC lines, from the app's side: threads, turns in them, items in a turn.

The client carries calls and hands on what is told and asked; the story makes events of that; the work is one run.
`start` says which program speaks it and how it is configured; what it can is its host's affair.
"""
