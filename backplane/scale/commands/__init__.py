"""The commands of the group `queue`; `backplane.cli` finds them by its index."""
