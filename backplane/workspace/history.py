"""Shares the original's history with its staged copy: HEAD, refs and index are copied, objects come by alternates.

The original is only read: nothing in it is run or written. If the history cannot be shared, or has a path that the
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
"""Maximum seconds to search all commits for paths that may not be read; 2,000 commits take 0.1 s."""

REFS_MAX: Final = 100_000
"""Maximum number of refs of one repository; the largest public ones have some ten thousand."""

ALTERNATES_DEPTH: Final = 5
"""Depth to which object folders that name further ones are followed; git's own limit."""

_TEXT_BYTES_MAX: Final = 64 << 20
_OID: Final = re.compile(rb"(?:[0-9a-f]{40}|[0-9a-f]{64})")
_HEAD: Final = re.compile(rb"(?:ref: (?P<ref>refs/[^\s\x00-\x1f]+)|[0-9a-f]{40}|[0-9a-f]{64})\s*")
_OWN_REFS: Final = ("refs/bisect/", "refs/worktree/", "refs/rewritten/")
"""Refs of one work tree's unfinished work; they are not copied."""

_CARRIED: Final = ("autocrlf", "eol", "filemode", "ignorecase", "precomposeunicode", "safecrlf", "symlinks")
"""Settings of `core` that decide how a file is compared; none of them names a program."""

_COMPARED: Final = {"trustctime": "false", "checkstat": "minimal", "untrackedcache": "false"}
"""Settings of the copy's `core`. Its files have the original's times and sizes, so git takes a file for unchanged if
the original's index does, without running filters (LFS, line ends)."""

_KNOWN_EXTENSIONS: Final = {"noop", "objectformat", "preciousobjects", "relativeworktrees", "worktreeconfig"}
_OWN_PATHS: Final = (f"{GIT_NAME}/objects/info/alternates", f"{GIT_NAME}/packed-refs")
"""Paths in git's own folder; a rule that matches one of them prevents sharing the history."""

_SPARSE: Final = b"sdir\0\0\0\0"
"""Extension of an index that has folders in place of their files; git needs the trees to read it."""

_WORD: Final = re.compile(r"[a-z]{1,10}")
_ODD: Final = re.compile(r"[\s\x00-\x1f]|\.\.|^(?!refs/)")

AGENT_FOLDERS: Final = ("refs/heads", "refs/tags", "info", "objects/info", "objects/pack", "hooks")
"""Folders in the copy's `.git`; a sandbox can close `hooks` only if it exists."""


class Unshared(Exception):
    """The original's history is not shared with its copy; the text says why."""


class History(msgspec.Struct, frozen=True):
    """The parts of a repository from which its copy is made."""

    git_dir: Path
    """The original's repository folder, with its index."""
    objects: Path
    """The original's object folder."""
    head: str
    refs: Mapping[str, str]
    """Full name of a ref → its object, or `ref: NAME` for a symbolic ref."""
    shallow: bytes
    config: str

    @property
    def commit(self) -> str | None:
        """The commit of HEAD; None if its branch has none yet."""
        return self.refs.get(self.head.removeprefix("ref: ")) if self.head.startswith("ref: ") else self.head

    def write(self, git_dir: Path) -> None:
        """Fill a repository's folder, so that it continues this history."""
        (git_dir / "objects/info/alternates").write_bytes(os.fsencode(self.objects) + b"\n")
        (git_dir / "HEAD").write_bytes(os.fsencode(f"{self.head}\n"))
        (git_dir / "config").write_text(self.config)
        if self.shallow:
            (git_dir / "shallow").write_bytes(self.shallow)
        packed = sorted(f"{oid} {name}\n" for name, oid in self.refs.items() if not oid.startswith("ref: "))
        (git_dir / "packed-refs").write_bytes(os.fsencode("".join(packed)))
        for name, target in self.refs.items():
            if target.startswith("ref: "):
                path = git_dir / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(os.fsencode(f"{target}\n"))
        if (self.git_dir / "index").exists():
            copy_index(self.git_dir, git_dir)


def write_one_commit(git_dir: Path, repo: Repo, head: str, index: bytes) -> None:
    """Fill a repository's folder with one commit of our own repository; it gets a copy of the packs."""
    for path in (repo.folder / "objects/pack").glob("pack-*"):
        copy_whole(str(path), str(git_dir / "objects/pack" / path.name))
    (git_dir / "HEAD").write_text("ref: refs/heads/main\n")
    (git_dir / "refs/heads/main").write_text(f"{head}\n")
    (git_dir / "config").write_text(_config({}, sha256=repo.sha256, compared={}))
    (git_dir / "index").write_bytes(index)


