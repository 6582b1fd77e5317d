"""Files of a result: whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from backplane.cli.result_file import ResultFile
from backplane.errors import StoreError


@pytest.mark.parametrize("mode", [None, 0o600])
def test_a_file_is_made_or_replaced_and_keeps_its_mode(tmp_path: Path, mode: int | None) -> None:
    path = tmp_path / "receipt.json"
    if mode is not None:
        path.write_bytes(b"old and longer")
        path.chmod(mode)
    target = ResultFile(str(path))
    assert path.exists() == (mode is not None)
    target.write([b"one ", b"two"])
    umask = os.umask(0)
    os.umask(umask)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"one two", mode or 0o666 & ~umask)
    assert [*tmp_path.iterdir()] == [path]


def test_nothing_stays_of_a_file_that_fails(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"one"
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="No space left"):
        ResultFile(str(tmp_path / "receipt.json")).write(chunks())
    assert [path.name for path in tmp_path.iterdir()] == []
