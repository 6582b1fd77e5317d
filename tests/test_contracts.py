"""What is promised by hand, held against the code: transcripts, hash vectors, error table, rule numbers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane import resources
from backplane.config import Limits, Settings
from backplane.contract import canonical
from backplane.contract import envelope as wire
from backplane.contract.receipt import BackendIdentity, read_receipt, receipt_hash, verify_bytes
from backplane.contract.work import WorkOrder
from backplane.errors import CODES, ProtocolError
from backplane.protocol.control import ControlEnd
from backplane.protocol.host import HostEnd
from backplane.protocol.lines import LINE_BYTES_MAX
from backplane.protocol.messages import Broken, Dropped, Noise, version_compatible
from backplane.receipts.state import RunState
from backplane.runtime.backends import ProcessBackend
from backplane.runtime.drive import Drive
from backplane.runtime.plane import ControlPlane

CONTRACTS = resources.find("contracts")
TRANSCRIPTS = sorted((CONTRACTS / "transcripts").glob("*.jsonl"))
VECTORS = json.loads((CONTRACTS / "hashes.json").read_bytes())["vectors"]
NOW = "2026-01-15T12:00:00Z"


class Conversation:
    """Both ends of the protocol, each fed what the other one is said to have written."""

    def __init__(self, line_bytes_max: int) -> None:
        self.control = ControlEnd(now=lambda: NOW, line_bytes_max=line_bytes_max)
        self.host = HostEnd(line_bytes_max=line_bytes_max)

    def judge(self, speaker: str, line: bytes) -> tuple[str, str | None]:
        reader = self.control if speaker == "host" else self.host
        received = reader.receive(line + b"\n")
        assert len(received) <= 1
        message = received[0] if received else None
        verdict = _verdict(message)
        if isinstance(message, wire.Final):
            verdict = self._taken(message)
        if verdict == ("accept", None):
            # The end that wrote it must know of it too, where it is a message that this end may write.
            with suppress(ProtocolError, AttributeError):
                (self.host if speaker == "host" else self.control).send(message)  # type: ignore[arg-type]
            if isinstance(message, wire.Final | wire.Fatal) and message.ref_id is not None:
                self.control.close_run(message.ref_id)
        return verdict

    def _taken(self, final: wire.Final) -> tuple[str, str | None]:
        """What a run makes of its host's last word."""
        facts = RunState(run_id=final.ref_id, order=WorkOrder("x"), backend=BackendIdentity("tiny"), started_ns=0)
        plane = ControlPlane(Settings(), "/nowhere", {})
        drive = Drive(plane, facts, ProcessBackend(id="tiny", argv=("tiny",)), Limits(), None)
        drive.inbound.take([final])
        return ("end", drive.ending.error.code) if drive.ending.error is not None else ("accept", None)


def _verdict(message: Any) -> tuple[str, str | None]:
    if message is None or isinstance(message, Noise):
        return "noise", None
    if isinstance(message, Dropped):
        return "drop", None
    if isinstance(message, Broken):
        return "end", message.code
    if isinstance(message, wire.Hello) and not version_compatible(message.contract_version):
        return "end", "contract_version_mismatch"
    return "accept", None


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


@pytest.mark.anyio
@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
async def test_every_line_of_a_transcript_gets_its_verdict(path: Path) -> None:
    rows = _rows(path)
    limits = rows.pop(0)["set"] if "set" in rows[0] else {}
    conversation = Conversation(limits.get("line_bytes_max", LINE_BYTES_MAX))
    for number, row in enumerate(rows, 1):
        line = base64.b64decode(row["line_base64"]) if "line_base64" in row else row["line"].encode()
        assert conversation.judge(row["from"], line) == (row["verdict"], row.get("code")), (number, row["why"])


