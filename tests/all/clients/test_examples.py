"""The example client of each language gets its verified receipt."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.all.doors.test_examples import EXAMPLES, folder, programs, said
from tests.peers import ROOT

__all__ = ["folder", "programs"]


def client(name: str, needs: Callable[[str], str], built: Path) -> list[str | Path]:
    """The words that start a client: built where its language wants that."""
    clients = ROOT / "contracts" / "clients"
    if name == "client.mjs":
        return [needs("node"), EXAMPLES / name, clients / "backplane.mjs"]
    if name == "client.sh":
        needs("jq")
        return [needs("sh"), EXAMPLES / name, clients / "backplane.sh"]
    built.mkdir()
    if name == "Client.java":
        subprocess.run([needs("javac"), "-d", built, clients / "Backplane.java", EXAMPLES / name], check=True)
        return [needs("java"), "-cp", built, "Client"]
    (built / "backplane").mkdir()
    (built / "go.mod").write_text("module example\n\ngo 1.22\n")
    (built / "main.go").write_bytes((EXAMPLES / name).read_bytes())
    (built / "backplane" / "backplane.go").write_bytes((clients / "backplane.go").read_bytes())
    environ = {**os.environ, "GOFLAGS": "-mod=mod", "GOWORK": "off"}
    subprocess.run([needs("go"), "build", "-o", "client", "."], cwd=built, env=environ, check=True)
    return [built / "client"]


@pytest.mark.parametrize("name", ["client.mjs", "client.sh", "client.go", "Client.java"])
def test_a_client_of_each_language_gets_its_verified_receipt(
    programs: dict[str, str], folder: Path, tmp_path: Path, needs: Callable[[str], str], name: str
) -> None:
    words = client(name, needs, tmp_path / "built")
    shown = said([*words, "echo from $((6 * 7))", folder], folder, programs)
    assert shown.splitlines()[-1] == "complete verified"
