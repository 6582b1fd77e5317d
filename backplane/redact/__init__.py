"""Keeps known secrets out of everything that is written, shown or passed on. Pure."""
