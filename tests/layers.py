"""Layers of this machine's sandbox, with some of them taken away."""

from __future__ import annotations

from backplane.sandbox.probe import Name, Probe, Probed


def without(found: Probe, *names: Name) -> Probe:
    """Return the same machine without these layers; bubblewrap takes its network namespace along."""
    gone = {*names, *(("network namespace",) if "bubblewrap" in names else ())}
    bubblewrap, network, landlock = (
        Probed(layer.name, False, why="hidden") if layer.name in gone else layer for layer in found.layers()
    )
    return Probe(bubblewrap, network, landlock, () if "bubblewrap" in gone else found.command)
