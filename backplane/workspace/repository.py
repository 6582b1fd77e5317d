"""What the original's own repository knows of a workspace: which files are tracked, and rules from above it.

Its files are read, nothing of it is run. Where `.git` is a file (a linked worktree, a submodule) or
the workspace is a folder of a larger repository, it is found as git finds it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from backplane.workspace import git
from backplane.workspace.tree import GIT_NAME, opened, read_file

ANY_NAME: Final = "backplane-asks"
"""Asked about for a whole folder, as no rule but one for all of it names this."""

_POINTER_BYTES_MAX: Final = 8192
"""Longest `.git` file: one path."""


class Repository(msgspec.Struct, frozen=True):
    """What was read of a repository."""

    git_dir: Path | None = None
    """Where its index is; None where there is no repository."""
    common: Path | None = None
    """The folder of its refs and objects; a linked worktree shares it with the main one."""
    excluded: bytes = b""
    """The user's own ignore rules, and after them those of `info/exclude`, which are stronger."""
    prefix: str = ""
    """Path of the workspace below the repository's top, with a slash at the end."""
    above: Mapping[str, bytes] = {}
    """`.gitignore`s of the folders above the workspace, by folder below the top."""

    def beside(self, users: bytes) -> Repository:
        """Return this repository with the user's rules added."""
        if not ruling(users):
            return self
        return msgspec.structs.replace(self, excluded=users.rstrip(b"\n") + b"\n" + self.excluded)

    @property
    def carried(self) -> bytes:
        """What a copy's own `info/exclude` is to hold: this one's, and those rules from above that know no place."""
        lines = (line for text in self.above.values() for line in text.splitlines())
        return b"".join(
            [
                self.excluded and self.excluded.rstrip(b"\n") + b"\n",
                *(line + b"\n" for line in lines if b"/" not in line.strip().rstrip(b"/")),
            ]
        )

    def tracked(self, scratch: git.Scratch) -> Collection[str] | None:
        """Tracked files of the workspace; None where that cannot be known."""
        if self.git_dir is None:
            return ()
        found, at = git.tracked(scratch, self.git_dir), len(self.prefix)
        return found and {path[at:] for path in found if path.startswith(self.prefix)}

    def ignored(self, scratch: git.Scratch, paths: Iterable[str], rules: Mapping[str, bytes]) -> set[str]:
        """Which of these files of the workspace are ignored by its rules and by those above it."""
        if not (rules or self.above or self.excluded):
            return set()
        at = len(self.prefix)
        below = {self.prefix + folder: text for folder, text in rules.items()}
        asked = [self.prefix + path for path in paths]
        return {path[at:] for path in git.ignored(scratch, asked, {**self.above, **below}, self.excluded)}

    def obeyed(self, scratch: git.Scratch) -> Repository:
        """Itself, without rules that leave out the whole workspace: whoever works there means it."""
        if self.prefix and self.ignored(scratch, [ANY_NAME], {}):
            return msgspec.structs.replace(self, above={}, excluded=b"")
        return self


NONE: Final = Repository()
"""One for all workspaces without a repository."""


def find(root: Path) -> Repository:
    """Look for the repository that a folder is the top of, or is in."""
    if os.path.lexists(root / GIT_NAME):
        return _read(root)
    top = _top_above(root)
    if top is None:
        return NONE
    parts = [f"{part}/" for part in root.relative_to(top).parts]
    folders = ("".join(parts[:count]) for count in range(len(parts)))
    above = {folder: text for folder in folders if (text := _rules(top / folder, git.RULES_NAME))}
    return msgspec.structs.replace(_read(top), prefix="".join(parts), above=above)


def _top_above(root: Path) -> Path | None:
    """The nearest folder above with a repository, on the same file system and nobody else's."""
    with suppress(OSError):
        facts = root.stat()
        for folder in root.parents:
            if folder.stat().st_dev != facts.st_dev:
                return None
            place = folder / GIT_NAME
            if os.path.lexists(place):
                ours = place.stat().st_uid in (os.geteuid(), facts.st_uid)
                return folder if ours and (place.is_file() or (place / "HEAD").is_file()) else None
    return None


def _rules(folder: Path, name: str) -> bytes:
    """Read a file of rules; empty also where it has only comments, as git's own template."""
    return ruling(git.without_holes(_short(folder, name, git.RULES_BYTES_MAX)))


def ruling(rules: bytes) -> bytes:
    """Return rules as they are, or nothing if they are comments alone."""
    return rules if any(line.strip() and not line.startswith(b"#") for line in rules.splitlines()) else b""


def _short(folder: Path, name: str, bytes_max: int) -> bytes:
    """Read a file; empty where there is none that is plain and short."""
    with suppress(OSError), opened(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as handle:
        found = read_file(handle, name, bytes_max)
        return found[0] if found else b""
    return b""


def _read(top: Path) -> Repository:
    place = _pointed(top, GIT_NAME, b"gitdir: ") if (top / GIT_NAME).is_file() else top / GIT_NAME
    common = _pointed(place, "commondir") if os.path.lexists(place / "commondir") else place
    return Repository(place, common, _rules(common / "info", "exclude"))


def _pointed(folder: Path, name: str, before: bytes = b"") -> Path:
    """Where a file with one path leads; a folder that is not there when it says none."""
    said = _short(folder, name, _POINTER_BYTES_MAX)
    if said.startswith(before) and b"\0" not in said:
        return folder / os.fsdecode(said.removeprefix(before).rstrip(b"\r\n"))
    return folder / name / "none"