def test_transcripts_are_well_formed_and_refer_to_rules_that_exist() -> None:
    rules = set(re.findall(r"\*\*(S\d+)\*\*", (CONTRACTS / "sidecar.md").read_text()))
    for path in TRANSCRIPTS:
        rows = [row for row in _rows(path) if "set" not in row]
        for row in rows:
            assert row["from"] in ("host", "control")
            assert row["verdict"] in ("accept", "noise", "drop", "end")
            assert ("code" in row) == (row["verdict"] == "end")
            assert row.get("code", "internal") in CODES
            assert ("line" in row) != ("line_base64" in row)
            assert set(re.findall(r"\bS\d+\b", row["why"])) <= rules, (path.name, row["why"])
        ends = [number for number, row in enumerate(rows, 1) if row["verdict"] == "end" and row["from"] == "host"]
        assert ends in ([], [len(rows)]), path.name


def test_a_code_that_nothing_here_sends_is_marked_in_the_table() -> None:
    package = resources.find("schemas").parent / "backplane"
    sources = "".join(
        path.read_text() for path in package.rglob("*.py") if path.name not in ("errors.py", "explain.py")
    )
    hosts = "".join(path.read_text() for path in resources.find("hosts").rglob("*.py"))
    assert {code for code in CODES if f'"{code}"' not in sources + hosts} == {
        code for code, facts in CODES.items() if not facts.ours
    }


def test_rule_numbers_of_the_protocol_page_are_unique_and_ascending() -> None:
    numbers = [int(number) for number in re.findall(r"\*\*S(\d+)\*\*", (CONTRACTS / "sidecar.md").read_text())]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"].replace(" ", "_"))
def test_every_hash_vector_holds(vector: dict[str, Any]) -> None:
    value = canonical.decode(vector["input"])
    if vector["kind"] == "receipt":
        receipt = read_receipt(value)
        assert receipt_hash(receipt) == vector["sha256"]
        value = msgspec.structs.replace(receipt, receipt_sha256=None)
    assert canonical.encode(value).decode() == vector["canonical"]
    assert hashlib.sha256(vector["canonical"].encode()).hexdigest() == vector["sha256"]


def test_the_known_answers_of_the_public_implementation_are_among_the_vectors() -> None:
    assert {vector["sha256"] for vector in VECTORS} >= {
        "aa914de39221a22eba91d4f56d7955008690c7b31e6a7e04b1f2ed192ef418d6",
        "76749143e5839c8f98e172689ac73551faafb846f5fab847ccf0a98879e099c0",
    }


def test_node_finds_the_same_hashes() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node: not found")
    script = """
      const { vectors } = JSON.parse(require('fs').readFileSync(process.argv[1], 'utf8'));
      const sha = text => require('crypto').createHash('sha256').update(text, 'utf8').digest('hex');
      const wrong = vectors.filter(v => sha(v.canonical) !== v.sha256).map(v => v.name);
      for (const v of vectors) JSON.parse(v.input), JSON.parse(v.canonical);
      console.log(JSON.stringify({ count: vectors.length, wrong }));
    """
    ran = subprocess.run([node, "-e", script, str(CONTRACTS / "hashes.json")], capture_output=True, timeout=30)
    assert json.loads(ran.stdout) == {"count": len(VECTORS), "wrong": []}, ran.stderr


def test_sealed_example_receipts_verify() -> None:
    for path in sorted((CONTRACTS / "examples").glob("receipt*/sealed*.json")):
        assert verify_bytes(path.read_bytes()) is None, path.name


def test_the_protocol_page_names_every_capability_event_and_message() -> None:
    from backplane.contract.capability import CAPABILITIES
    from backplane.contract.events import EVENT_TYPES
    from backplane.protocol.messages import MESSAGES

    page = (CONTRACTS / "sidecar.md").read_text()
    for name in (*CAPABILITIES, *EVENT_TYPES):
        assert f"`{name}`" in page, name
    for name in MESSAGES:
        assert f'"t":"{name}"' in page, name
