"""Objects that are written and read without git, held against git itself."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from backplane.errors import WorkspaceError
from backplane.workspace.objects import FILE, LINK, PROGRAM, Leaf, PackReader, object_id
from backplane.workspace.repo import Repo
from tests.test_workspace import Place, git, place, tool

__all__ = ["place"]

FILES = {
    "a.b": b"a\n", "a/b/c": b"x" * 70_000, "a/b.c": bytes(range(256)) * 9, "a-b": b"\0", "é": b"e\r\n",
    "\udcff/x y": b"odd\n", 'q"\n': b"quoted\n", "deep/" * 300 + "f": b"deep\n",
}  # fmt: skip
"""Names on which git's order of a tree depends, and contents of many kinds."""


def stored(repo: Repo, files: dict[str, bytes]) -> tuple[str, dict[str, Leaf]]:
    leaves = {}
    with repo.storing() as objects:
        for path, data in files.items():
            mode = {"a.b": PROGRAM, "a-b": LINK}.get(path, FILE)
            leaves[path] = Leaf(mode, object_id(data, sha256=repo.sha256))
            objects.blob(leaves[path], data)
        tree = objects.tree(leaves)
    return tree, leaves


@pytest.mark.parametrize("sha256", [False, True])
def test_git_reads_what_we_store_and_we_read_what_git_packs(tmp_path: Path, sha256: bool) -> None:
    repo = Repo.create(tmp_path / "repo.git", sha256=sha256)
    tree, leaves = stored(repo, FILES)
    with repo.storing() as objects:
        state = objects.state({}, leaves)
    repo.keep("one", state)
    git("fsck", "--strict", "--full", cwd=repo.folder)
    assert git("rev-parse", f"{state}:b", cwd=repo.folder).decode().strip() == tree
    for _ in range(2):
        assert repo.leaves(tree) == leaves
        assert {path: repo.read(leaf.oid) for path, leaf in leaves.items()} == FILES
        repo.slim()
    assert len(list((repo.folder / "objects/pack").glob("*.pack"))) == 1


def test_an_object_is_found_in_any_pack_and_alone(tmp_path: Path) -> None:
    chance = random.Random(3)
    contents = [chance.randbytes(chance.randrange(2000)) for _ in range(600)]
    repo = Repo.create(tmp_path / "repo.git")
    for start in range(0, 600, 200):
        stored(repo, {f"{number}": contents[number] for number in range(start, start + 200)})
    (tmp_path / "loose").write_bytes(b"loose\n")
    oid = git("hash-object", "-w", str(tmp_path / "loose"), cwd=repo.folder).decode().strip()
    assert repo.read(oid) == b"loose\n"
    assert [repo.read(object_id(data)) for data in contents] == contents
    with pytest.raises(WorkspaceError, match="not in its repository"):
        repo.read("12" * 20)


def test_offsets_beyond_two_gib_are_read(tmp_path: Path) -> None:
    repo = Repo.create(tmp_path / "repo.git")
    stored(repo, {"f": b"far\n"})
    (pack,) = (repo.folder / "objects/pack").glob("*.pack")
    index = pack.with_suffix(".idx")
    near = PackReader(index).find(bytes.fromhex(object_id(b"far\n")))
    data = bytearray(index.read_bytes())
    names = 8 + 1024
    offsets = names + 2 * 20 + 2 * 4  # Two objects: the file and its tree.
    row = sorted([object_id(b"far\n"), repo_tree(repo)]).index(object_id(b"far\n"))
    data[offsets + 4 * row : offsets + 4 * row + 4] = (1 << 31).to_bytes(4, "big")
    data[offsets + 8 : offsets + 8] = (5 << 30).to_bytes(8, "big")
    index.chmod(0o600)
    index.write_bytes(data)
    assert near == 12
    assert PackReader(index).find(bytes.fromhex(object_id(b"far\n"))) == 5 << 30


def repo_tree(repo: Repo) -> str:
    return stored(repo, {"f": b"far\n"})[0]


def test_an_unfinished_pack_is_removed_and_stored_again(tmp_path: Path) -> None:
    repo = Repo.create(tmp_path / "repo.git")
    leaf = Leaf(FILE, object_id(b"x"))

    def fail() -> None:
        with repo.storing() as objects:
            objects.blob(leaf, b"x")
            raise OSError("made to fail")

    with pytest.raises(OSError, match="made to fail"):
        fail()
    assert not list((repo.folder / "objects/pack").iterdir())
    stored(repo, {"f": b"x"})
    assert repo.read(leaf.oid) == b"x"


def test_the_agents_first_status_reads_no_file(place: Place) -> None:
    place.write({f"d{number % 7}/f{number}": f"{number}\n" * 9 for number in range(60)})
    for folder, _, names in os.walk(place.original):
        for name in names:
            os.utime(os.path.join(folder, name), (1_600_000_000, 1_600_000_000))
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    with place.staged() as found:
        trace = place.base / "trace"
        tool("strace", "-f", "-e", "trace=openat", "-o", str(trace), "git", "status", "--porcelain", cwd=found.root)
        assert "f59" not in trace.read_text(errors="replace")
        assert git("status", "--porcelain", cwd=found.root) == b""
