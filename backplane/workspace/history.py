"""The history of a staged copy: HEAD, refs and index of the original, and its objects by alternates.

The original is only read: nothing in it is run or written. Where the history cannot be shared, or has a path that the
agent may not read, `Unshared` says why; the copy then gets a repository of one commit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from backplane.errors import PolicyError, WorkspaceError
from backplane.policy.globs import Globs
from backplane.workspace.copying import copy_whole
from backplane.workspace.repo import Repo
from backplane.workspace.repository import Repository, copy_index, find
from backplane.workspace.tree import GIT_NAME, parent, printable, read_short

LOG_S_MAX: Final = 5.0
"""Seconds for the search of all commits for paths that may not be read; 2,000 commits take 0.1."""

REFS_MAX: Final = 100_000
"""Refs of one repository; the largest public ones have some ten thousand."""

ALTERNATES_DEPTH: Final = 5
"""Object folders that name further ones; git follows as many."""

_TEXT_BYTES_MAX: Final = 64 << 20
_OID: Final = re.compile(rb"(?:[0-9a-f]{40}|[0-9a-f]{64})")
_HEAD: Final = re.compile(rb"(?:ref: (?P<ref>refs/[^\s\x00-\x1f]+)|[0-9a-f]{40}|[0-9a-f]{64})\s*")
_OWN_REFS: Final = ("refs/bisect/", "refs/worktree/", "refs/rewritten/")
"""Refs of one work tree's unfinished work, which does not come along."""

_CARRIED: Final = ("autocrlf", "eol", "filemode", "ignorecase", "precomposeunicode", "safecrlf", "symlinks")
"""Settings of `core` that decide how a file is compared; none of them names a program."""

_COMPARED: Final = {"trustctime": "false", "checkstat": "minimal", "untrackedcache": "false"}
"""Settings of the copy's `core`: its files have the original's times and sizes, and so are as fresh as the index says.
Filters (LFS, line ends) are not run there, so git's own judgement of the original counts."""

_KNOWN_EXTENSIONS: Final = {"noop", "objectformat", "preciousobjects", "relativeworktrees", "worktreeconfig"}
_OWN_PATHS: Final = (f"{GIT_NAME}/objects/info/alternates", f"{GIT_NAME}/packed-refs")
"""A rule that names these closes git's own folder, in the original and in the copy."""

_SPARSE: Final = b"sdir\0\0\0\0"
"""The extension of an index that has folders in place of their files: git needs the trees to read it."""

_WORD: Final = re.compile(r"[a-z]{1,10}")
_ODD: Final = re.compile(r"[\s\x00-\x1f]|\.\.|^(?!refs/)")

# With a folder of hooks, so that a sandbox can close it: a missing folder cannot be closed.
AGENT_FOLDERS: Final = ("refs/heads", "refs/tags", "info", "objects/info", "objects/pack", "hooks")


class Unshared(Exception):
    """The original's history is not shared with its copy; the text says why."""


class History(msgspec.Struct, frozen=True):
    """The parts of a repository from which its copy is made."""

    git_dir: Path
    """The original's, with its index."""
    objects: Path
    """The original's object folder."""
    head: bytes
    refs: Mapping[str, str]
    """Full name → object, or `ref: NAME` for a symbolic one."""
    shallow: bytes
    config: str

    def write(self, git_dir: Path) -> None:
        """Fill a repository's folder, so that it continues this history."""
        (git_dir / "objects/info/alternates").write_bytes(os.fsencode(self.objects) + b"\n")
        self.write_refs(git_dir)
        (git_dir / "config").write_text(self.config)
        if (self.git_dir / "index").exists():
            copy_index(self.git_dir, git_dir)

    def write_refs(self, git_dir: Path) -> None:
        """Write HEAD, refs and the ends of a shallow history."""
        packed = sorted(f"{oid} {name}\n" for name, oid in self.refs.items() if not oid.startswith("ref: "))
        (git_dir / "packed-refs").write_bytes(os.fsencode("".join(packed)))
        (git_dir / "HEAD").write_bytes(self.head + b"\n")
        if self.shallow:
            (git_dir / "shallow").write_bytes(self.shallow)
        for name, target in self.refs.items():
            if target.startswith("ref: "):
                path = git_dir / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(os.fsencode(target + "\n"))


