"""Turns the policy's rules on files into mounts, which hide paths or make them read-only.

Rules are globs, but mounts need existing paths. So a tree is searched once, before the host starts; paths made later
are a gap, which the receipt names.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from backplane.contract.work import PolicyProfile
from backplane.errors import PolicyError
from backplane.policy.globs import Globs, compile_globs
from backplane.sandbox.credentials import Covered, below, outermost, within

MASKS_MAX: Final = 256
"""Limit of mounts for one run, about 0.1 ms each. Rules that need more are left to the next layer."""

FILES_MAX: Final = 200_000
"""Limit of files searched for one run, in about 1 s. The rules on a larger tree are left to the next layer."""

LINKED_FILES_MAX: Final = 100_000
"""Limit of files searched behind links to folders, for one run; beyond it, the link is a gap."""

NAMED_MAX: Final = 5
"""Number of links that a gap names."""

HOME_DEPTH: Final = 2
"""Depth of the search in the home folder: keys and tokens lie in `~/.x/y`."""

HOME_FILES_MAX: Final = 50_000
"""Limit of entries searched in the home folders, in about 0.25 s. Beyond it, no rule is enforced there."""

BLANK: Final = str(Path(__file__).with_name("blank"))
"""Path of an empty file to mount over a covered store; many programs fail on `/dev/null`."""

_PROBE: Final = "\x01"
"""A name that no file has: a glob that matches it in a folder matches every file of that folder."""

LATER: Final = "what is made during the run"
LINKS: Final = "links to a folder around the workspace, or to too many files"
HISTORY: Final = "what git keeps of them"
ELSEWHERE: Final = "what lies outside the workspace, but for the top of the home folder"
TOO_MANY: Final = (
    f"more than {MASKS_MAX} places to cover, more than {FILES_MAX} files to look at, or folders that cannot be listed"
)


class Masks(msgspec.Struct, frozen=True):
    """The mounts that enforce the rules on files, in the order to make them, and their gaps."""

    options: tuple[str, ...] = ()
    """Bubblewrap's options for the mounts."""
    read_gap: str = ""
    write_gap: str = ""
    hidden: frozenset[str] = frozenset()
    """Files and folders that the host cannot read; the contents of such a folder are not listed."""
    unmatched: tuple[str, ...] = ()
    """Patterns of `deny_write` that matched nothing at the start, so that no mount enforces them."""
    complete: bool = True
    """False if the trees have too many paths to search or cover; then the mounts enforce no rule there."""
    covers_outside: bool = True
    """True if mounts hide every path in the home folders that matches a pattern of `deny_read`."""
    uncovered: tuple[str, ...] = ()
    """Links that `deny_read` names and whose target no mount can cover."""


_KNOWN_EARLY: Final = frozenset(f"{deep}.git/{path}" for deep in ("", "**/") for path in ("hooks/**", "config", "**"))
"""Globs whose matches are known early: the first files of a copy (`StateFolder.make_tree`), or git's whole folder."""


def needs_tree(profile: PolicyProfile) -> bool:
    """Return True if the mounts can be planned only after the copy is complete."""
    return bool(profile.deny_read) or not _KNOWN_EARLY.issuperset(profile.deny_write)


