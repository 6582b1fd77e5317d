"""Git's formats written by us, and git itself where only it knows: differences, ignore rules, merges.

Git is only ever run on a repository made for that one call, outside every workspace, with no
work tree of anybody else's in sight: it sees blobs and trees that we wrote. So nothing in an
untrusted tree (hooks, attributes, filters, nested repositories) can start a program.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from backplane._tree import copy_whole, parent, remove_tree
from backplane.errors import BackendError, WorkspaceError
from backplane.process import Finished, run_tool

GIT_S_MAX: Final = 120.0
"""Bound of one git call; a diff of 20,000 changed files takes some seconds."""

PATCH_BYTES_MAX: Final = 4 << 30
"""Bound of a patch file. The workspace's quota is met long before."""

RENAMES_MAX: Final = 1000
"""Added times deleted files, root of, that git compares by content; git's own default. Exact renames have no limit."""

RULES_BYTES_MAX: Final = 1 << 20
"""Longest `.gitignore` that is obeyed; git's own documentation shows none of over a few KiB."""

RULES_PATH_BYTES_MAX: Final = 3000
"""Paths longer than this are not asked about: with the scratch folder before them git would refuse them."""

STORED_BYTES_MAX: Final = 0xFFFF
"""Longest block that deflate can store as it is."""

_BLOCK_BYTES_MIN: Final = 4096
"""No shorter block but the last is stored by zlib."""

_HEAD_BYTES_MAX: Final = 10
"""Kind and size of an object of up to 2^64 bytes."""

PACK_NAME: Final = "pack-" + "0" * 40
"""Git wants a name of this shape and does not look at its number."""

FILE: Final = 0o100644
PROGRAM: Final = 0o100755
LINK: Final = 0o120000
_TREE: Final = 0o040000

_PACK_HEAD: Final = struct.Struct(">4sII")
_KINDS: Final = {"commit": 1, "tree": 2, "blob": 3}

_CONFIG: Final = """[core]
\trepositoryformatversion = 0
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
\tpreloadIndex = false
[diff]
\talgorithm = myers
\trenames = true
[merge]
\tconflictStyle = merge
[protocol]
\tallow = never
"""

# Highest in precedence: whatever a `.gitattributes` says is unsaid.
_ATTRIBUTES: Final = "* -text !eol !crlf -ident !filter -working-tree-encoding !diff !merge !whitespace\n"

_AGENT_CONFIG: Final = """[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
\tlogallrefupdates = true
[user]
\tname = agent
\temail = agent@localhost
"""


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """A file or link as git knows it."""

    mode: int
    oid: bytes


class Row(msgspec.Struct, frozen=True):
    """One line of `git diff-tree --raw` with its `--numstat`."""

    letter: str
    old_mode: int
    new_mode: int
    same_content: bool
    path: bytes
    old_path: bytes | None
    binary: bool


