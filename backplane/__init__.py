"""Run any coding agent through one contract: a work order in, events and one sealed receipt out."""

__version__ = "0.1.0"
