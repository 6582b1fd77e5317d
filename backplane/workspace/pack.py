"""Git's formats, written without git: packs, trees, and a whole repository of one commit.

Contents go in by name and come out by hash. No program is run and no work tree is read here, so
what is written depends on nothing but what was given.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from backplane.workspace.copying import copy_whole
from backplane.workspace.tree import parent

STORED_BYTES_MAX: Final = 0xFFFF
"""Longest block that deflate can store as it is."""

_PIECE_BYTES: Final = 64 * 1024
"""As much of an object is read at once: nearly all are shorter."""

PACK_NAME: Final = "pack-" + "0" * 40
"""Git wants a name of this shape and does not look at its number."""

FILE: Final = 0o100644
PROGRAM: Final = 0o100755
LINK: Final = 0o120000
_TREE: Final = 0o040000

_PACK_HEAD: Final = struct.Struct(">4sII")
_KINDS: Final = {"commit": 1, "tree": 2, "blob": 3}

AGENT_USER: Final = """[user]
\tname = agent
\temail = agent@localhost
"""

_AGENT_CONFIG: Final = f"""[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
\tlogallrefupdates = true
{AGENT_USER}"""

# With a folder of hooks, so that a sandbox can close it: a missing folder cannot be closed.
AGENT_FOLDERS: Final = ("refs/heads", "refs/tags", "info", "objects/info", "objects/pack", "hooks")


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """A file or link as git knows it."""

    mode: int
    oid: bytes


def object_id(kind: str, data: bytes) -> bytes:
    """Git's name of an object, 20 bytes."""
    return hashlib.sha1(b"%s %d\0" % (kind.encode(), len(data)) + data, usedforsecurity=False).digest()


def blob_id(data: bytes) -> bytes:
    """Git's name of a file's content."""
    return object_id("blob", data)


class Pack:
    """A pack file in the making; objects are stored as they are, because time counts here and disk less.

    Objects are added as they come and can be read again; `finish` writes the count, the checksum
    and the index that git needs.
    """

    __slots__ = ("_file", "_name", "_objects", "bytes")

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._name = os.fspath(path)
        self.bytes = _PACK_HEAD.size
        self._file: io.BufferedRandom | None = path.open("x+b")
        self._file.write(_PACK_HEAD.pack(b"PACK", 2, 0))
        self._objects: dict[bytes, tuple[int, int]] = {}

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self._name)

    def add(self, kind: str, data: bytes, oid: bytes | None = None) -> bytes:
        """Add an object unless it is there; return its name."""
        if oid is None:
            oid = object_id(kind, data)
        if oid not in self._objects:
            record = _object_head(_KINDS[kind], len(data)) + _stored(data)
            self._objects[oid] = (self.bytes, zlib.crc32(record))
            assert self._file is not None, "closed"
            self._file.write(record)
            self.bytes += len(record)
        return oid

    def __contains__(self, oid: bytes) -> bool:
        return oid in self._objects

    def read(self, oid: bytes) -> bytes:
        """Read an object's content as it is in the file now; empty when that makes no sense any more."""
        stream, data = zlib.decompressobj(), bytearray()
        with open(self._name, "rb") as file, suppress(zlib.error):
            file.seek(self._objects[oid][0])
            while file.read(1) >= b"\x80":
                pass  # Of the record's head only the last byte is below that.
            while not stream.eof and (piece := file.read(_PIECE_BYTES)):
                data += stream.decompress(piece)
        return bytes(data)

    def finish(self) -> bytes:
        """End the pack and return its index."""
        assert self._file is not None, "closed"
        with self._file as file:
            file.seek(0)
            file.write(_PACK_HEAD.pack(b"PACK", 2, len(self._objects)))
            file.seek(0)
            checksum = hashlib.file_digest(file, "sha1").digest()
            file.seek(0, os.SEEK_END)
            file.write(checksum)
        return _pack_index(self._objects, checksum)

    def close(self) -> None:
        """Let go of the file; of one that was not finished nothing is wanted any more."""
        file, self._file = self._file, None
        # What a full disk did not take is written once more by closing, and fails once more.
        with suppress(OSError):
            if file is not None:
                file.close()


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


class ObjectNames:
    """Takes objects as a pack does, and keeps nothing but their names."""

    def add(self, kind: str, data: bytes) -> bytes:
        return object_id(kind, data)


