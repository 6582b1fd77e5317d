"""A bare repository of ours, in which git stores the contents and states of one run's workspace.

Git is only ever run on such a repository, with its configuration and no other, and without a work tree. So nothing in
an untrusted tree (hooks, attributes, filters, nested repositories) can start a program. StoredContents go in by `git
fast-import`, which writes them into one pack; `update-index` takes three times as long for 2,000 files.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from backplane.errors import BackendError, WorkspaceError
from backplane.process.tool import Finished, run_tool, search_path
from backplane.workspace.tree import HINTS, READ_BYTES, remove_tree

REPO_NAME: Final = "repo.git"
"""The repository's name in the run's folder."""

CODE: Final = "execution_workspace_error"

GIT_S_MAX: Final = 60.0
"""Seconds for one git call; a diff of 20,000 changed files takes some seconds, one of 1.5 GiB in 25 files three."""

OUTPUT_BYTES_MAX: Final = 4 << 30
"""Most bytes of a patch, or of all contents that are read at once; a workspace's quota is met long before."""

RENAMES_MAX: Final = 1000
"""Added times deleted files, root of, that git compares by content; git's own default. Exact renames have no limit."""

FILE: Final = 0o100644
PROGRAM: Final = 0o100755
LINK: Final = 0o120000

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
[fastimport]
\tunpackLimit = 0
[diff]
\talgorithm = myers
\trenames = true
[merge]
\tconflictStyle = merge
[protocol]
\tallow = never
[extensions]
\tobjectformat = """

# Highest in precedence: it overrides every `.gitattributes`.
_ATTRIBUTES: Final = "* -text !eol !crlf -ident !filter -working-tree-encoding !diff !merge !whitespace\n"


EMPTY_TREES: Final = tuple(
    new(b"tree 0\0", usedforsecurity=False).hexdigest() for new in (hashlib.sha1, hashlib.sha256)
)
"""Names of a tree without files; git knows them in every repository."""


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """The mode of a file or link, and the name of its content, as git has them."""

    mode: int
    oid: str


class DiffRow(msgspec.Struct, frozen=True):
    """One line of `git diff-tree --raw` with its `--numstat`."""

    letter: str
    old_mode: int
    new_mode: int
    same_content: bool
    path: bytes
    old_path: bytes | None
    binary: bool


class StoredState(msgspec.Struct, frozen=True):
    """How a workspace differs from its start, stored as a tree with two folders.

    `a` has the changed files as they were at the start, `b` as they are in this state.
    """

    tree: str
    before: str
    """The tree `a`."""
    after: str
    """The tree `b`."""


def blob_hash(size: int, *, sha256: bool) -> Any:
    """Return the beginning of the hash that names a content of this size."""
    new = hashlib.sha256 if sha256 else hashlib.sha1
    return new(b"blob %d\0" % size, usedforsecurity=False)


def blob_id(data: bytes, *, sha256: bool = False) -> str:
    """Return git's name of a content."""
    digest = blob_hash(len(data), sha256=sha256)
    digest.update(data)
    return str(digest.hexdigest())


