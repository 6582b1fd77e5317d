"""The example client of each language gets its verified receipt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.all.clients.compiled import Sources, compiled
from tests.all.doors.test_examples import EXAMPLES, folder, programs, said
from tests.peers import ROOT

__all__ = ["folder", "programs"]


def client(name: str, needs: Callable[[str], str]) -> list[str | Path]:
    """The words that start a client: compiled where its language wants that."""
    clients = ROOT / "contracts" / "clients"
    if name == "client.mjs":
        return [needs("node"), EXAMPLES / name, clients / "backplane.mjs"]
    if name == "client.sh":
        needs("jq")
        return [needs("sh"), EXAMPLES / name, clients / "backplane.sh"]
    if name == "Client.java":
        texts = {path.name: path for path in (clients / "Backplane.java", EXAMPLES / name)}
        classes = compiled("client-java", texts, [needs("javac"), "-d", ".", *texts])
        return [needs("java"), "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", classes, "Client"]
    sources: Sources = {
        "go.mod": "module example\n\ngo 1.22\n",
        "main.go": EXAMPLES / name,
        "backplane/backplane.go": clients / "backplane.go",
    }
    return [compiled("client-go", sources, [needs("go"), "build", "-o", "client", "."]) / "client"]


@pytest.mark.parametrize("name", ["client.mjs", "client.sh", "client.go", "Client.java"])
def test_a_client_of_each_language_gets_its_verified_receipt(
    programs: dict[str, str], folder: Path, needs: Callable[[str], str], name: str
) -> None:
    words = client(name, needs)
    shown = said([*words, "echo from $((6 * 7))", folder], folder, programs)
    assert shown.splitlines()[-1] == "complete verified"
