"""Our own folders where they lie inside a workspace: no agent may change them by a patch.

They are known by what they are, whatever they are called; the names that lead to them, also by way
of a link, are kept for the copy, where there is nothing to know them by.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from backplane.workspace.tree import identity

LINKS_MAX: Final = 40
"""Links that lead to a folder, as the system itself counts them."""


class Ours:
    """Our folders as one workspace sees them.

    Args:
        root: the workspace, links resolved.
        folders: those of ours, there already.

    Raises:
        OSError: one of them is not there.
    """

    __slots__ = ("_names", "_root", "identities")

    def __init__(self, root: Path, folders: Sequence[Path]) -> None:
        self.identities = tuple(dict.fromkeys(map(identity, folders)))
        self._root = root
        # A tuple, as most workspaces hold none and an empty set is not nothing.
        self._names = tuple({name for folder in folders for name in _names(root, folder)})

    def add(self, paths: Iterable[str]) -> None:
        """Take names under which a listing of the workspace met them."""
        self._names = tuple({*self._names, *paths})

    @property
    def inside(self) -> bool:
        """Whether any name of the workspace leads to them."""
        return bool(self._names)

    def hold(self, path: str) -> bool:
        """Whether a file of this name would lie in them, or in the place of what leads to them."""
        return any(path == name or path.startswith(name + "/") or name.startswith(path + "/") for name in self._names)

    def hold_folder(self, path: str) -> bool:
        """As `hold`, for a folder, which the original's file system may know by other letters, too."""
        above = path.rstrip("/")
        if any(above == name or above.startswith(name + "/") for name in self._names):
            return True
        with suppress(OSError, ValueError):
            facts = os.stat(self._root / path)
            return (facts.st_dev, facts.st_ino) in self.identities
        return False


def _names(root: Path, folder: Path) -> Iterator[str]:
    """The paths below the root that are on the way to a folder: every link, and the folder itself."""
    waiting, here = list(filter(None, os.fspath(folder.absolute()).split("/")[::-1])), "/"
    left = LINKS_MAX
    while waiting:
        part = waiting.pop()
        here = os.path.dirname(here) if part == ".." else os.path.join(here, part)
        if os.path.islink(here) and left:
            left -= 1
            yield from _below(root, here)
            waiting += reversed(Path(os.readlink(here)).parts)
            here = os.path.dirname(here)
    yield from _below(root, here)


def _below(root: Path, path: str) -> Iterator[str]:
    top = os.fspath(root).rstrip("/")
    if f"{path}/".startswith(f"{top}/"):
        yield path[len(top) + 1 :] or "."
