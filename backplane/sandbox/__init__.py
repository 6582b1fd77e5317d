"""Contains a host by bubblewrap's namespaces, by Landlock, and by a proxy that checks host names.

From a command and its order, this package plans the layers around the command and a label of what they enforce. Each
layer is tried before it is used. Start at `sandbox.sandbox`; this file imports nothing, because many runs need no
sandbox.
"""
