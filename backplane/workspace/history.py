"""The history of a staged copy: HEAD, refs and index of the original, and its objects by alternates.

The original is only read: nothing in it is run or written. Where the history cannot be shared, or has a
path that the agent may not read, `Unshared` says why; the copy then gets a repository of one commit (`pack`).
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from backplane.errors import PolicyError, WorkspaceError
from backplane.policy.globs import Globs
from backplane.workspace import git
from backplane.workspace.copying import copy_whole
from backplane.workspace.pack import AGENT_FOLDERS, AGENT_USER, INDEX_HEAD, Leaf, set_index_facts
from backplane.workspace.repository import Repository, find
from backplane.workspace.tree import GIT_NAME, opened, parent, printable, read_file

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

_KNOWN_EXTENSIONS: Final = {"noop", "objectformat", "preciousobjects", "relativeworktrees", "worktreeconfig"}
_OWN_PATHS: Final = (f"{GIT_NAME}/objects/info/alternates", f"{GIT_NAME}/packed-refs")
"""A rule that names these closes git's own folder, in the original and in the copy."""

_SPARSE: Final = b"sdir\0\0\0\0"
"""The extension of an index that has folders in place of their files: git needs the trees to read it."""

_WORD: Final = re.compile(r"[a-z]{1,10}")
_ODD: Final = re.compile(r"[\s\x00-\x1f]|\.\.|^(?!refs/)")


class Unshared(Exception):
    """The original's history is not shared with its copy; the text says why."""


class History(msgspec.Struct, frozen=True):
    """The parts of a repository from which its copy is made."""

    objects: Path
    """The original's object folder."""
    head: bytes
    refs: Mapping[str, str]
    """Full name → object, or `ref: NAME` for a symbolic one."""
    shallow: bytes
    config: str
    index: bytes
    """Version 2 or 3, without extensions and checksum; empty if there is none."""
    index_ns: int
    """When the original's index was written."""
    oid_bytes: int

    def paths(self) -> Iterator[str]:
        """Paths of the index."""
        return (path for _, path in _entries(self.index, self.oid_bytes))

    def fresh_index(
        self, leaves: Mapping[str, Leaf], facts: Mapping[str, tuple[os.stat_result, os.stat_result]]
    ) -> bytes:
        """Return the index with the times of the copy's files wherever they have the content that it names.

        Args:
            leaves: content of each file, as git names it without filters.
            facts: `lstat` of each file in the original and in the copy.
        """
        if not self.index:
            return b""
        found = bytearray(self.index)
        for at, path in _entries(self.index, self.oid_bytes):
            head = struct.unpack_from(">10I", found, at)
            known = facts.get(path)
            same = known is not None and self._is_same(found, at, head, leaves.get(path), *known)
            set_index_facts(found, at, known[1] if same and known is not None else None)
        new = hashlib.sha256 if self.oid_bytes == 32 else hashlib.sha1
        return bytes(found) + new(found, usedforsecurity=False).digest()

    def _is_same(
        self,
        index: bytearray,
        at: int,
        head: tuple[int, ...],
        leaf: Leaf | None,
        before: os.stat_result,
        copied: os.stat_result,
    ) -> bool:
        """Return True if a file has the content of its entry: by name, or as the original's index says so."""
        oid = bytes(index[at + 40 : at + 40 + self.oid_bytes])
        if leaf is not None and leaf.mode == head[6] and leaf.oid == oid:
            return True
        # Filters (LFS, line ends) make other contents; then git's own judgement of the original counts.
        times = (*divmod(before.st_ctime_ns, 10**9), *divmod(before.st_mtime_ns, 10**9))
        seen = (*times, before.st_ino & 0xFFFFFFFF, before.st_size & 0xFFFFFFFF)
        copied_whole = (copied.st_mtime_ns, copied.st_size) == (before.st_mtime_ns, before.st_size)
        return copied_whole and seen == (*head[:4], head[5], head[9]) and before.st_mtime_ns < self.index_ns


def _entries(index: bytes, oid_bytes: int) -> Iterator[tuple[int, str]]:
    """Yield place and path of each entry."""
    for at, end in _places(index, oid_bytes):
        yield at, os.fsdecode(index[_name_at(index, at, oid_bytes) : end])