class Repo:
    """A repository that exists.

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

    @classmethod
    def create(
        cls, folder: Path, code: str = CODE, stopped: Callable[[], bool] = lambda: False, *, sha256: bool = False
    ) -> Repo:
        """Make an empty repository; a former one is removed. Raises OSError, WorkspaceError."""
        remove_tree(folder)
        folder.mkdir(mode=0o700)
        for part in ("objects/pack", "refs/heads", "info"):
            (folder / part).mkdir(parents=True)
        (folder / "HEAD").write_text("ref: refs/heads/none\n")
        (folder / "config").write_text(_CONFIG + ("sha256\n" if sha256 else "sha1\n"))
        (folder / "info/attributes").write_text(_ATTRIBUTES)
        return cls(folder, code, stopped)

    def borrow(self, objects: Path) -> None:
        """Read another repository's objects as well."""
        (self.folder / "objects/info").mkdir(exist_ok=True)
        (self.folder / "objects/info/alternates").write_bytes(os.fsencode(objects) + b"\n")

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

    def load(self, commands: Iterator[bytes]) -> bytes:
        """Give commands to `git fast-import`, and return its output; git is not started if there are none."""
        pieces = _gathered(commands)
        first = next(pieces, None)
        if first is None:
            return b""
        words = ("fast-import", "--quiet", "--force", "--depth=0")
        return self.git(*words, stdin=itertools.chain((first,), pieces)).stdout

    def state(self, output: bytes) -> StoredState:
        """Read the answer to `state_commands`."""
        lines = (line.split() for line in output.splitlines())
        tree, before, after = (words[2].decode() if words[1] == b"tree" else self.empty_tree for words in lines)
        return StoredState(tree, before, after)

    @property
    def empty_tree(self) -> str:
        """The name of a tree without files."""
        return EMPTY_TREES[self.sha256]

    def forget(self, ref: str) -> None:
        """Remove a branch; `slim` removes what only it has."""
        (self.folder / "refs/heads" / ref).unlink(missing_ok=True)

    def slim(self) -> None:
        """Keep one pack with what the branches have, and no more; without a branch, remove the repository."""
        if not any((self.folder / "refs/heads").iterdir()):
            remove_tree(self.folder)
            return
        packs = self.folder / "objects/pack"
        words = ("pack-objects", "-q", "--all", "--no-reuse-object", "--compression=1", str(packs / "pack"))
        name = self.git(*words).stdout.decode().strip()
        for path in packs.iterdir():
            if path.stem != f"pack-{name}":
                path.unlink()
        remove_tree(self.folder / "objects/info")

    # What comes out ---------------------------------------------------------------------------------------------------

    def leaves(self, tree: str) -> dict[str, Leaf]:
        """Return all files of a tree by their paths."""
        found = {}
        for row in self.git("ls-tree", "-r", "-z", "--full-tree", tree).stdout.split(b"\0")[:-1]:
            head, path = row.split(b"\t", 1)
            mode, _, oid = head.decode().split(" ")
            found[os.fsdecode(path)] = Leaf(int(mode, 8), oid)
        return found

    def rows(self, before: str, after: str) -> list[DiffRow]:
        """Return how two trees differ."""
        words = ("diff-tree", "-r", "-z", "-M", f"-l{RENAMES_MAX}", "--raw", "--numstat", "--no-abbrev")
        return _rows(self.git(*words, before, after, "--").stdout)

    def rows_of(self, before: Mapping[str, Leaf], after: Mapping[str, Leaf]) -> list[DiffRow]:
        """Return how two sets of files differ."""
        state = self.state(self.load(iter((state_commands("asked", before, after),))))
        self.forget("asked")
        return self.rows(state.before, state.after)

    def write_patch(self, before: str, after: str, patch: Path) -> None:
        """Write the difference of two trees as a git patch."""
        form = ("-p", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short")
        names = ("--src-prefix=a/", "--dst-prefix=b/", before, after, "--")
        self.git("diff-tree", "-r", "-M", f"-l{RENAMES_MAX}", *form, *names, stdout_path=patch)

    @contextmanager
    def contents(self, oids: Collection[str]) -> Iterator[StoredContents]:
        """Read contents at once; they are in a temporary file until the end of the block."""
        path = self.folder / "contents"
        try:
            if oids:
                asked = "".join(f"{oid}\n" for oid in oids).encode()
                self.git("cat-file", "--batch", stdin=asked, stdout_path=path)
            yield StoredContents(path, oids, self)
        finally:
            path.unlink(missing_ok=True)

    def merge(self, ours: bytes, base: bytes, theirs: bytes) -> bytes | None:
        """Merge two changes of one file; None when they touch the same lines or are not text."""
        names = ("ours", "base", "theirs")
        for name, data in zip(names, (ours, base, theirs), strict=True):
            (self.folder / name).write_bytes(data)
        done = self.git("merge-file", "-p", "--quiet", *names, codes=range(256))
        for name in names:
            (self.folder / name).unlink()
        return done.stdout if done.code == 0 else None


class StoredContents:
    """Contents in the output of `git cat-file --batch`."""

    def __init__(self, path: Path, oids: Collection[str], repo: Repo) -> None:
        self._path, self._repo = path, repo
        self._places: dict[str, tuple[int, int]] = {}
        if not oids:
            return
        with path.open("rb") as file:
            for oid in oids:
                words = file.readline(200).split()
                if words[1:2] != [b"blob"]:
                    raise self._lost()
                self._places[oid] = file.tell(), int(words[2])
                file.seek(int(words[2]) + 1, os.SEEK_CUR)

    def read(self, oid: str) -> bytes:
        """Return a content whole. Raises as `pieces`."""
        return b"".join(self.pieces(oid))

    def pieces(self, oid: str) -> Iterator[bytes]:
        """Yield a content in pieces.

        Raises:
            WorkspaceError: after the last piece: it is another content.
            OSError: it cannot be read.
        """
        place, left = self._places[oid]
        digest = blob_hash(left, sha256=self._repo.sha256)
        with self._path.open("rb") as file:
            file.seek(place)
            while left and (piece := file.read(min(left, READ_BYTES))):
                left -= len(piece)
                digest.update(piece)
                yield piece
        if digest.hexdigest() != oid:
            raise self._lost()

    def _lost(self) -> WorkspaceError:
        fact = "a content of the run is not in its repository as it was kept"
        return WorkspaceError(self._repo.code, fact, hint=f"'{self._repo.folder}' was changed or damaged")


# Commands of `git fast-import` ----------------------------------------------------------------------------------------


def blob_command(data: bytes) -> bytes:
    """Return the command that stores a content."""
    return b"blob\ndata %d\n%s\n" % (len(data), data)


def commit_command(ref: str, leaves: Mapping[str, Leaf], message: str = "") -> bytes:
    """Return the command that makes a branch of one commit with these files; their contents are stored already."""
    files = [b"M %o %s %s\n" % (leaf.mode, leaf.oid.encode(), _quoted(path)) for path, leaf in leaves.items()]
    who, text = f"backplane <backplane@localhost> {int(time.time())} +0000", message.encode()
    head = f"commit refs/heads/{ref}\nmark :1\ncommitter {who}\ndata {len(text)}\n".encode()
    return b"".join((head, text, b"\n", *files, b"\n"))


def state_commands(ref: str, before: Mapping[str, Leaf], after: Mapping[str, Leaf]) -> bytes:
    """Return the commands that store a state as a branch; `Repo.state` reads their output."""
    leaves = {f"a/{path}": leaf for path, leaf in before.items()} | {f"b/{path}": leaf for path, leaf in after.items()}
    return commit_command(ref, leaves) + b'ls :1 ""\nls :1 a\nls :1 b\n'


def _quoted(path: str) -> bytes:
    raw = os.fsencode(path)
    return b'"%s"' % raw.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")


def _gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Join small pieces, as each costs a write."""
    found: list[bytes] = []
    size = 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size >= READ_BYTES:
            yield b"".join(found)
            found, size = [], 0
    if found:
        yield b"".join(found)


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


def _rows(raw: bytes) -> list[DiffRow]:
    """Read `--raw --numstat -z`: first all raw lines, then all counts, in the same order."""
    fields = _fields(raw)
    heads: list[tuple[str, int, int, bool, bytes, bytes | None]] = []
    binary: list[bool] = []
    for field in fields:
        if field.startswith(b":") and not binary:
            old_mode, new_mode, old, new, letter = field[1:].decode().split(" ")
            first = next(fields)
            moved = letter[0] in "RC"
            path, old_path = (next(fields), first) if moved else (first, None)
            heads.append((letter[0], int(old_mode, 8), int(new_mode, 8), old == new, path, old_path))
        elif field:
            added, _, path = field.split(b"\t", 2)
            binary.append(added == b"-")
            if not path:
                next(fields), next(fields)
    return [DiffRow(*head, is_binary) for head, is_binary in zip(heads, binary, strict=True)]


def _fields(raw: bytes) -> Iterator[bytes]:
    """Split at each NUL, one at a time: all of them at once take as much memory as the rows."""
    place = 0
    while (end := raw.find(b"\0", place)) >= 0:
        yield raw[place:end]
        place = end + 1
