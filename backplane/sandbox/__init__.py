"""What holds a host: namespaces by bubblewrap, Landlock, a proxy at the door of its network.

A command and its order go in; what to put around the command comes out, with a label that says
what is really in force. Each layer is tried before it is relied on. `run` is the way in; nothing
is imported here, as a run that is not contained shall not pay for it.
"""
