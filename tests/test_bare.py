"""A patch that came with a receipt from elsewhere is applied like one of our own, to a folder that is named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from backplane.cli import main

TASK = """
sed -i 's/a - b/a + b/' calc.py; mv 'old name.txt' 'neuer "Näme.txt'; rm gone; printf '\\0\\1' > data.bin
mkdir sub; ln -s ../calc.py sub/link; chmod +x tool; echo new > new.txt
"""
LINES = "".join(f"line {number}\n" for number in range(40))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a run was made; its receipt and its patch were imported into the state folder that holds now."""
    made = tmp_path / "made"
    made.mkdir()
    for name, text in (("calc.py", f"a - b\n{LINES}"), ("old name.txt", LINES), ("gone", "x\n"), ("tool", "x\n")):
        (made / name).write_text(text)
    monkeypatch.chdir(made)
    monkeypatch.setenv("BACKPLANE_HOME", str(tmp_path / "there"))
    assert main(["run", TASK, "-b", "shell"]) == 0
    assert main(["receipts", "export", "last", "--to", str(tmp_path / "bundle")]) == 0
    monkeypatch.setenv("BACKPLANE_HOME", str(tmp_path / "here"))
    assert main(["receipts", "import", str(tmp_path / "bundle")]) == 0
    return made


def facts(root: Path) -> dict[str, object]:
    found = [path for path in root.rglob("*") if path.is_symlink() or path.is_file()]
    return {str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else _plain(path) for path in found}


def _plain(path: Path) -> tuple[bytes, int]:
    return path.read_bytes(), path.stat().st_mode


def test_a_patch_from_elsewhere_is_applied_to_the_folder_that_is_named(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, other = facts(root), tmp_path / "other"
    shutil.copytree(root, other, symlinks=True)
    capfd.readouterr()
    assert main(["receipts", "show", "last"]) == 0
    assert "--root DIR)" in capfd.readouterr().out
    assert main(["apply", "last"]) == 2
    told = capfd.readouterr().err
    assert "config_invalid: " in told
    assert "git apply /" in told
    assert main(["apply", "last", "--root", str(other), "--check"]) == 0
    assert facts(other) == before
    assert main(["apply", "last", "--root", str(other)]) == 0
    assert "changed 8 files" in capfd.readouterr().out
    there = facts(other)
    assert sorted(there) == sorted(["calc.py", 'neuer "Näme.txt', "data.bin", "new.txt", "sub/link", "tool"])
    assert there["calc.py"][0].startswith(b"a + b\n")  # type: ignore[index]
    assert there["data.bin"][0] == b"\0\1"  # type: ignore[index]
    assert there["sub/link"] == "../calc.py"
    assert there["tool"][1] & 0o100  # type: ignore[index]
    assert main(["apply", "last", "--root", str(other)]) == 1
    assert "the patch is applied already" in capfd.readouterr().err
    assert main(["apply", "last", "--root", str(tmp_path / "none")]) == 1
    assert facts(root) == before


def test_a_folder_that_has_changed_is_left_alone_or_merged(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (root / "calc.py").open("a") as file:
        file.write("mine\n")
    before = facts(root)
    assert main(["apply", "last", "--root", "."]) == 1
    assert "changed since the run began: 'calc.py'" in capfd.readouterr().err
    assert facts(root) == before
    assert main(["apply", "last", "--root", ".", "--merge"]) == 0
    text = (root / "calc.py").read_text()
    assert text.startswith("a + b\n")
    assert text.endswith("mine\n")


def test_a_patch_that_does_not_fit_or_was_edited_changes_nothing(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (root / "gone").write_text("another\n")
    before = facts(root)
    assert main(["apply", "last", "--root", ".", "--merge"]) == 1
    assert "the patch does not fit this folder" in capfd.readouterr().err
    (patch,) = (tmp_path / "here" / "runs").glob("*/patch.diff")
    patch.write_bytes(patch.read_bytes().replace(b"+new", b"+bad"))
    assert main(["apply", "last", "--root", "."]) == 1
    assert "is not the one that the receipt names" in capfd.readouterr().err
    assert facts(root) == before