def write_one_commit(git_dir: Path, repo: Repo, ref: str) -> None:
    """Fill a repository's folder with the one commit of our own repository; it gets a copy of the pack."""
    for path in (repo.folder / "objects/pack").iterdir():
        copy_whole(str(path), str(git_dir / "objects/pack" / path.name))
    (git_dir / "HEAD").write_text("ref: refs/heads/main\n")
    copy_whole(str(repo.folder / "refs/heads" / ref), str(git_dir / "refs/heads/main"))
    (git_dir / "config").write_text(_config({}, sha256=repo.sha256, compared={}))
    repo.git("read-tree", "HEAD", settings={"GIT_DIR": str(git_dir)})


def object_folders(root: str | Path) -> tuple[str, ...]:
    """Return the object folders of a repository, links followed.

    Args:
        root: its top folder; the result is empty for any other one.
    """
    known = find(Path(root))
    found: dict[str, None] = {}
    waiting = [(known.common / "objects", 0)] if known.common is not None and not known.prefix else []
    while waiting:
        folder, depth = waiting.pop()
        real = os.path.realpath(folder)
        if real in found or depth > ALTERNATES_DEPTH or not os.path.isdir(real):
            continue
        found[real] = None
        lines = _text(Path(real, "info/alternates")).splitlines()
        waiting += [(Path(real, os.fsdecode(line)), depth + 1) for line in lines if line and not line.startswith(b"#")]
    return tuple(found)


class Selection(msgspec.Struct, frozen=True):
    """The paths that a history may contain."""

    denied: tuple[Globs, ...]
    """Globs; a history with a path that one of them names, or a folder of it, is not shared."""
    include: Globs | None
    """Globs that have to name every path; None allows all."""

    def hides(self, path: str) -> bool:
        """Return True if a rule names this file or folder itself, or if that cannot be decided."""
        try:
            return any(globs.matches(path) is not None for globs in self.denied)
        except PolicyError:
            return True


def read(known: Repository, at: Repo, selection: Selection, tracked: Collection[str]) -> History:
    """Read what the copy of a repository's top folder needs.

    Args:
        at: a repository for our use, with the index; it becomes a copy of the history itself.
        tracked: paths of the index.

    Raises:
        Unshared: the history cannot be shared, or has a path that the selection leaves out.
        WorkspaceError: the work was stopped.
    """
    try:
        found = _read(known, at)
        if selection.denied or selection.include is not None:
            _check_paths(at, tracked, selection)
    except (WorkspaceError, OSError) as error:
        if at.stopped():
            raise
        said = error.message if isinstance(error, WorkspaceError) else f"{error.filename}: {error.strerror}"
        raise Unshared(f"its repository cannot be read: {printable(said)}") from error
    return found


def _read(known: Repository, at: Repo) -> History:
    assert known.git_dir is not None
    assert known.common is not None
    if known.prefix:
        raise Unshared(f"the workspace is the folder '{printable(known.prefix)}' of a larger repository")
    head = _HEAD.fullmatch(_text(known.git_dir / "HEAD"))
    if head is None:
        raise Unshared("its '.git' has no HEAD, as in a copy from another machine")
    objects = Path(os.path.realpath(known.common / "objects"))
    if not objects.is_dir() or "\n" in str(objects):
        raise Unshared("git's folder of objects is missing")
    if (at.folder / "index").exists() and _SPARSE in (at.folder / "index").read_bytes():
        raise Unshared("its index is sparse; set index.sparse to false, then `git sparse-checkout reapply`")
    config = _config(_settings(known.common, at), sha256=at.sha256, compared=_COMPARED)
    refs, shallow = _refs(known.common), _text(known.common / "shallow")
    found = History(known.git_dir, objects, head[0].strip(), refs, shallow, config)
    at.borrow(objects)
    found.write_refs(at.folder)
    unborn = head["ref"] is not None and os.fsdecode(head["ref"]) not in refs
    if not unborn and at.git("rev-parse", "-q", "--verify", "HEAD^{tree}", codes=range(256)).code != 0:
        raise Unshared("the commit of its HEAD cannot be read")
    return found