def work_out(
    profile: PolicyProfile,
    root: str,
    seen_elsewhere: tuple[str, ...],
    homes: tuple[str, ...],
    stores: Covered = Covered(),  # noqa: B008  # frozen
) -> Masks:
    """Plan the mounts that enforce the rules on files in `root` and hide credentials. Blocking.

    Args:
        root: the workspace; absolute, links followed.
        seen_elsewhere: other readable trees with the same files, such as the original of a staged one.
        homes: home folders of the user and of the agent.
        stores: credential stores, which are covered even if the rules need too many mounts.
    """
    if not (profile.deny_read or profile.deny_write):
        return Masks(_covers(stores.places, stores), hidden=frozenset(stores.places))
    reads, writes = compile_globs(profile.deny_read), compile_globs(profile.deny_write)
    outside, inside = _outside(root, homes, reads), _inside(root, seen_elsewhere, homes, reads, writes)
    hidden = {**stores.places, **(outside or {})}
    covers_outside = outside is not None
    found, fixed, uncovered = inside or ({}, [], [])
    # Mounted, too, so that they cannot be moved away with their contents.
    above = _ancestors(root, [*found, *fixed])
    if inside is None or len(hidden) + len(found) + len(fixed) + len(above) > len(stores.places) + MASKS_MAX:
        options, kept = _covers(hidden, stores), frozenset(hidden)
        return Masks(options, TOO_MANY, TOO_MANY, kept, complete=False, covers_outside=covers_outside)
    hidden |= found
    more = [HISTORY] if any(map(_in_repository, seen_elsewhere or (root,))) else []
    more += [f"{LINKS}: {', '.join(uncovered[:NAMED_MAX])}"] if uncovered else []
    own = [word for path in above for word in ("--bind", path, path)]
    own += [word for path in fixed for word in ("--ro-bind", path, path)]
    return Masks(
        (*own, *_covers(hidden, stores)),
        read_gap="; ".join((ELSEWHERE if covers_outside else TOO_MANY, LATER, *more)) if profile.deny_read else "",
        write_gap=LATER if profile.deny_write and not _whole(writes) else "",
        hidden=frozenset(hidden),
        unmatched=_unmatched(writes, root, [*found, *fixed]),
        covers_outside=covers_outside,
        uncovered=tuple(uncovered),
    )


def _inside(
    root: str, seen_elsewhere: tuple[str, ...], homes: tuple[str, ...], reads: Globs, writes: Globs
) -> tuple[dict[str, bool], list[str], list[str]] | None:
    """Search the trees for paths that match the rules.

    Returns:
        Paths that may not be read → True for a folder; paths that may not be written; and links that `deny_read` names
        and whose target no mount can cover. None if there are too many files to search.
    """
    hidden: dict[str, bool] = {}
    uncovered: dict[str, None] = {}
    try:
        for tree in (root, *(seen_elsewhere if reads else ())):
            found, links = _named(tree, reads, outside=True, open_folders=(root, tree, *homes))
            hidden |= found
            uncovered |= dict.fromkeys(links)
        written, _ = _named(root, writes, outside=False, open_folders=(root,))
    except (OverflowError, PolicyError):
        return None
    # Nothing outside the root can be written anyway.
    return hidden, sorted(path for path in written if path not in hidden and within(path, root)), list(uncovered)


def _outside(root: str, homes: tuple[str, ...], reads: Globs) -> dict[str, bool] | None:
    """Find unreadable paths in the first `HOME_DEPTH` levels of the home folders; a link counts as its target.

    Returns:
        Path → True for a folder; None if there are too many paths to search or cover.
    """
    found: dict[str, bool] = {}
    waiting = [(home, 0) for home in homes if reads and not below(home, root)]
    count = 0
    try:
        while waiting:
            folder, depth = waiting.pop()
            for entry in _entries(folder):
                count += 1
                is_link, real, is_folder = _lead(entry)
                if real is not None and reads.matches(entry.path) is not None:
                    if not within(root, real):  # A folder around the workspace stays open: the user works there.
                        found[real] = is_folder
                elif is_folder and not is_link and depth + 1 < HOME_DEPTH:
                    waiting.append((entry.path, depth + 1))
            if count > HOME_FILES_MAX:
                return None
    except (OverflowError, PolicyError):
        return None
    return found if len(found) <= MASKS_MAX else None


def _covers(hidden: Mapping[str, bool], stores: Covered) -> tuple[str, ...]:
    """Return the options that mount an empty folder or file over each path."""
    options: list[str] = []
    for path, is_folder in outermost(hidden).items():
        if is_folder:
            options += ("--perms", "0555", "--tmpfs", path, "--remount-ro", path)
        else:  # `/dev/null` cannot be opened on a mount without devices; a covered store reads as empty instead.
            options += ("--ro-bind", BLANK if path in stores.places else "/dev/null", path)
    return tuple(options)


def _unmatched(writes: Globs, root: str, covered: list[str]) -> tuple[str, ...]:
    """Return the patterns that name none of the covered paths."""
    if root in covered:
        return ()
    paths = [path[len(root.rstrip("/")) + 1 :] for path in covered if below(path, root)]
    return tuple(one for one in writes.patterns if not any(_names(_alone(one), path) for path in paths))