def write_trees(pack: Pack | ObjectNames, leaves: Mapping[str, Leaf]) -> bytes:
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
    reason: str = "",
) -> None:
    """Make a repository of one commit whose index is fresh, so that the agent's `git status` reads no file.

    Args:
        git_dir: the new `.git`, for the agent to do with as it likes: it gets a copy of the pack. Its config and its
            folder of hooks may be there already.
        pack: holds the blobs already; finished here.
        facts: `lstat` of each file, by path.
        excluded: content of `info/exclude`.
        reason: why the original's history is not here; "" if it has none.
    """
    tree = write_trees(pack, leaves)
    who = f"backplane <backplane@localhost> {now_s} +0000"
    told = f"\nThe history of the original is not in this copy: {reason}.\n" if reason else ""
    text = f"tree {tree.hex()}\nauthor {who}\ncommitter {who}\n\nbaseline\n{told}"
    commit = pack.add("commit", text.encode())
    pack_index = pack.finish()
    for name in AGENT_FOLDERS:
        (git_dir / name).mkdir(parents=True, exist_ok=True)
    copy_whole(pack.path, git_dir / "objects/pack" / f"{PACK_NAME}.pack")
    (git_dir / "objects/pack" / f"{PACK_NAME}.idx").write_bytes(pack_index)
    (git_dir / "HEAD").write_text("ref: refs/heads/main\n")
    (git_dir / "refs/heads/main").write_text(commit.hex() + "\n")
    (git_dir / "config").write_text(_AGENT_CONFIG)
    (git_dir / "info/exclude").write_bytes(excluded)
    (git_dir / "index").write_bytes(_index(leaves, facts))


def _index(leaves: Mapping[str, Leaf], facts: Mapping[str, os.stat_result]) -> bytes:
    """Git's index, version 2."""
    parts = [INDEX_HEAD.pack(b"DIRC", 2, len(leaves))]
    for name, path in sorted((os.fsencode(path), path) for path in leaves):
        leaf, size = leaves[path], len(name)
        times, rest = _index_facts(facts[path])
        head = _INDEX_ENTRY.pack(*times, leaf.mode, *rest, leaf.oid, min(size, 0xFFF))
        parts += head, name, _PADDING[(_INDEX_ENTRY.size + size) % 8]
    body = b"".join(parts)
    return body + hashlib.sha1(body, usedforsecurity=False).digest()


def _index_facts(at: os.stat_result) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what an entry has of a file before and after its mode."""
    changed_s, changed_ns = divmod(at.st_ctime_ns, 1_000_000_000)
    modified_s, modified_ns = divmod(at.st_mtime_ns, 1_000_000_000)
    times = changed_s & _WORD, changed_ns, modified_s & _WORD, modified_ns, at.st_dev & _WORD, at.st_ino & _WORD
    return times, (at.st_uid & _WORD, at.st_gid & _WORD, at.st_size & _WORD)


def set_index_facts(index: bytearray, at: int, facts: os.stat_result | None) -> None:
    """Write the facts of a file into its entry; without any, git looks at the file anew."""
    times, rest = _index_facts(facts) if facts is not None else ((0,) * 6, (0,) * 3)
    struct.pack_into(">6I", index, at, *times)
    struct.pack_into(">3I", index, at + 28, *rest)


def without_facts(index: bytes) -> bytes:
    """An index of ours without what it knows of the files' times and places, which say nothing on another machine.

    Git looks at such files anew.
    """
    found, at = bytearray(index[:-20]), INDEX_HEAD.size
    while at < len(found):
        *facts, oid, flags = _INDEX_ENTRY.unpack_from(found, at)
        _INDEX_ENTRY.pack_into(found, at, 0, 0, 0, 0, 0, 0, facts[6], 0, 0, 0, oid, flags)
        at += (found.index(b"\0", at + _INDEX_ENTRY.size) - at) // 8 * 8 + 8
    return bytes(found) + hashlib.sha1(found, usedforsecurity=False).digest()


INDEX_HEAD: Final = struct.Struct(">4sII")
_INDEX_ENTRY: Final = struct.Struct(">10I20sH")
_PADDING: Final = [bytes(8 - over) for over in range(8)]
_WORD: Final = 0xFFFFFFFF
