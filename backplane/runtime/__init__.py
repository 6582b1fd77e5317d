"""The control plane: one run from its order to its stored receipt."""
