"""What holds a host: namespaces by bubblewrap, Landlock, a proxy at the door of its network.

A command and its order go in; what to put around the command comes out, with a label that says
what is really in force. Each layer is tried before it is relied on. Nothing is started here but
trials; the guard puts the layers on.
"""

from backplane.contain.admit import Demands, check_asks, demands, refuse, tighter
from backplane.contain.door import open_contained
from backplane.contain.labels import uncontained
from backplane.contain.plan import Contained, Place, plan
from backplane.contain.probe import Layer, Probe, probe, without
from backplane.contain.proxy import Tally

__all__ = [
    "Contained",
    "Demands",
    "Layer",
    "Place",
    "Probe",
    "Tally",
    "check_asks",
    "demands",
    "open_contained",
    "plan",
    "probe",
    "refuse",
    "tighter",
    "uncontained",
    "without",
]
