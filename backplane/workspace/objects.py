"""Writes and reads git's objects without git: names of contents, trees of files, and packs without deltas.

For a few files, the start of git would take longer than the work. The original's repository may store objects as
deltas, so only git reads those.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from io import BufferedRandom
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import msgspec

from backplane.workspace.tree import FILE_FLAGS, READ_BYTES, parent, read_file, unguessable

FILE: Final = 0o100644
PROGRAM: Final = 0o100755
LINK: Final = 0o120000

Kind = Literal["commit", "tree", "blob"]
_NUMBERS: Final[dict[Kind, int]] = {"commit": 1, "tree": 2, "blob": 3}
_KINDS: Final = {number: kind for kind, number in _NUMBERS.items()}

_INDEX_HEAD: Final = b"\xfftOc\0\0\0\2"
_INDEX_BYTES_MAX: Final = 256 << 20
"""Maximum bytes of a pack's index; a larger one is not read. An index of a million objects has 28 MiB."""

_NAMES_AT: Final = len(_INDEX_HEAD) + 256 * 4
_LOW: Final = 0xFFFFFFFF
"""Mask of the bits that git's index keeps of a number."""

_LARGE: Final = 1 << 31
"""Smallest offset that is stored with eight bytes, in a table of its own."""


class Leaf(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A file or link as an entry of git: its mode, and git's name of its content."""

    mode: int
    oid: str
    """The name in hexadecimal digits."""


def new_hash(data: bytes = b"", *, sha256: bool) -> Any:
    """Return a hash object of git's algorithm, SHA-1 or SHA-256, that was fed with `data`."""
    return (hashlib.sha256 if sha256 else hashlib.sha1)(data, usedforsecurity=False)


def head_of(size: int, kind: Kind = "blob") -> bytes:
    """Return the bytes that git hashes before an object's content: its kind and size."""
    return b"%s %d\0" % (kind.encode(), size)


def object_id(data: bytes, kind: Kind = "blob", *, sha256: bool = False) -> str:
    """Return git's name of an object with this content."""
    digest = new_hash(head_of(len(data), kind), sha256=sha256)
    digest.update(data)
    return str(digest.hexdigest())


EMPTY_TREES: Final = tuple(object_id(b"", "tree", sha256=sha256) for sha256 in (False, True))
"""Names of the tree without files, by SHA-1 and by SHA-256; git knows it in every repository."""


def read_tree(read: Callable[[str], bytes], tree: str) -> dict[str, Leaf]:
    """Return all files in a tree, by their paths.

    Args:
        read: returns the content of the object with a name.
        tree: name of the tree.

    Raises:
        ValueError: an object is no tree.
    """
    found: dict[str, Leaf] = {}
    waiting = [("", tree)]
    while waiting:
        folder, oid = waiting.pop()
        data, place, width = read(oid), 0, len(oid) // 2
        while place < len(data):
            end = data.index(b"\0", place)
            mode, name = data[place:end].split(b" ", 1)
            place = end + 1 + width
            path, below = folder + os.fsdecode(name), data[end + 1 : place].hex()
            if mode == b"40000":
                waiting.append((f"{path}/", below))
            else:
                found[path] = Leaf(int(mode, 8), below)
    return found


def index_of(leaves: Mapping[str, Leaf], facts: Callable[[str], tuple[int, int, int, int]], *, sha256: bool) -> bytes:
    """Return git's index of these files, so that git need not read those that have not changed.

    Args:
        facts: returns inode, size, modification and change time (in ns) of a file.
    """
    rows = [b"DIRC" + struct.pack(">2I", 2, len(leaves))]
    numbers, user, group = struct.Struct(">10I").pack, os.geteuid(), os.getegid()
    for name, path in sorted((os.fsencode(path), path) for path in leaves):
        inode, size, changed_ns, altered_ns = facts(path)
        (altered_s, altered_ns), (changed_s, changed_ns) = divmod(altered_ns, 10**9), divmod(changed_ns, 10**9)
        times = altered_s & _LOW, altered_ns, changed_s & _LOW, changed_ns
        row = numbers(*times, 0, inode & _LOW, leaves[path].mode, user, group, size & _LOW)
        row += bytes.fromhex(leaves[path].oid) + min(len(name), 0xFFF).to_bytes(2, "big") + name
        rows.append(row + bytes(8 - len(row) % 8))
    data = b"".join(rows)
    checksum: bytes = new_hash(data, sha256=sha256).digest()
    return data + checksum


class PackWriter:
    """Writes a pack into a folder of objects; git sees the pack once it is finished.

    Args:
        known: names of the objects that the repository already has, which are not written; new names are added.
    """

    def __init__(self, folder: Path, known: set[bytes], *, sha256: bool) -> None:
        self.sha256, self._known = sha256, known
        self._folder, self._path = folder, folder / f"tmp_pack_{unguessable()}"
        self._file: BufferedRandom | None = None
        self._rows: list[tuple[bytes, int, int]] = []
        """Name, checksum and offset of each object."""
        self._size = 0

    def blob(self, leaf: Leaf, data: bytes) -> None:
        """Store the content of a file or link."""
        self._add(leaf.oid, "blob", data)

    def tree(self, leaves: Mapping[str, Leaf]) -> str:
        """Store a tree of files, but not their contents; return its name."""
        folders: dict[str, list[tuple[bytes, bytes]]] = {"": []}

        def add(path: str, end: bytes, mode: int, oid: str) -> None:
            above = parent(path)
            folder = above
            while folder not in folders:
                folders[folder] = []
                folder = parent(folder[:-1])
            name = os.fsencode(path[len(above) :])
            folders[above].append((name + end, b"%o %s\0" % (mode, name) + bytes.fromhex(oid)))

        for path, leaf in leaves.items():
            add(path, b"", leaf.mode, leaf.oid)
        for folder in sorted(folders, key=lambda folder: folder.count("/"), reverse=True):
            oid = self._store("tree", b"".join(row for _, row in sorted(folders[folder])))
            if folder:
                add(folder[:-1], b"/", 0o40000, oid)
        return oid

    def state(self, before: Mapping[str, Leaf], after: Mapping[str, Leaf]) -> str:
        """Store a tree with two folders, and return its name: `a` has the files before a change, `b` after it."""
        trees = {"a": self.tree(before), "b": self.tree(after)}
        rows = (b"40000 %s\0" % name.encode() + bytes.fromhex(oid) for name, oid in trees.items())
        return self._store("tree", b"".join(rows))

    def commit(self, leaves: Mapping[str, Leaf], message: str) -> str:
        """Store a commit without a parent; return its name."""
        who = f"backplane <backplane@localhost> {int(time.time())} +0000"
        text = f"tree {self.tree(leaves)}\nauthor {who}\ncommitter {who}\n\n{message}"
        return self._store("commit", text.encode())

    def _store(self, kind: Kind, data: bytes) -> str:
        oid = object_id(data, kind, sha256=self.sha256)
        self._add(oid, kind, data)
        return oid

    def _add(self, oid: str, kind: Kind, data: bytes) -> None:
        name = bytes.fromhex(oid)
        if name in self._known:
            return
        self._known.add(name)
        if self._file is None:
            self._file = open(self._path, "xb+", opener=_private)  # noqa: SIM115 - closed by `finish`
            self._size = self._file.write(b"PACK" + bytes(8))
        head, size = bytearray((_NUMBERS[kind] << 4 | len(data) & 15,)), len(data) >> 4
        while size:
            head[-1] |= 0x80
            head.append(size & 0x7F)
            size >>= 7
        packed = bytes(head) + zlib.compress(data, 0)
        self._rows.append((name, zlib.crc32(packed), self._size))
        self._size += self._file.write(packed)

    def finish(self) -> None:
        """Complete the pack and write its index; do nothing if no object is new. Raises OSError."""
        if self._file is None:
            return
        with self._file as file:
            file.seek(4)
            file.write(struct.pack(">2I", 2, len(self._rows)))
            file.seek(0)
            pack_hash = hashlib.file_digest(file, lambda: new_hash(sha256=self.sha256)).digest()
            file.seek(0, os.SEEK_END)
            file.write(pack_hash)
        index = self._path.with_suffix(".index")
        index.write_bytes(self._index(pack_hash))
        place = self._folder / f"pack-{pack_hash.hex()}"
        self._path.rename(place.with_suffix(".pack"))
        index.rename(place.with_suffix(".idx"))

    def discard(self) -> None:
        """Remove an unfinished pack."""
        if self._file is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)

    def _index(self, pack_hash: bytes) -> bytes:
        rows = sorted(self._rows)
        counts = Counter(name[0] for name, _, _ in rows)
        large = [offset for _, _, offset in rows if offset >= _LARGE]
        places = itertools.count(_LARGE)
        offsets = [offset if offset < _LARGE else next(places) for _, _, offset in rows]
        data = b"".join(
            [
                _INDEX_HEAD,
                struct.pack(">256I", *itertools.accumulate(counts[first] for first in range(256))),
                *(name for name, _, _ in rows),
                struct.pack(f">{len(rows)}I", *(checksum for _, checksum, _ in rows)),
                struct.pack(f">{len(rows)}I", *offsets),
                struct.pack(f">{len(large)}Q", *large),
                pack_hash,
            ]
        )
        checksum: bytes = new_hash(data, sha256=self.sha256).digest()
        return data + checksum


