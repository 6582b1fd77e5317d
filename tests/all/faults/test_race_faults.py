"""Somebody else of the same user, who swaps folders and files for links again and again while we read or write them.

The catalogue does not name these cases; they are of the class of F42.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from backplane.workspace.tree import give_rights
from tests.all.faults import sizes
from tests.all.faults.ground import UGLY, Ended, Ground

AT_FDCWD, RENAME_EXCHANGE = -100, 2
PAUSE_S = 0.002
MARK = "what the neighbour keeps to himself"

Pairs = Sequence[tuple[Path, Path]]


@contextmanager
def swapping(find: Callable[[], Pairs]) -> Iterator[None]:
    """Exchange the names of each pair and back, time and again; what is not there is tried all the same."""
    rename, ended = ctypes.CDLL(None).renameat2, threading.Event()

    def exchange(pairs: Pairs) -> None:
        for left, right in pairs:
            rename(AT_FDCWD, os.fsencode(left), AT_FDCWD, os.fsencode(right), RENAME_EXCHANGE)

    def swap() -> None:
        turn = 0
        while not ended.is_set():
            turn += 1
            pairs = find()
            exchange(pairs)
            ended.wait(PAUSE_S * (turn % 4 == 0))
            exchange(pairs[::-1])
            ended.wait(PAUSE_S * (turn % 4 == 2))

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def facts(root: Path) -> dict[str, tuple[int, int, int]]:
    """Mode, size and time of everything in a folder."""
    return {
        str(path): (path.lstat().st_mode, path.lstat().st_size, path.lstat().st_mtime_ns) for path in root.rglob("*")
    }


def neighbour(ground: Ground, names: Sequence[str]) -> Path:
    """A folder outside of the workspace, whose files have the names of ours."""
    outside = ground.folder / "outside"
    for name in names:
        (outside / name).parent.mkdir(parents=True, exist_ok=True)
        (outside / name).write_text(MARK)
        (outside / name).chmod(0o240)
    return outside


def in_order(ground: Ground, ended: Ended, codes: tuple[str | None, ...]) -> None:
    """However it ended: one clear code, nobody left, and nothing that was not ours told or kept."""
    assert ended.error in codes, ended.stderr
    assert ended.left == []
    assert not any(word in ended.stderr + ended.stdout for word in UGLY)
    assert MARK.encode() not in ended.stdout + ended.stderr


LOOK = """
import subprocess
hello(); take(); os.chdir(RUN["work_order"]["workspace"]["root"])
seen = subprocess.run("cat $(find . -type f -not -path './.git/*'); git cat-file --batch --batch-all-objects",
                      shell=True, capture_output=True).stdout
event(json.dumps([seen.count(b"ours"), seen.decode("latin-1").count("neighbour")])); final(); rest()
"""


def test_f42_a_folder_or_file_swapped_for_a_link_while_it_is_staged_leads_nowhere(ground: Ground) -> None:
    names = [f"{folder}/{number}" for folder in ("d", "d/sub", "d/sub/deep") for number in range(20)]
    outside = neighbour(ground, names)
    for name in names:
        (ground.work / name).parent.mkdir(parents=True, exist_ok=True)
        (ground.work / name).write_text("ours\n")
    pairs = []
    for number, name in enumerate(("d", "d/sub", "d/3")):
        link = ground.folder / f"link-{number}"
        link.symlink_to(outside / name)
        pairs.append((ground.work / name, link))
    before = facts(outside)
    for turn in range(sizes.of(3, 60)):
        with swapping(lambda turn=turn: [pairs[turn % len(pairs)]]):  # type: ignore[misc]
            ended = ground.run(LOOK)
        in_order(ground, ended, (None, "workspace_staging_failed"))
        assert [json.loads(event["text"])[1] for event in ended.events] in ([], [0])
        assert not ground.litter()
    assert facts(outside) == before


@pytest.mark.parametrize("kind", ["a file", "a folder", "nothing"])
def test_f42_no_mode_is_changed_through_a_link(tmp_path: Path, kind: str) -> None:
    theirs = tmp_path / "theirs"
    if kind != "nothing":
        theirs.write_text("x") if kind == "a file" else theirs.mkdir()
        theirs.chmod(0o500)
    (tmp_path / "link").symlink_to(theirs)
    with pytest.raises(OSError, match=r"supported|symbolic"):
        give_rights(str(tmp_path / "link"), 0o777)
    assert kind == "nothing" or theirs.stat().st_mode & 0o777 == 0o500
