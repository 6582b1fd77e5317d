"""Rights of a file given to the one that takes its place: owner, mode, access list, what people have noted at it.

Nobody gets more than he had. What makes a program mightier than whoever starts it (set-id bits, capabilities)
is not given to another content.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from backplane.workspace.tree import FILE_FLAGS, open_folder, opened, parent

_ACCESS: Final = "system.posix_acl_access"
_KEPT: Final = ("user.", "security.selinux", _ACCESS)


def hand_over(file: int, root: int, path: str, old: os.stat_result, *, program: bool) -> None:
    """Give a new file the rights of the one at a path, but for the right to run it, which is told. Raises OSError."""
    name = path[len(parent(path)) :]
    with opened(open_folder(root, parent(path))) as folder, opened(os.open(name, FILE_FLAGS, dir_fd=folder)) as there:
        found = _attributes(there)
    rights = _runnable(old.st_mode & 0o777, program)
    for owner in (old.st_uid, -1):
        with contextlib.suppress(PermissionError):
            os.fchown(file, owner, old.st_gid)
            break
    if os.fstat(file).st_gid != old.st_gid:
        # Another group's members may do what anybody may.
        rights &= ~0o070 | (rights & 0o007) << 3
    if _ACCESS in _attributes(file).keys() - found.keys():
        os.removexattr(file, _ACCESS)  # A new file has one from its folder.
    for name, value in found.items():
        with contextlib.suppress(PermissionError):
            os.setxattr(file, name, value)
    # Last, as it says again what the list's mask is.
    os.fchmod(file, rights)


def _attributes(handle: int) -> dict[str, bytes]:
    if not hasattr(os, "listxattr"):  # pragma: no cover - not Linux
        return {}
    found: dict[str, bytes] = {}
    with contextlib.suppress(OSError):
        for name in os.listxattr(handle):
            if name.startswith(_KEPT):
                found[name] = os.getxattr(handle, name)
    return found


def _runnable(old: int, program: bool) -> int:
    """Keep a file's rights but for the right to run it."""
    if bool(old & 0o100) == program:
        return old
    return old | (old & 0o444) >> 2 if program else old & ~0o111
