"""Draws runs for people: one picture of a run's events and receipt, as lines or as HTML. Pure, except `load`.

`load` reads runs from the store; `cli` and `web` write what is drawn.
"""
