"""The place an agent works in, and what it changed there.

A folder goes in; a copy, or the folder itself, is worked in; a git patch comes out, which can be
put into the original later. `place` opens and closes, `stage` copies, `baseline` compares,
`patch` keeps the result, `apply`, `bare` and `writing` write it; `tree`, `copying`, `pack` and
`git` are what they stand on.
"""

from backplane.workspace.apply import Applied, apply_patch, go_on
from backplane.workspace.bare import apply_bare
from backplane.workspace.history import object_folders
from backplane.workspace.patch import Change
from backplane.workspace.tree import Quota
from backplane.workspace.workspace import Patch, Workspace, collect, open_workspace

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
]
