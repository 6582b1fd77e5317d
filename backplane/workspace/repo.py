"""Keeps the contents and states of one run's workspace in a bare repository of ours.

Git is only ever run on such a repository, with its configuration and no other, and without a work tree. So nothing in
an untrusted tree (hooks, attributes, filters, nested repositories) can start a program. Objects are written and read
without a process (`objects`); git compares, merges, packs, and decides about ignore rules.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from backplane.errors import BackendError, WorkspaceError
from backplane.process.tool import Finished, run_tool, search_path
from backplane.workspace.objects import EMPTY_TREES, Leaf, PackReader, PackWriter, new_hash, read_loose, read_tree
from backplane.workspace.tree import HINTS, READ_BYTES, remove_tree

REPO_NAME: Final = "repo.git"
"""The repository's name in the run's folder."""

CODE: Final = "execution_workspace_error"

GIT_S_MAX: Final = 60.0
"""Seconds for one git call; a diff of 20,000 changed files takes some seconds, one of 1.5 GiB in 25 files three."""

OUTPUT_BYTES_MAX: Final = 4 << 30
"""Maximum size of a patch in bytes; a workspace's quota is far smaller."""

RENAMES_MAX: Final = 1000
"""Limit of git's search for renames by content, its default: added times deleted files is at most its square. Exact
renames have no limit."""

_STATES: Final = "refs/states"

_CONFIG: Final = """[core]
\trepositoryformatversion = 1
\tfilemode = true
\tbare = true
\tlogallrefupdates = false
\tfsmonitor = false
\tuntrackedCache = false
\thooksPath = /dev/null
\tattributesFile = /dev/null
\texcludesFile = /dev/null
\tautocrlf = false
\tsafecrlf = false
\tquotePath = true
\tcompression = 0
\tbigFileThreshold = 1m
[diff]
\talgorithm = myers
\trenames = true
[merge]
\tconflictStyle = merge
[protocol]
\tallow = never
[extensions]
\tobjectformat = """

# This file overrides every `.gitattributes`.
_ATTRIBUTES: Final = "* -text !eol !crlf -ident !filter -working-tree-encoding !diff !merge !whitespace\n"


class DiffRow(msgspec.Struct, frozen=True):
    """One changed file, as `git diff-tree --raw` with `--numstat` names it."""

    letter: str
    same_content: bool
    path: bytes
    old_path: bytes | None
    binary: bool