def object_folders(root: str | Path) -> tuple[str, ...]:
    """Return the object folders of a repository, links followed.

    Args:
        root: its top folder; the result is empty for any other folder.
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
    """Globs of forbidden paths; a history is not shared if one of them matches any of its files or folders."""
    include: Globs | None
    """Globs that have to name every path; None allows all."""

    def hides(self, path: str) -> bool:
        """Return True if a rule names this file or folder itself, or if that cannot be decided."""
        try:
            return any(globs.matches(path) is not None for globs in self.denied)
        except PolicyError:
            return True


def read(known: Repository, repo: Repo, selection: Selection, tracked: Collection[str]) -> History:
    """Read what the copy of a repository's top folder needs.

    Args:
        repo: a repository of ours; it borrows the original's objects from now on.
        tracked: paths of the index.

    Raises:
        Unshared: the history cannot be shared, or has a path that the selection leaves out.
        WorkspaceError: the work was stopped.
    """
    try:
        found = _read(known, repo)
        repo.borrow(found.objects)
        if found.commit is not None and not _is_there(found.commit, found.objects, repo):
            raise Unshared("the commit of its HEAD cannot be read")
        if selection.denied or selection.include is not None:
            _check_paths(found, repo, tracked, selection)
        return found
    except (WorkspaceError, OSError) as error:
        if repo.stopped():
            raise
        said = error.message if isinstance(error, WorkspaceError) else f"{error.filename}: {error.strerror}"
        raise Unshared(f"its repository cannot be read: {printable(said)}") from error


def _read(known: Repository, repo: Repo) -> History:
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
    index = known.git_dir / "index"
    if index.exists() and _SPARSE in index.read_bytes():
        raise Unshared("its index is sparse; set index.sparse to false, then `git sparse-checkout reapply`")
    config = _config(_settings(known.common, repo), sha256=repo.sha256, compared=_COMPARED)
    refs, shallow = _refs(known.common), _text(known.common / "shallow")
    return History(known.git_dir, objects, os.fsdecode(head[0].strip()), refs, shallow, config)


def _is_there(commit: str, objects: Path, repo: Repo) -> bool:
    """Return True if a commit can be read."""
    if (objects / commit[:2] / commit[2:]).is_file():
        return True
    return repo.git("rev-parse", "-q", "--verify", f"{commit}^{{tree}}", codes=range(256)).code == 0


def _text(path: Path) -> bytes:
    """Read one of git's short files; empty if it is missing or no plain file."""
    return read_short(path, _TEXT_BYTES_MAX)


def _settings(common: Path, repo: Repo) -> dict[str, str]:
    """Read the repository's own configuration as data; no git command obeys it."""
    if not (common / "config").is_file():
        return {}
    said = repo.git("config", "--file", str(common / "config"), "--no-includes", "--list", "-z").stdout
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


def _check_paths(found: History, repo: Repo, tracked: Collection[str], selection: Selection) -> None:
    """Check every path in the index or in a commit; raises `Unshared` for the first that must not be shared."""
    judged: dict[str, bool] = {"": False}

    def is_hidden(path: str) -> bool:
        if path not in judged:
            judged[path] = is_hidden(parent(path)[:-1]) or selection.hides(path)
        return judged[path]

    if any(map(is_hidden, _OWN_PATHS)):
        raise Unshared("a rule closes git's own folder")
    for path in (*tracked, *_paths_of_commits(found, repo)):
        missed = selection.include is not None and selection.include.matches(path) is None
        if missed or is_hidden(path):
            why = "is not copied" if missed else "the agent may not have"
            raise Unshared(f"'{printable(path)}' is in it, which {why}")


def _paths_of_commits(found: History, repo: Repo) -> Iterator[str]:
    """Yield every path that a commit added, from all refs and HEAD.

    Every path in the history was added by some commit: a usual one, one without a parent, or a merge.
    """
    names, shallow = repo.folder / "names", repo.folder / "shallow"
    words = ("log", "--ignore-missing", "--format=", "--name-only", "-z", "--no-renames", "--diff-filter=A")
    starts = {oid for oid in (found.commit, *found.refs.values()) if oid is not None and not oid.startswith("ref: ")}
    try:
        if found.shallow:
            shallow.write_bytes(found.shallow)
        repo.git(
            *words,
            "--diff-merges=combined",
            "--stdin",
            settings={"GIT_NO_REPLACE_OBJECTS": "1"},
            stdin="".join(f"{oid}\n" for oid in sorted(starts)).encode(),
            stdout_path=names,
            timeout_s=LOG_S_MAX,
        )
        for raw in set(names.read_bytes().split(b"\0")):
            if raw:
                yield os.fsdecode(raw)
    finally:
        for path in (names, shallow):
            path.unlink(missing_ok=True)