@functools.lru_cache(maxsize=64)
def _alone(pattern: str) -> Globs:
    return compile_globs([pattern])


def _names(globs: Globs, path: str) -> bool:
    """Return True if the globs match `path`, or everything in it."""
    return globs.matches(path) is not None or globs.matches(f"{path}/{_PROBE}") is not None


def _whole(globs: Globs) -> bool:
    return globs.matches(_PROBE) is not None


def _named(
    root: str, globs: Globs, *, outside: bool, open_folders: tuple[str, ...]
) -> tuple[dict[str, bool], list[str]]:
    """Find the topmost paths below `root` that the globs match; a matching link counts as its target.

    A folder behind a link is searched once, under the path of the first link to it.

    Args:
        outside: also search folders outside of the root to which links lead.
        open_folders: folders that stay open, with the folders around them.

    Returns:
        The paths, absolute → True for a folder; and the links whose target no mount can cover, by their path in the
        tree.

    Raises:
        OverflowError: there are too many files, or we cannot open a folder that the agent may be able to open.
    """
    found: dict[str, bool] = {}
    uncovered: list[str] = []
    if not globs or _whole(globs):
        return {root: True} if globs else found, uncovered
    counts, seen = {False: 0, True: 0}, {root}
    in_root = not all(map(_SAME_ANYWHERE.fullmatch, globs.patterns))
    # Each folder's path as rules see it, its real path, and the path of the link that led to it, or "".
    waiting = [("", root, "")]
    while waiting:
        prefix, folder, link = waiting.pop()
        for entry in _entries(folder):
            counts[bool(link)] += 1
            if counts[False] > FILES_MAX:
                raise OverflowError
            if counts[True] > LINKED_FILES_MAX:
                uncovered.append(link)
                waiting = [place for place in waiting if not place[2]]
                break
            path, (is_link, real, is_folder) = prefix + entry.name, _lead(entry)
            if real is None or (link and real in seen):
                continue
            if _names(globs, path) if is_folder else globs.matches(path) is not None:
                if (is_link or link) and any(within(one, real) for one in open_folders):
                    uncovered.append(path)
                else:
                    found[real] = is_folder
            elif is_folder and not is_link:
                waiting.append((f"{path}/", real, link))
            elif is_folder and real not in seen and (in_root if below(real, root) else outside):
                seen.add(real)
                waiting.append((f"{path}/", real, link or path))
    return outermost(found), uncovered


_SAME_ANYWHERE: Final = re.compile(r"\*\*/(?:\*?[^*?\[\]{}/]+|[^*?\[\]{}/]+\*)")
"""Globs that match by a file's name only: for them, a link within the tree leads to no further matches."""


def _lead(entry: os.DirEntry[str]) -> tuple[bool, str | None, bool]:
    """Return whether an entry is a link, its path with links followed, and whether that is a folder.

    The path of a link is None if its target is missing, or in /proc or /dev.
    """
    if not entry.is_symlink():
        return False, entry.path, entry.is_dir(follow_symlinks=False)
    try:
        real = os.path.realpath(entry.path, strict=True)
    except (OSError, ValueError):  # The target is missing, or neither we nor the agent can reach it.
        return True, None, False
    return (True, None, False) if real.startswith(("/proc/", "/dev/")) else (True, real, os.path.isdir(real))


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (PermissionError, FileNotFoundError, NotADirectoryError):  # It is gone, or closed to us and the agent.
        return []
    except OSError as error:  # The agent can still reach a path longer than PATH_MAX by `cd`.
        raise OverflowError from error


def _in_repository(path: str) -> bool:
    while not (found := os.path.lexists(os.path.join(path, ".git"))) and path != (above := os.path.dirname(path)):
        path = above
    return found


def _ancestors(root: str, paths: list[str]) -> list[str]:
    """Return the folders between the root and these paths."""
    found: set[str] = set()
    for path in paths:
        while below(path, root) and (path := os.path.dirname(path)) != root:
            found.add(path)
    return sorted(found)
