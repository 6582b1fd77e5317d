"""The place an agent works in, and what it changed there.

A folder goes in; a copy, or the folder itself, is worked in; a git patch comes out, which can be put into the original
later. `workspace` opens, copies and closes, `baseline` compares, `repo` is the run's repository of states, `patch` and
`checkpoints` name them, `apply`, `bare` and `writing` write them; `repository` and `history` read the original's own
repository; `tree` and `copying` are what they stand on.
"""

from backplane.workspace.apply import Applied, apply_patch, go_on
from backplane.workspace.bare import apply_bare
from backplane.workspace.history import object_folders
from backplane.workspace.patch import Change
from backplane.workspace.tree import Quota
from backplane.workspace.workspace import Patch, Workspace, collect, open_workspace, slim

__all__ = [
    "Applied",
    "Change",
    "Patch",
    "Quota",
    "Workspace",
    "apply_bare",
    "apply_patch",
    "collect",
    "go_on",
    "object_folders",
    "open_workspace",
    "slim",
]
