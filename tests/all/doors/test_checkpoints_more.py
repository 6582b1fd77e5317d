"""More of `tests/test_checkpoints.py`: what takes many processes, or seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane.errors import CODES
from backplane.receipts.pieces import seal
from backplane.runtime.backends import Backend
from backplane.runtime.run import Run
from tests.test_checkpoints import command, root, three_states  # noqa: F401

pytestmark = pytest.mark.anyio


FOREIGN = "aaaaaaaa-0000-4000-8000-000000000000"


def foreign(run: Run, added: dict[str, Any]) -> bytes:
    """A run's receipt under another id that says something else of ours, sealed again."""
    receipt = run.receipt
    usage_raw = {**receipt.usage_raw, "backplane": {**receipt.backplane, **added}}
    meta = msgspec.structs.replace(receipt.meta, run_id=FOREIGN)
    return msgspec.json.encode(seal(msgspec.structs.replace(receipt, meta=meta, usage_raw=usage_raw, trace=[])))


ROW = {"id": "c1", "name": "c2", "at": "2026-01-01T00:00:00.000Z", "why": "tool", "tree": "0" * 40, "files": 1}


@pytest.mark.parametrize(
    "added",
    [
        {"checkpoints": {"made": [{**ROW, "id": "../../../outside/evil"}]}},
        {"checkpoints": {"made": [{**ROW, "tree": "--output=evil"}]}},
        {"checkpoints": {"made": [{**ROW, "files": "x"}]}},
    ],
)
async def test_checkpoints_in_a_foreign_receipt_lead_nowhere_else_and_are_told_when_they_are_none(
    mock: Backend, backplane_home: Path, root: Path, tmp_path: Path, added: dict[str, Any]
) -> None:
    run = await three_states(backplane_home, root, mock, "staged")
    receipt = foreign(run, added)
    (tmp_path / "r.json").write_bytes(receipt)
    assert command("receipts", "import", str(tmp_path / "r.json"))[0] == 0
    for words in (["apply", FOREIGN, "--at", "c2"], ["rewind", FOREIGN, "c2"], ["rewind", FOREIGN]):
        code, text = command(*words)
        assert (code, text.partition(":")[0]) == (CODES["receipt_store_failed"].exit_code, "receipt_store_failed")
        assert f"backplane receipts show {FOREIGN}" in text


async def test_the_command_line_attaches_hooks_and_checkpoints(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    hook = tmp_path / "deny.py"
    hook.write_text("import sys\nprint('by the hook', file=sys.stderr)\nsys.exit(2)\n")
    task = ("run", "-b", "shell", "--isolation", "off", "--root", str(root), "--checkpoints", "echo hi > new.txt")
    code, text = command(*task)
    assert code == 0, text
    run_id = text.rpartition("backplane apply ")[2].split(")")[0]
    assert command("rewind", run_id)[1].startswith("c1 ")
    asked = json.dumps([{"event": "pre_tool", "command": [sys.executable, str(hook)]}])
    code, text = command(*task, "--param", f"abp.hooks={asked}")
    assert code == 4, "the exit code of policy_denied"
    assert "policy_denied" in text
    assert "by the hook" in text
