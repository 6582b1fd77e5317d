"""Reads the original's own repository: which files are tracked, and which rules ignore others.

Its files are only read, and no program in it is started. A `.git` file (a linked worktree, a submodule) and a
repository above the workspace are found as git finds them.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from backplane.errors import BackendError, WorkspaceError
from backplane.process.tool import run_tool, search_path
from backplane.workspace.copying import copy_whole
from backplane.workspace.objects import Leaf
from backplane.workspace.repo import Repo
from backplane.workspace.tree import GIT_NAME, Listing, Scope, read_short, remove_tree

RULES_NAME: Final = ".gitignore"

RULES_BYTES_MAX: Final = 1 << 20
"""Maximum size in bytes of a file with ignore rules; a larger one is ignored. Usual ones have a few KiB."""

RULES_S_MAX: Final = 20.0
"""Maximum seconds for git to match a workspace's rules. A million files take some seconds; each `**/` in a rule doubles
the time."""

ANY_NAME: Final = "backplane-asks"
"""Name of a file that no rule matches, unless the rule ignores the whole folder."""

_POINTER_BYTES_MAX: Final = 8192
"""Maximum size in bytes of a `.git` file, which contains one path."""

Rules = Mapping[str, bytes]
"""The contents of `.gitignore` files, by folder (with a slash at the end)."""


class Repository(msgspec.Struct, frozen=True):
    """The repository that a workspace is the top of, or is in."""

    git_dir: Path | None = None
    """The folder with its index; None if there is no repository."""
    common: Path | None = None
    """The folder with its refs and objects, which linked worktrees share; None if there is no repository."""
    excluded: bytes = b""
    """The user's own ignore rules, and after them those of `info/exclude`, which are stronger."""
    prefix: str = ""
    """Path of the workspace below the repository's top, with a slash at the end."""
    above: Rules = {}
    """`.gitignore` files of the folders above the workspace, by folder below the top."""

    @property
    def carried(self) -> bytes:
        """The rules for `info/exclude` of a copy: `excluded`, and the rules from above that have no path."""
        above = (line for text in self.above.values() for line in text.splitlines())
        placeless = (line for line in above if b"/" not in line.strip().rstrip(b"/"))
        return b"".join(line + b"\n" for line in (*self.excluded.splitlines(), *placeless))

    @property
    def sha256(self) -> bool:
        """True if its objects have SHA-256 names."""
        words = read_short(self.common / "config", RULES_BYTES_MAX).lower().split() if self.common else []
        return b"objectformat=sha256" in words or (b"objectformat" in words and b"sha256" in words)

    def tracked(self, at: Repo) -> dict[str, Leaf | None] | None:
        """Return the tracked files of the workspace; None if they cannot be listed.

        Args:
            at: a repository that backplane made, with the same hash algorithm; its index is overwritten, then removed.

        Returns:
            Each path with its entry in the index; None for a path in conflict.
        """
        if self.git_dir is None:
            return {}
        index, ours = self.git_dir / "index", at.folder / "index"
        if not os.path.isfile(index):
            return {} if os.path.isdir(self.git_dir) and not os.path.lexists(index) else None
        try:
            copy_index(self.git_dir, at.folder)
            # Also a signal: git 2.39 crashes on an index of version 4 with the other hash.
            done = at.git("ls-files", "-s", "-z", codes=range(-64, 256), timeout_s=RULES_S_MAX)
        except OSError:
            return None
        finally:
            for path in (ours, *at.folder.glob("sharedindex.*")):
                path.unlink(missing_ok=True)
        return _tracked(done.stdout, self.prefix) if done.code == 0 else None

    def ignored(self, at: Repo, paths: Iterable[str], rules: Rules) -> set[str]:
        """Return the files that rules in the workspace or above it ignore."""
        asked = [self.prefix + path for path in paths]
        if not asked or not (rules or self.above or self.excluded):
            return set()
        below = {self.prefix + folder: text for folder, text in rules.items()}
        return {path[len(self.prefix) :] for path in _ask(at, asked, {**self.above, **below}, self.excluded)}

    def obeyed(self, at: Repo) -> Repository:
        """Return this repository without rules that ignore the whole workspace, because its user works there."""
        if self.prefix and self.ignored(at, [ANY_NAME], {}):
            return msgspec.structs.replace(self, above={}, excluded=b"")
        return self


def find(root: Path, users: bytes = b"") -> Repository:
    """Find the repository that a folder is the top of, or is in.

    Args:
        users: the user's own ignore rules.
    """
    if os.path.lexists(root / GIT_NAME):
        return _read(root, users)
    top = _top_above(root)
    if top is None:
        return Repository(excluded=_ruling(users))
    parts = [f"{part}/" for part in root.relative_to(top).parts]
    folders = ("".join(parts[:count]) for count in range(len(parts)))
    above = {folder: text for folder in folders if (text := _rules(top / folder / RULES_NAME))}
    return msgspec.structs.replace(_read(top, users), prefix="".join(parts), above=above)


def _top_above(root: Path) -> Path | None:
    """Return the nearest folder above with a repository, if it is on the same file system and of the same user."""
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


def _read(top: Path, users: bytes) -> Repository:
    place = _pointed(top, GIT_NAME, b"gitdir: ") if (top / GIT_NAME).is_file() else top / GIT_NAME
    common = _pointed(place, "commondir") if os.path.lexists(place / "commondir") else place
    rules = (_ruling(users), _rules(common / "info/exclude"))
    return Repository(place, common, b"".join(text.rstrip(b"\n") + b"\n" for text in rules if text))