class PackReader:
    """Reads a finished pack.

    Args:
        index: path of the pack's index; the pack is beside it.

    Raises:
        OSError, ValueError, struct.error: the index cannot be read.
    """

    def __init__(self, index: Path) -> None:
        found = read_file(index, _INDEX_BYTES_MAX)
        if found is None:
            raise ValueError("no index of a pack")
        self._path, self._data = index.with_suffix(".pack"), found[0]
        self._counts = struct.unpack_from(">256I", self._data, len(_INDEX_HEAD))

    def find(self, name: bytes) -> int | None:
        """Return the offset of an object; None if it is not in this pack."""
        data, width, count = self._data, len(name), self._counts[255]
        start = self._counts[name[0] - 1] if name[0] else 0

        def name_at(row: int) -> bytes:
            return data[_NAMES_AT + row * width : _NAMES_AT + (row + 1) * width]

        row = bisect.bisect_left(range(count), name, start, self._counts[name[0]], key=name_at)
        if row == count or name_at(row) != name:
            return None
        offsets_at = _NAMES_AT + count * (width + 4)
        offset: int = struct.unpack_from(">I", data, offsets_at + row * 4)[0]
        if offset >= _LARGE:
            return int(struct.unpack_from(">Q", data, offsets_at + count * 4 + (offset - _LARGE) * 8)[0])
        return offset

    def pieces(self, offset: int) -> Iterator[bytes]:
        """Yield the object at an offset in pieces: first its kind and size, as git hashes them, then its content.

        Raises:
            OSError, LookupError, ValueError, zlib.error: it cannot be read, or is a delta of another object.
        """
        with open(os.open(self._path, FILE_FLAGS), "rb") as file:
            file.seek(offset)
            (byte,) = file.read(1)
            kind, size, bits = _KINDS[byte >> 4 & 7], byte & 15, 4
            while byte & 0x80:
                (byte,) = file.read(1)
                size |= (byte & 0x7F) << bits
                bits += 7
            yield head_of(size, kind)
            # Zlib adds less than a thousandth, so this reads little of the next object.
            yield from _unpacked(file, min(size + size // 1000 + 64, READ_BYTES))


def read_loose(path: Path) -> Iterator[bytes]:
    """Yield an object from a file of its own, in pieces like `PackReader.pieces`. Raises OSError, `zlib.error`."""
    with open(os.open(path, FILE_FLAGS), "rb") as file:
        yield from _unpacked(file, READ_BYTES)


def _unpacked(file: BinaryIO, step_bytes: int) -> Iterator[bytes]:
    """Unpack the compressed data at a file's current position, in pieces. Raises OSError, `zlib.error`.

    Args:
        step_bytes: bytes of compressed data to read at a time.
    """
    unpacker = zlib.decompressobj()
    while not unpacker.eof and (packed := unpacker.unconsumed_tail or file.read(step_bytes)):
        yield unpacker.decompress(packed, READ_BYTES)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