class Repo:
    """An existing repository of ours.

    Args:
        code: code of its errors.
        stopped: called while git runs; true kills it.
    """

    def __init__(self, folder: Path, code: str = CODE, stopped: Callable[[], bool] = lambda: False) -> None:
        self.folder, self.code, self.stopped = folder, code, stopped
        try:
            self.sha256 = "objectformat = sha256" in (folder / "config").read_text()
        except OSError as error:
            fact = f"the run's repository cannot be read: {error.strerror}"
            raise WorkspaceError(code, fact, hint="name a run that has changed files, and is not pruned") from error
        self._known: set[bytes] = set()
        """Names of the objects that were stored by this instance."""
        self._packs: list[PackReader] | None = None
        """The packs that were found last; None before the first search."""

    @classmethod
    def create(
        cls, folder: Path, code: str = CODE, stopped: Callable[[], bool] = lambda: False, *, sha256: bool = False
    ) -> Repo:
        """Make an empty repository in place of an earlier one. Raises OSError, WorkspaceError."""
        remove_tree(folder)
        folder.mkdir(mode=0o700)
        for part in ("objects/pack", "objects/info", _STATES, "info"):
            (folder / part).mkdir(parents=True)
        (folder / "HEAD").write_text("ref: refs/heads/none\n")
        (folder / "config").write_text(_CONFIG + ("sha256\n" if sha256 else "sha1\n"))
        (folder / "info/attributes").write_text(_ATTRIBUTES)
        return cls(folder, code, stopped)

    def borrow(self, objects: Path | None) -> None:
        """Let git read the objects in another repository's folder, too; None ends that."""
        place = self.folder / "objects/info/alternates"
        if objects is None:
            place.unlink(missing_ok=True)
        else:
            place.write_bytes(os.fsencode(objects) + b"\n")

    def git(
        self,
        *words: str,
        settings: Mapping[str, str] | None = None,
        stdin: bytes | Iterable[bytes] = b"",
        stdout_path: Path | None = None,
        codes: Iterable[int] = (0,),
        cwd: Path | None = None,
        timeout_s: float = GIT_S_MAX,
        slow: str = "leave what is large or many out with --exclude",
    ) -> Finished:
        """Run git on this repository, without any other configuration of this machine.

        Args:
            slow: the hint if it takes longer than `timeout_s`.

        Raises:
            WorkspaceError: git is missing, too slow, was stopped, or ended with another exit code.
        """
        env = _environment(self.folder) | dict(settings or {})
        try:
            done = run_tool(
                [shutil.which("git", path=env["PATH"]) or "git", *words],
                env=env,
                cwd=str(cwd or self.folder),
                stdin=stdin,
                timeout_s=timeout_s,
                output_bytes_max=OUTPUT_BYTES_MAX,
                stdout_path=str(stdout_path) if stdout_path else None,
                stopped=self.stopped,
            )
        except BackendError as error:
            hint = {"sidecar_spawn_failed": "install git", "backend_timeout": slow}.get(error.code, error.hint)
            fact = f"git {words[0]}: {error.message}"
            raise WorkspaceError(self.code, fact, hint=hint, evidence=error.evidence) from error
        if done.code not in codes:
            said = done.stderr.decode("utf-8", "backslashreplace")
            hint = next((HINTS[number] for number in HINTS if os.strerror(number) in said), None)
            fact = f"git {words[0]} ended with exit code {done.code}"
            raise WorkspaceError(self.code, fact, hint=hint, evidence=said)
        return done

    # What goes in -----------------------------------------------------------------------------------------------------

    @contextmanager
    def storing(self, *, again: bool = False) -> Iterator[PackWriter]:
        """Store the objects that the block gives to the writer in one pack, or none if the block fails. Raises OSError.

        Args:
            again: True to store objects even if another pack has them.
        """
        writer = PackWriter(self.folder / "objects/pack", set() if again else self._known, sha256=self.sha256)
        try:
            yield writer
            writer.finish()
            self._packs = None
        except BaseException:
            self._known.clear()
            writer.discard()
            raise

    @property
    def empty_tree(self) -> str:
        """The name of a tree without files."""
        return EMPTY_TREES[self.sha256]

    def keep(self, name: str, tree: str) -> None:
        """Name a state, so that `slim` keeps it. Raises OSError."""
        unfinished = self.folder / "state"
        unfinished.write_text(f"{tree}\n")
        unfinished.rename(self.folder / _STATES / name)

    def forget(self, name: str) -> None:
        """Remove the name of a state; `slim` removes what only that state has."""
        (self.folder / _STATES / name).unlink(missing_ok=True)

    @property
    def has_states(self) -> bool:
        """True if the repository has a named state."""
        return any((self.folder / _STATES).iterdir())

    def slim(self) -> None:
        """Keep one pack with the named states, and nothing else; without any, remove the repository."""
        if not self.has_states:
            remove_tree(self.folder)
            return
        packs = self.folder / "objects/pack"
        words = ("pack-objects", "-q", "--all", "--window=0", "--no-reuse-object", "--compression=1")
        name = self.git(*words, str(packs / "pack")).stdout.decode().strip()
        self._packs = None
        for path in packs.iterdir():
            if path.stem != f"pack-{name}":
                path.unlink()
        remove_tree(self.folder / "objects/info")

    # What comes out ---------------------------------------------------------------------------------------------------

    def leaves(self, tree: str) -> dict[str, Leaf]:
        """Return all files of a tree by their paths. Raises WorkspaceError."""
        try:
            return read_tree(self.read, tree)
        except ValueError as error:
            raise self._lost() from error

    def read(self, oid: str) -> bytes:
        """Return the content of one of this repository's own objects. Raises as `pieces`."""
        return b"".join(self.pieces(oid))

    def pieces(self, oid: str) -> Iterator[bytes]:
        """Yield the content of one of this repository's own objects.

        Raises:
            WorkspaceError: it is missing; or, after the last piece, the content does not match its name.
            OSError: it cannot be read.
        """
        digest = new_hash(sha256=self.sha256)
        try:
            found = self._find(oid)
            first = next(found)
            digest.update(first)
            yield first.partition(b"\0")[2]
            for piece in found:
                digest.update(piece)
                yield piece
        except (FileNotFoundError, LookupError, ValueError, StopIteration, struct.error, zlib.error) as error:
            raise self._lost() from error
        if digest.hexdigest() != oid:
            raise self._lost()

    def _find(self, oid: str) -> Iterator[bytes]:
        """Yield an object from its pack or its own file, in pieces, its kind and size first."""
        name = bytes.fromhex(oid)
        if self._packs is None:
            self._packs = [PackReader(path) for path in sorted((self.folder / "objects/pack").glob("*.idx"))]
        for pack in self._packs:
            if (place := pack.find(name)) is not None:
                return pack.pieces(place)
        return read_loose(self.folder / "objects" / oid[:2] / oid[2:])

    def _lost(self) -> WorkspaceError:
        fact = "a content of the run is not in its repository as it was kept"
        return WorkspaceError(self.code, fact, hint=f"'{self.folder}' was changed or damaged")

    def rows(self, state: str) -> list[DiffRow]:
        """Return how the two trees of a state differ."""
        return _rows(self.git(*_diff(state)).stdout)[0]

    def write_patch(self, state: str, patch: Path) -> list[DiffRow]:
        """Write the difference of the two trees of a state as a git patch; return its rows. Raises OSError."""
        both = self.folder / "diff"
        form = ("-p", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short")
        try:
            self.git(*_diff(state, *form, "--src-prefix=a/", "--dst-prefix=b/"), stdout_path=both)
            with both.open("rb") as file, patch.open("xb") as target:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    rows, end = _rows(data)
                file.seek(end)
                shutil.copyfileobj(file, target, READ_BYTES)
        finally:
            both.unlink(missing_ok=True)
        return rows

    def merge(self, ours: bytes, base: bytes, theirs: bytes) -> bytes | None:
        """Merge two changes of one file; None when they touch the same lines or are not text."""
        names = ("ours", "base", "theirs")
        for name, data in zip(names, (ours, base, theirs), strict=True):
            (self.folder / name).write_bytes(data)
        done = self.git("merge-file", "-p", "--quiet", *names, codes=range(256))
        for name in names:
            (self.folder / name).unlink()
        return done.stdout if done.code == 0 else None


# The process ----------------------------------------------------------------------------------------------------------


def _environment(git_dir: Path) -> dict[str, str]:
    return {
        "PATH": search_path(os.environ),
        "HOME": str(git_dir),
        "XDG_CONFIG_HOME": str(git_dir),
        "LC_ALL": "C",
        "GIT_DIR": str(git_dir),
        "GIT_CEILING_DIRECTORIES": str(git_dir),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_PAGER": "cat",
    }


def _diff(state: str, *form: str) -> tuple[str, ...]:
    words = ("diff-tree", "-r", "-z", "-M", f"-l{RENAMES_MAX}", "--raw", "--numstat", "--no-abbrev")
    return (*words, *form, f"{state}:a", f"{state}:b", "--")


def _rows(data: bytes | mmap.mmap) -> tuple[list[DiffRow], int]:
    """Read the output of `_diff`: all raw rows, then all counts in the same order; return also where a patch begins."""
    place = 0

    def field() -> bytes:
        nonlocal place
        start, place = place, data.find(b"\0", place) + 1
        return data[start : place - 1]

    heads: list[tuple[str, bool, bytes, bytes | None]] = []
    while data[place : place + 1] == b":":
        _, _, old, new, letter = field().decode().split(" ")
        first = field()
        path, old_path = (field(), first) if letter[0] in "RC" else (first, None)
        heads.append((letter[0], old == new, path, old_path))
    rows = []
    for head in heads:
        added, _, name = field().split(b"\t", 2)
        if not name:  # A renamed file: two names follow.
            field(), field()
        rows.append(DiffRow(*head, added == b"-"))
    return rows, place + 1
