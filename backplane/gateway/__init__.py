"""One address for the model requests of any client: four interfaces in front, any configured service behind.

`serving` opens it for clients of its own, `in_run` for the agent of a run, and `key_proxy` only puts a key in.
"""