def _pointed(folder: Path, name: str, before: bytes = b"") -> Path:
    """Read the path in a file; return a missing folder if the file has none."""
    said = read_short(folder / name, _POINTER_BYTES_MAX)
    if said.startswith(before) and b"\0" not in said:
        return folder / os.fsdecode(said.removeprefix(before).rstrip(b"\r\n"))
    return folder / name / "none"


def copy_index(git_dir: Path, to: Path) -> None:
    """Copy an index with its times, and the shared index to which it refers if it is split. Raises OSError."""
    for name in ("index", *(path.name for path in to.glob("sharedindex.*"))):
        (to / name).unlink(missing_ok=True)
    copy_whole(str(git_dir / "index"), str(to / "index"))
    for path in git_dir.glob("sharedindex.*"):
        with (git_dir / "index").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as index:
            named = index.find(bytes.fromhex(path.suffix[1:])) >= 0
        if named and path.is_file():
            copy_whole(str(path), str(to / path.name))


def _tracked(listed: bytes, prefix: str) -> dict[str, Leaf | None]:
    found: dict[str, Leaf | None] = {}
    for row in listed.split(b"\0")[:-1]:
        head, raw = row.split(b"\t", 1)
        path = os.fsdecode(raw)
        if path.startswith(prefix):
            mode, oid, stage = head.decode().split(" ")
            found[path[len(prefix) :]] = Leaf(int(mode, 8), oid) if stage == "0" else None
    return found


# Ignore rules ---------------------------------------------------------------------------------------------------------


def _rules(path: Path) -> bytes:
    return _ruling(read_short(path, RULES_BYTES_MAX))


def _ruling(rules: bytes) -> bytes:
    """Return the text of rules; empty if it has only comments, as git's template has."""
    return rules if any(line.strip() and not line.startswith(b"#") for line in rules.splitlines()) else b""


def read_rules(root: str, listing: Listing, scope: Scope) -> dict[str, bytes]:
    """Read every `.gitignore` of a tree that is a regular file of at most `RULES_BYTES_MAX`."""
    rules: dict[str, bytes] = {}
    for path, _ in listing.files:
        if path.endswith(RULES_NAME) and path.removesuffix(RULES_NAME)[-1:] in ("", "/"):
            scope.go_on()
            rules[path.removesuffix(RULES_NAME)] = read_short(Path(root, path), RULES_BYTES_MAX)
    return {folder: text for folder, text in rules.items() if text}


def _ask(at: Repo, paths: list[str], rules: Rules, excluded: bytes) -> set[str]:
    """Ask git which files are ignored, in a tree that has only copies of the rules.

    Git's `ls-files --ignored` in the workspace itself would wait at a pipe called `.gitignore`, and does not know the
    rules above the workspace.
    """
    shadow = at.folder / "rules"
    shadow.mkdir()
    for folder, text in rules.items():
        (shadow / folder).mkdir(parents=True, exist_ok=True)
        (shadow / folder / RULES_NAME).write_bytes(text)
    (at.folder / "info/exclude").write_bytes(excluded)
    # "./" is added, because git gives ":" at the start of a path a special meaning.
    asked = b"".join(b"./%s\0" % os.fsencode(path) for path in paths)
    settings = {"GIT_WORK_TREE": str(shadow)}
    slow = f"a rule with many '**/' takes git for ever: simplify it, or leave the '{RULES_NAME}' out with --exclude"
    words = ("check-ignore", "--no-index", "--stdin", "-z")
    # Exit code 1 says that none is ignored.
    answer = at.git(
        *words, settings=settings, stdin=asked, codes=(0, 1), cwd=shadow, timeout_s=RULES_S_MAX, slow=slow
    ).stdout
    remove_tree(shadow)
    return {os.fsdecode(path[2:]) for path in answer.split(b"\0") if path}


def find_ignored(
    original: Path, listing: Listing, tracked: Collection[str], scope: Scope, known: Repository, at: Repo
) -> set[str]:
    """Return the files of a workspace that are ignored and not tracked, also not by a repository below.

    Args:
        tracked: the workspace's own tracked files.
    """
    rules = read_rules(str(original), listing, scope)
    ignored = known.ignored(at, [path for path, _ in listing.files if path not in tracked], rules)
    folders = tuple(folder for folder in listing.repositories if folder)
    outer = {place: text for place, text in rules.items() if not place.startswith(folders)}
    hidden = known.ignored(at, [folder + ANY_NAME for folder in folders], outer)
    for folder in folders:
        below = {path for path in ignored if path.startswith(folder)}
        if below and folder + ANY_NAME not in hidden:
            nested = find(original / folder).tracked(at)
            ignored -= below if nested is None else {folder + path for path in nested}
    return ignored


def user_rules(environ: Mapping[str, str]) -> bytes:
    """Read the ignore rules that the user's or the system's git configuration names; empty without any.

    Raises:
        WorkspaceError: `workspace_staging_failed`, git is missing.
    """
    names = ("HOME", "XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM")
    env = {name: environ[name] for name in names if name in environ}
    # `GIT_DIR` is no repository, so git reads only the user's and the system's configuration.
    env |= {"PATH": search_path(environ), "GIT_DIR": os.devnull, "LC_ALL": "C"}
    git = shutil.which("git", path=env["PATH"]) or "git"
    words = ("config", "--includes", "--type=path", "-z", "--get", "core.excludesFile")
    try:
        named = run_tool([git, *words], env=env, cwd="/", timeout_s=RULES_S_MAX).stdout.rstrip(b"\0")
    except BackendError as error:
        if error.code == "sidecar_spawn_failed":
            fact = f"git config: {error.message}"
            raise WorkspaceError("workspace_staging_failed", fact, hint="install git") from error
        return b""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or "/", ".config")
    return read_short(Path(os.fsdecode(named) or os.path.join(home, "git/ignore")), RULES_BYTES_MAX)