def _places(index: bytes, oid_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield where each entry of an index of version 2 or 3 begins, and where its name ends."""
    at = INDEX_HEAD.size
    for _ in range(INDEX_HEAD.unpack_from(index)[2] if index else 0):
        end = index.index(b"\0", _name_at(index, at, oid_bytes))
        yield at, end
        at += (end - at) // 8 * 8 + 8


def _name_at(index: bytes, at: int, oid_bytes: int) -> int:
    """Return where the name of an entry begins: flags are two bytes, extended ones four."""
    flags_at = at + 40 + oid_bytes
    return flags_at + (4 if index[flags_at] & 0x40 else 2)


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
        lines = _text(Path(real) / "info", "alternates").splitlines()
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


def read(known: Repository, at: git.Scratch, selection: Selection) -> History:
    """Read what the copy of a repository's top folder needs.

    Raises:
        Unshared: the history cannot be shared, or has a path that the selection leaves out.
        WorkspaceError: the work was stopped.
    """
    ours = at.git_dir  # Made here: a full disk is no fault of that repository.
    try:
        found = _read(known, at, ours)
        if selection.denied or selection.include is not None:
            _check_paths(at, found, selection)
    except (WorkspaceError, OSError) as error:
        if at.stopped():
            raise
        said = error.message if isinstance(error, WorkspaceError) else f"{error.filename}: {error.strerror}"
        raise Unshared(f"its repository cannot be read: {printable(said)}") from error
    return found


def _read(known: Repository, at: git.Scratch, ours: Path) -> History:
    assert known.git_dir is not None
    assert known.common is not None
    if known.prefix:
        raise Unshared(f"the workspace is the folder '{printable(known.prefix)}' of a larger repository")
    head = _HEAD.fullmatch(_text(known.git_dir, "HEAD"))
    if head is None:
        raise Unshared("its '.git' has no HEAD, as in a copy from another machine")
    objects = Path(os.path.realpath(known.common / "objects"))
    if not objects.is_dir() or "\n" in str(objects):
        raise Unshared("git's folder of objects is missing")
    settings = _settings(known.common, at)
    sha256 = settings.get("extensions.objectformat") == "sha256"
    refs, shallow = _refs(known.common), _text(known.common, "shallow")
    at.read_as(sha256=sha256)
    index, index_ns = _index(known.git_dir, at, 32 if sha256 else 20)
    at.borrow(objects)
    write_refs(ours, head[0].strip(), refs, shallow)
    unborn = head["ref"] is not None and os.fsdecode(head["ref"]) not in refs
    if not unborn and at.git("rev-parse", "-q", "--verify", "HEAD^{tree}", codes=range(256)).code != 0:
        raise Unshared("the commit of its HEAD cannot be read")
    return History(
        objects=objects,
        head=head[0].strip(),
        refs=refs,
        shallow=shallow,
        config=_config(settings, sha256=sha256),
        index=index,
        index_ns=index_ns,
        oid_bytes=32 if sha256 else 20,
    )


def _text(folder: Path, name: str) -> bytes:
    """Read one of git's short files; empty if it is missing or no plain file."""
    with suppress(OSError), opened(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as handle:
        found = read_file(handle, name, _TEXT_BYTES_MAX)
        return found[0] if found else b""
    return b""


def _settings(common: Path, at: git.Scratch) -> dict[str, str]:
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


def _config(settings: Mapping[str, str], *, sha256: bool) -> str:
    """Return the configuration of the copy's repository."""
    own = {name: value for name in _CARRIED if _WORD.fullmatch(value := settings.get(f"core.{name}", ""))}
    core = {"repositoryformatversion": "1" if sha256 else "0", "bare": "false", "logallrefupdates": "true", **own}
    lines = "".join(f"\t{name} = {value}\n" for name, value in core.items())
    return f"[core]\n{lines}{AGENT_USER}" + ("[extensions]\n\tobjectformat = sha256\n" if sha256 else "")


def _refs(common: Path) -> dict[str, str]:
    """Read packed and loose refs; raises `Unshared` if they are too many, OSError if a folder cannot be read."""
    found: dict[str, str] = {}
    for line in _text(common, "packed-refs").splitlines():
        oid, _, name = line.partition(b" ")
        if _OID.fullmatch(oid) and name.startswith(b"refs/"):
            found[os.fsdecode(name)] = oid.decode()
    for folder, _, files in os.walk(common / "refs"):
        for file in files:
            said = _HEAD.fullmatch(_text(Path(folder), file))
            if said and not file.endswith(".lock"):
                found[os.path.relpath(os.path.join(folder, file), common)] = os.fsdecode(said[0].strip())
        if len(found) > REFS_MAX:
            raise Unshared(f"it has more than {REFS_MAX} refs")
    return {name: oid for name, oid in found.items() if not name.startswith(_OWN_REFS) and not _ODD.search(name)}


def write_refs(git_dir: Path, head: bytes, refs: Mapping[str, str], shallow: bytes) -> None:
    """Write HEAD, refs and the ends of a shallow history into a new repository."""
    packed = sorted(f"{oid} {name}\n" for name, oid in refs.items() if not oid.startswith("ref: "))
    (git_dir / "packed-refs").write_bytes(os.fsencode("".join(packed)))
    (git_dir / "HEAD").write_bytes(head + b"\n")
    if shallow:
        (git_dir / "shallow").write_bytes(shallow)
    for name, target in refs.items():
        if target.startswith("ref: "):
            path = git_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.fsencode(target + "\n"))


def write_repository(git_dir: Path, history: History, index: bytes, excluded: bytes) -> None:
    """Make a repository that continues the original's history.

    Args:
        git_dir: the new `.git`; its config and its folder of hooks may be there already.
        index: whole, or empty.
        excluded: content of `info/exclude`.
    """
    for name in AGENT_FOLDERS:
        (git_dir / name).mkdir(parents=True, exist_ok=True)
    (git_dir / "objects/info/alternates").write_bytes(os.fsencode(history.objects) + b"\n")
    write_refs(git_dir, history.head, history.refs, history.shallow)
    (git_dir / "config").write_text(history.config)
    (git_dir / "info/exclude").write_bytes(excluded)
    if index:
        (git_dir / "index").write_bytes(index)


def _index(git_dir: Path, at: git.Scratch, oid_bytes: int) -> tuple[bytes, int]:
    """Read an index of any form as one of version 2 or 3, and when it was written."""
    index, copy = git_dir / "index", at.git_dir / "index"
    if not os.path.lexists(index):
        return b"", 0
    written_ns = index.stat().st_mtime_ns
    copy_whole(index, copy)
    copy.chmod(0o600)
    git.copy_shared(git_dir, at.git_dir)
    if _SPARSE in copy.read_bytes():
        raise Unshared("its index is sparse; set index.sparse to false, then `git sparse-checkout reapply`")
    at.git("update-index", "--no-split-index", "--index-version", "2", "--force-write-index")
    data = copy.read_bytes()
    end = INDEX_HEAD.size
    for start, name_end in _places(data, oid_bytes):
        end = start + (name_end - start) // 8 * 8 + 8
    return data[:end], written_ns


def _check_paths(at: git.Scratch, found: History, selection: Selection) -> None:
    """Look at every path that the index or a commit has; raises `Unshared` for the first that is left out."""
    judged: dict[str, bool] = {"": False}

    def is_hidden(path: str) -> bool:
        if path not in judged:
            judged[path] = is_hidden(parent(path)[:-1]) or selection.hides(path)
        return judged[path]

    if any(map(is_hidden, _OWN_PATHS)):
        raise Unshared("a rule closes git's own folder")
    for path in (*found.paths(), *_paths_of_commits(at)):
        missed = selection.include is not None and selection.include.matches(path) is None
        if missed or is_hidden(path):
            raise Unshared(
                f"'{printable(path)}' is in it, which {'is not copied' if missed else 'the agent may not have'}"
            )


def _paths_of_commits(at: git.Scratch) -> Iterator[str]:
    """Yield every path that a commit added, from all refs and HEAD.

    Every path was added by some commit: compared with its only parent, with none, or in a merge with all parents.
    """
    names = at.folder / "names"
    words = (
        "log",
        "--all",
        "--format=",
        "--name-only",
        "-z",
        "--no-renames",
        "--diff-filter=A",
        "--diff-merges=combined",
    )
    settings = {"GIT_NO_REPLACE_OBJECTS": "1"}
    at.git(*words, settings=settings, stdout_path=names, timeout_s=LOG_S_MAX)
    for raw in set(names.read_bytes().split(b"\0")):
        if raw:
            yield os.fsdecode(raw)