def blob_id(data: bytes) -> bytes:
    """Git's name of a file's content, 20 bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).digest()


class Pack:
    """A pack file in the making; objects are stored as they are, because time counts here and disk less.

    Objects are added as they come and can be read again; `finish` writes the count, the checksum
    and the index that git needs.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.bytes = _PACK_HEAD.size
        self._file = path.open("x+b")
        self._file.write(_PACK_HEAD.pack(b"PACK", 2, 0))
        self._objects: dict[bytes, tuple[int, int]] = {}

    def add(self, kind: str, data: bytes, oid: bytes | None = None) -> bytes:
        """Add an object unless it is there; return its name."""
        if oid is None:
            oid = hashlib.sha1(b"%s %d\0" % (kind.encode(), len(data)) + data, usedforsecurity=False).digest()
        if oid not in self._objects:
            record = _object_head(_KINDS[kind], len(data)) + _stored(data)
            self._objects[oid] = (self.bytes, zlib.crc32(record))
            self._file.write(record)
            self.bytes += len(record)
        return oid

    def read(self, oid: bytes) -> bytes:
        """Read an object's content as it is in the file now; empty when that makes no sense any more."""
        with self.path.open("rb") as file:
            file.seek(self._objects[oid][0])
            head = file.read(_HEAD_BYTES_MAX)
            start = next((at + 1 for at, byte in enumerate(head) if byte < 0x80), len(head))
            size = head[0] & 15 if head else 0
            for shift, byte in zip(range(4, 64, 7), head[1:start], strict=False):
                size |= (byte & 0x7F) << shift
            # Each stored block has five bytes before it, the stream two before and four after.
            record = head[start:] + file.read(size + 5 * (size // _BLOCK_BYTES_MIN + 2) + 6)
        try:
            return zlib.decompressobj().decompress(record, size) if size else b""
        except zlib.error:
            return b""

    def finish(self) -> bytes:
        """End the pack and return its index."""
        with self._file as file:
            file.seek(0)
            file.write(_PACK_HEAD.pack(b"PACK", 2, len(self._objects)))
            file.seek(0)
            checksum = hashlib.file_digest(file, "sha1").digest()
            file.seek(0, os.SEEK_END)
            file.write(checksum)
        return _pack_index(self._objects, checksum)

    def close(self) -> None:
        self._file.close()


def _object_head(kind: int, size: int) -> bytes:
    byte = kind << 4 | size & 15
    size >>= 4
    if 0 < size < 0x80:
        return bytes((byte | 0x80, size))
    head = bytearray()
    while size:
        head.append(byte | 0x80)
        byte = size & 0x7F
        size >>= 7
    head.append(byte)
    return bytes(head)


def _stored(data: bytes) -> bytes:
    """Wrap data as a zlib stream without compressing; setting a compressor up costs more than the copy."""
    size = len(data)
    if size > STORED_BYTES_MAX:
        return zlib.compress(data, 0)
    return struct.pack("<HBHH", 0x0178, 1, size, size ^ 0xFFFF) + data + struct.pack(">I", zlib.adler32(data))


def _pack_index(objects: Mapping[bytes, tuple[int, int]], checksum: bytes) -> bytes:
    """A version 2 pack index: names, checksums of the records, places."""
    names = sorted(objects)
    counts = [0] * 256
    for name in names:
        counts[name[0]] += 1
    total = 0
    fanout = [total := total + count for count in counts]
    far = [objects[name][0] for name in names if objects[name][0] >= 1 << 31]
    far_place = {place: 1 << 31 | index for index, place in enumerate(far)}
    body = b"".join(
        (
            b"\xfftOc\0\0\0\x02",
            struct.pack(">256I", *fanout),
            b"".join(names),
            struct.pack(f">{len(names)}I", *(objects[name][1] for name in names)),
            struct.pack(f">{len(names)}I", *(far_place.get(objects[n][0], objects[n][0]) for n in names)),
            struct.pack(f">{len(far)}Q", *far),
            checksum,
        )
    )
    return body + hashlib.sha1(body, usedforsecurity=False).digest()


def write_trees(pack: Pack, leaves: Mapping[str, Leaf]) -> bytes:
    """Write the tree objects of these files; return the name of the topmost."""
    folders: dict[str, list[tuple[bytes, bytes]]] = {"": []}
    for path, leaf in leaves.items():
        folder = parent(path)
        above = folder
        while above not in folders:
            folders[above] = []
            above = parent(above[:-1])
        name = os.fsencode(path[len(folder) :])
        folders[folder].append((name, b"%o %s\0%s" % (leaf.mode, name, leaf.oid)))
    # Deepest first, so that a folder is named before the one that holds it.
    for folder in sorted(folders, key=_depth, reverse=True):
        oid = pack.add("tree", b"".join(line for _, line in sorted(folders[folder])))
        if not folder:
            return oid
        above = parent(folder[:-1])
        name = os.fsencode(folder[len(above) : -1])
        # Git sorts a folder as if its name ended in a slash.
        folders[above].append((name + b"/", b"%o %s\0%s" % (_TREE, name, oid)))
    raise AssertionError("the topmost folder is always there")


def _depth(folder: str) -> int:
    return folder.count("/")


def write_repository(
    git_dir: Path,
    pack: Pack,
    leaves: Mapping[str, Leaf],
    facts: Mapping[str, os.stat_result],
    excluded: bytes,
    now_s: int,
) -> None:
    """Make a repository of one commit whose index is fresh, so that the agent's `git status` reads no file.

    Args:
        git_dir: the new `.git`, for the agent to do with as it likes: it gets a copy of the pack.
        pack: holds the blobs already; finished here.
        facts: `lstat` of each file, by path.
        excluded: content of `info/exclude`.
    """
    tree = write_trees(pack, leaves)
    who = f"backplane <backplane@localhost> {now_s} +0000"
    text = f"tree {tree.hex()}\nauthor {who}\ncommitter {who}\n\nbaseline\n"
    commit = pack.add("commit", text.encode())
    pack_index = pack.finish()
    for name in ("refs/heads", "refs/tags", "info", "objects/info", "objects/pack"):
        (git_dir / name).mkdir(parents=True)
    copy_whole(pack.path, git_dir / "objects/pack" / f"{PACK_NAME}.pack")
    (git_dir / "objects/pack" / f"{PACK_NAME}.idx").write_bytes(pack_index)
    (git_dir / "HEAD").write_text("ref: refs/heads/main\n")
    (git_dir / "refs/heads/main").write_text(commit.hex() + "\n")
    (git_dir / "config").write_text(_AGENT_CONFIG)
    (git_dir / "info/exclude").write_bytes(excluded)
    (git_dir / "index").write_bytes(_index(leaves, facts))


def _index(leaves: Mapping[str, Leaf], facts: Mapping[str, os.stat_result]) -> bytes:
    """Git's index, version 2."""
    parts = [struct.pack(">4sII", b"DIRC", 2, len(leaves))]
    for name, path in sorted((os.fsencode(path), path) for path in leaves):
        leaf, at = leaves[path], facts[path]
        changed_s, changed_ns = divmod(at.st_ctime_ns, 1_000_000_000)
        modified_s, modified_ns = divmod(at.st_mtime_ns, 1_000_000_000)
        size = len(name)
        head = _INDEX_ENTRY.pack(
            changed_s & _WORD, changed_ns, modified_s & _WORD, modified_ns, at.st_dev & _WORD, at.st_ino & _WORD,
            leaf.mode, at.st_uid & _WORD, at.st_gid & _WORD, at.st_size & _WORD, leaf.oid, min(size, 0xFFF),
        )  # fmt: skip
        parts += head, name, _PADDING[(_INDEX_ENTRY.size + size) % 8]
    body = b"".join(parts)
    return body + hashlib.sha1(body, usedforsecurity=False).digest()


_INDEX_ENTRY: Final = struct.Struct(">10I20sH")
_PADDING: Final = [bytes(8 - over) for over in range(8)]
_WORD: Final = 0xFFFFFFFF


class Scratch(msgspec.Struct, frozen=True):
    """A repository for one use, and the folder it is in."""

    folder: Path
    code: str
    """The error code of a failure here."""

    @property
    def git_dir(self) -> Path:
        return self.folder / "git"

    def pack(self) -> Pack:
        return Pack(self.git_dir / "objects/pack" / f"{PACK_NAME}.pack")

    def finish(self, pack: Pack) -> None:
        """End a pack made by `pack`, so that git finds what is in it."""
        pack.path.with_suffix(".idx").write_bytes(pack.finish())

    def git(
        self,
        *words: str,
        settings: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        stdout_path: Path | None = None,
        codes: Iterable[int] = (0,),
    ) -> Finished:
        """Run git on this repository and nothing else of the machine's configuration.

        Raises:
            WorkspaceError: the scratch's code; git is missing, too slow, or ends with another exit code.
        """
        try:
            done = run_tool(
                [_program(), *words],
                env=_environment(self) | dict(settings or {}),
                cwd=str(self.folder),
                stdin=stdin,
                timeout_s=GIT_S_MAX,
                output_bytes_max=PATCH_BYTES_MAX,
                stdout_path=str(stdout_path) if stdout_path else None,
            )
        except BackendError as error:
            hint = "install git" if error.code == "sidecar_spawn_failed" else error.hint
            raise WorkspaceError(self.code, error.message, hint=hint, evidence=error.evidence) from error
        if done.code not in codes:
            said = done.stderr.decode("utf-8", "backslashreplace")
            raise WorkspaceError(self.code, f"git {words[0]} ended with exit code {done.code}", evidence=said)
        return done


@contextmanager
def scratch(folder: Path, code: str) -> Iterator[Scratch]:
    """Make an empty repository below `folder` and remove it at the end of the block."""
    made = Scratch(Path(tempfile.mkdtemp(prefix="git-", dir=folder)), code)
    try:
        for part in ("objects/pack", "refs/heads", "info"):
            (made.git_dir / part).mkdir(parents=True)
        (made.git_dir / "HEAD").write_text("ref: refs/heads/none\n")
        (made.git_dir / "config").write_text(_CONFIG)
        (made.git_dir / "info/attributes").write_text(_ATTRIBUTES)
        yield made
    finally:
        remove_tree(made.folder)


def _search_path() -> str:
    # A relative entry would be looked up in a folder that somebody else fills.
    return os.pathsep.join(part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if os.path.isabs(part))


def _program() -> str:
    return shutil.which("git", path=_search_path()) or "git"


def _environment(at: Scratch) -> dict[str, str]:
    return {
        "PATH": _search_path(),
        "HOME": str(at.folder),
        "XDG_CONFIG_HOME": str(at.folder),
        "LC_ALL": "C",
        "GIT_DIR": str(at.git_dir),
        "GIT_CEILING_DIRECTORIES": str(at.folder),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_PAGER": "cat",
    }


def write_patch(at: Scratch, before: bytes, after: bytes, patch: Path) -> list[Row]:
    """Write the difference of two trees as a git patch; return its rows."""
    renames = f"-l{RENAMES_MAX}"
    trees = (before.hex(), after.hex(), "--")
    raw = at.git("diff-tree", "-r", "-z", "-M", renames, "--raw", "--numstat", "--no-abbrev", *trees).stdout
    form = ("-p", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short")
    names = ("--src-prefix=a/", "--dst-prefix=b/")
    at.git("diff-tree", "-r", "-M", renames, *form, *names, *trees, stdout_path=patch)
    return _rows(raw)


def _rows(raw: bytes) -> list[Row]:
    """Read `--raw --numstat -z`: first all raw lines, then all counts, in the same order."""
    fields = iter(raw.split(b"\0"))
    heads: list[tuple[list[str], bytes, bytes | None]] = []
    binary: list[bool] = []
    for field in fields:
        if field.startswith(b":") and not binary:
            words = field[1:].decode().split(" ")
            first = next(fields)
            moved = words[4][0] in "RC"
            heads.append((words, next(fields) if moved else first, first if moved else None))
        elif field:
            added, _, path = field.split(b"\t", 2)
            binary.append(added == b"-")
            if not path:
                next(fields), next(fields)
    return [
        Row(words[4][0], int(words[0], 8), int(words[1], 8), words[2] == words[3], path, old, is_binary)
        for (words, path, old), is_binary in zip(heads, binary, strict=True)
    ]


def ignored(at: Scratch, paths: Sequence[str], rules: Mapping[str, bytes], excluded: bytes) -> set[str]:
    """Ask git which of these files its ignore rules leave out.

    Git gets a tree that holds nothing but copies of the rules, so it cannot meet anything else.

    Args:
        rules: content of each `.gitignore`, by the folder it is in (with a slash at the end).
        excluded: content of `info/exclude`.
    """
    if not paths or not (rules or excluded):
        return set()
    shadow = at.folder / "rules"
    shadow.mkdir()
    for folder, text in rules.items():
        if len(os.fsencode(folder)) <= RULES_PATH_BYTES_MAX:
            for end in (place for place, letter in enumerate(folder) if letter == "/"):
                (shadow / folder[:end]).mkdir(exist_ok=True)
            (shadow / folder / ".gitignore").write_bytes(text)
    (at.git_dir / "info/exclude").write_bytes(excluded)
    # "./" before each, because ":" at the start would be git's own syntax.
    asked = b"".join(b"./%s\0" % raw for raw in map(os.fsencode, paths) if len(raw) <= RULES_PATH_BYTES_MAX)
    settings = {"GIT_WORK_TREE": str(shadow)}
    words = ("check-ignore", "--no-index", "--stdin", "-z")
    # Exit code 1 says that none is ignored.
    answer = at.git("-C", str(shadow), *words, settings=settings, stdin=asked, codes=(0, 1)).stdout
    remove_tree(shadow)
    return {os.fsdecode(path[2:]) for path in answer.split(b"\0") if path}


def tracked(at: Scratch, index: bytes) -> set[str]:
    """List the paths of a repository's index; empty when git cannot read it (a split or sparse one)."""
    copy = at.folder / "index"
    copy.write_bytes(index)
    done = at.git("ls-files", "-z", settings={"GIT_INDEX_FILE": str(copy)}, codes=range(256))
    return {os.fsdecode(path) for path in done.stdout.split(b"\0") if path} if done.code == 0 else set()


def merge(at: Scratch, ours: bytes, base: bytes, theirs: bytes) -> bytes | None:
    """Merge two changes of one file; None when they touch the same lines or are not text."""
    names = ("ours", "base", "theirs")
    for name, data in zip(names, (ours, base, theirs), strict=True):
        (at.folder / name).write_bytes(data)
    done = at.git("merge-file", "-p", "--quiet", *names, codes=range(256))
    return done.stdout if done.code == 0 else None