def _text(path: Path) -> bytes:
    """Read one of git's short files; empty if it is missing or no plain file."""
    return read_short(path, _TEXT_BYTES_MAX)


def _settings(common: Path, at: Repo) -> dict[str, str]:
    """Read the repository's own configuration as data; no git command obeys it."""
    if not (common / "config").is_file():
        return {}
    said = at.git("config", "--file", str(common / "config"), "--no-includes", "--list", "-z").stdout
    pairs = (line.partition("\n") for line in said.decode("utf-8", "surrogateescape").split("\0"))
    settings = {name: value.lower() if filled else "true" for name, filled, value in pairs if name}
    for name, value in settings.items():
        kind, _, word = name.partition(".")
        if word.endswith(("promisor", "partialclonefilter")) or name == "extensions.partialclone":
            raise Unshared("it is a partial clone: some of its objects lie at its remote")
        if kind == "extensions" and word not in _KNOWN_EXTENSIONS:
            raise Unshared(f"it needs git's extension '{printable(word)} = {printable(value)}'")
    return settings


def _config(settings: Mapping[str, str], *, sha256: bool, compared: Mapping[str, str]) -> str:
    """Return the configuration of the copy's repository."""
    own = {name: value for name in _CARRIED if _WORD.fullmatch(value := settings.get(f"core.{name}", ""))}
    first = {"repositoryformatversion": "1" if sha256 else "0", "filemode": "true", "bare": "false"}
    core = {**first, "logallrefupdates": "true", **own, **compared}
    lines = "".join(f"\t{name} = {value}\n" for name, value in core.items())
    user = "[user]\n\tname = agent\n\temail = agent@localhost\n"
    return f"[core]\n{lines}{user}" + ("[extensions]\n\tobjectformat = sha256\n" if sha256 else "")


def _refs(common: Path) -> dict[str, str]:
    """Read packed and loose refs; raises `Unshared` if they are too many, OSError if a folder cannot be read."""
    found: dict[str, str] = {}
    for line in _text(common / "packed-refs").splitlines():
        oid, _, name = line.partition(b" ")
        if _OID.fullmatch(oid) and name.startswith(b"refs/"):
            found[os.fsdecode(name)] = oid.decode()
    for folder, _, files in os.walk(common / "refs"):
        for file in files:
            said = _HEAD.fullmatch(_text(Path(folder, file)))
            if said and not file.endswith(".lock"):
                found[os.path.relpath(os.path.join(folder, file), common)] = os.fsdecode(said[0].strip())
        if len(found) > REFS_MAX:
            raise Unshared(f"it has more than {REFS_MAX} refs")
    return {name: oid for name, oid in found.items() if not name.startswith(_OWN_REFS) and not _ODD.search(name)}


def _check_paths(at: Repo, tracked: Collection[str], selection: Selection) -> None:
    """Look at every path that the index or a commit has; raises `Unshared` for the first that is left out."""
    judged: dict[str, bool] = {"": False}

    def is_hidden(path: str) -> bool:
        if path not in judged:
            judged[path] = is_hidden(parent(path)[:-1]) or selection.hides(path)
        return judged[path]

    if any(map(is_hidden, _OWN_PATHS)):
        raise Unshared("a rule closes git's own folder")
    for path in (*tracked, *_paths_of_commits(at)):
        missed = selection.include is not None and selection.include.matches(path) is None
        if missed or is_hidden(path):
            raise Unshared(
                f"'{printable(path)}' is in it, which {'is not copied' if missed else 'the agent may not have'}"
            )


def _paths_of_commits(at: Repo) -> Iterator[str]:
    """Yield every path that a commit added, from all refs and HEAD.

    Every path was added by some commit: compared with its only parent, with none, or in a merge with all parents.
    """
    names = at.folder / "names"
    words = ("log", "--all", "--format=", "--name-only", "-z", "--no-renames", "--diff-filter=A")
    settings = {"GIT_NO_REPLACE_OBJECTS": "1"}
    at.git(*words, "--diff-merges=combined", settings=settings, stdout_path=names, timeout_s=LOG_S_MAX)
    for raw in set(names.read_bytes().split(b"\0")):
        if raw:
            yield os.fsdecode(raw)
