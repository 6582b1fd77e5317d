"""Copies of a receipt: whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from backplane.cli.copies import Copy
from backplane.errors import StoreError


@pytest.mark.parametrize("meanwhile", ["nothing", "a link"])
def test_a_copy_is_made_in_place_of_what_took_its_name(tmp_path: Path, meanwhile: str) -> None:
    path, victim = tmp_path / "receipt.json", tmp_path / "victim"
    victim.write_bytes(b"mine")
    with closing(Copy(str(path))) as copy:
        if meanwhile == "a link":
            path.symlink_to(victim)
        copy.write(iter([b"one ", b"two"]))
    assert (path.read_bytes(), path.is_symlink(), victim.read_bytes()) == (b"one two", False, b"mine")
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert sorted(tmp_path.iterdir()) == [path, victim]


def test_nothing_stays_of_a_copy_that_fails(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"one"
        raise OSError(28, "No space left on device")

    with closing(Copy(str(tmp_path / "receipt.json"))) as copy, pytest.raises(StoreError, match="No space left"):
        copy.write(chunks())
    assert [path.name for path in tmp_path.iterdir()] == []
