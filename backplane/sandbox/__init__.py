"""Contains a host: namespaces by bubblewrap, Landlock, a proxy that knows names.

A command and its order go in; the layers around the command come out, with a label of what is in force. Each layer is
tried before it is used. The way in is `sandbox.sandbox`; nothing is imported here, because many runs need no sandbox.
"""
