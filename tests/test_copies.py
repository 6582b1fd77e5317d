"""Copies of a receipt: whole or not there, also where their writer is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from backplane.cli.copies import Copy
from backplane.errors import StoreError

WAIT_S = 30
KILLED = """
import os, signal, sys
from backplane.cli.copies import Copy
def chunks():
    yield b"the first half"
    os.kill(os.getpid(), signal.SIGKILL)
Copy(sys.argv[1]).write(chunks())
"""


@pytest.fixture(params=["without a name", "under another name"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the file is made: as Linux can, or as every system can."""
    if request.param == "under another name":
        monkeypatch.delattr(os, "O_TMPFILE")


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs files without a name")
def test_a_kill_while_a_copy_is_written_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "receipt.json")], timeout=WAIT_S, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("meanwhile", ["nothing", "a file", "a link"])
def test_a_copy_is_made_in_place_of_what_took_its_name(tmp_path: Path, meanwhile: str) -> None:
    path, victim = tmp_path / "receipt.json", tmp_path / "victim"
    victim.write_bytes(b"mine")
    with closing(Copy(str(path))) as copy:
        if meanwhile == "a file":
            path.write_bytes(b"planted")
        elif meanwhile == "a link":
            path.symlink_to(victim)
        copy.write(iter([b"one ", b"two"]))
    assert (path.read_bytes(), path.is_symlink(), victim.read_bytes()) == (b"one two", False, b"mine")
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert sorted(tmp_path.iterdir()) == [path, victim]


@pytest.mark.usefixtures("way")
def test_nothing_stays_of_a_copy_that_fails(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"one"
        raise OSError(28, "No space left on device")

    with closing(Copy(str(tmp_path / "receipt.json"))) as copy, pytest.raises(StoreError, match="No space left"):
        copy.write(chunks())
    (tmp_path / "receipt.json").mkdir()
    with pytest.raises(Exception, match="cannot be written"), closing(Copy(str(tmp_path / "receipt.json"))):
        pass
    (tmp_path / "receipt.json").rmdir()
    with closing(Copy(str(tmp_path / "receipt.json"))) as copy:
        (tmp_path / "receipt.json").mkdir()
        with pytest.raises(StoreError, match="cannot be written"):
            copy.write(iter([b"one"]))
    assert [path.name for path in tmp_path.iterdir()] == ["receipt.json"]
