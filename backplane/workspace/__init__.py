"""Makes the folder in which an agent works, and finds what the agent changed there.

A folder goes in; the agent works in a copy, or in the folder itself; a git patch comes out, which can be applied to the
original later. `workspace` opens, compares and closes, with `staging` and `baseline`; `repo` is the run's repository of
states, in git's `objects`; `patch` and `checkpoints` name states, `apply`, `bare` and `writing` write them into a
folder; `repository` and `history` read the original's own repository; `tree` and `copying` read and copy files.
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
