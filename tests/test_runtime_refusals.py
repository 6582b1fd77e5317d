"""Orders that must not be run: refused before anything starts, or before the order is sent; each with its receipt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane.contract.capability import Requirement, Requirements
from backplane.contract.work import PolicyProfile, RuntimeConfig
from backplane.host import Done, HostRun
from backplane.receipts.manifests import kept_manifest
from backplane.runtime.backends import Backend, ProcessBackend
from backplane.runtime.run import Run
from tests.runs import HELLO, backplane_of, go, memory, not_begun, order, plane, script

pytestmark = pytest.mark.anyio


def needing(*required: tuple[str, str]) -> dict[str, Any]:
    return {"requirements": Requirements(tuple(Requirement(name, least) for name, least in required))}  # type: ignore[arg-type]


def logging_host(folder: Path, **hello: Any) -> tuple[Backend, Path]:
    """A host that writes down every start and everything that is said to it."""
    log = folder / "log"
    body = f"""
def note(what):
    with open({str(log)!r}, "a") as file: file.write(what + "\\n")
note("started"); hello()
while (message := take()) is not None:
    note(message["t"])
    if message["t"] == "run": put(final(message))
"""
    return script(folder, body, hello={**HELLO, **hello}), log


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(run: Run, code: str) -> None:
    assert run.end is not None
    assert run.error is not None
    assert (run.end.reason, run.end.code) == ("refused", code)
    assert run.receipt.outcome == "failed"
    assert len(run.receipt.trace) == 0
    assert not run.receipt.verification.harness_ok


EXAMPLES = [
    ({"streaming": "native", "tool_read": "emulated"}, [("streaming", "native"), ("tool_read", "emulated")], True),
    ({"streaming": "emulated"}, [("streaming", "native")], False),
    ({"streaming": "native"}, [("streaming", "native"), ("mcp_client", "emulated")], False),
    ({"tool_bash": {"restricted": {"reason": "sandbox only"}}}, [("tool_bash", "emulated")], True),
    ({"tool_bash": {"restricted": {"reason": "sandbox only"}}}, [("tool_bash", "native")], False),
    ({"tool_bash": "unsupported"}, [("tool_bash", "any")], True),
    ({"streaming": "native"}, [("tool_bash", "any")], False),
    ({"streaming": "native", "telepathy": "native", "vision": "superb"}, [("streaming", "native")], True),
    ({"telepathy": "native"}, [("telepathy", "any")], False),
]


@pytest.mark.parametrize(("capabilities", "required", "satisfied"), EXAMPLES)
async def test_an_order_runs_only_where_every_requirement_is_met(
    capabilities: dict[str, Any],
    required: list[tuple[str, str]],
    satisfied: bool,
    backplane_home: Path,
    root: Path,
    tmp_path: Path,
) -> None:
    backend, log = logging_host(tmp_path, capabilities=capabilities)
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, **needing(*required)), backend)
        assert log.read_text().split() == (["started", "run"] if satisfied else ["started"])
        if not satisfied:
            refused(run, "capability_unsupported")
            assert run.receipt.backend.id == "script"
            again, _ = await go(control, order(root, **needing(*required)), backend)
            refused(again, "capability_unsupported")
            # From the hello that was kept: nothing at all is started the second time.
            assert log.read_text().split() == ["started"]
            assert not_begun(again)
            assert again.receipt is not None
            assert again.receipt.capabilities == {}
            assert backplane_of(again)["negotiation"]["satisfied"] is False
    assert (run.end_error is None) == satisfied
    known = {name for name in capabilities if name not in ("telepathy", "vision")}
    assert set(run.receipt.capabilities) == known
    kept = backplane_of(run).get("capabilities", {})
    assert kept == {name: level for name, level in capabilities.items() if name not in known}


async def test_a_host_that_changed_is_asked_again(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    wanted = order(root, **needing(("vision", "native")))
    weak, log = logging_host(tmp_path)
    async with plane(backplane_home) as control:
        refused((await go(control, wanted, weak))[0], "capability_unsupported")
        strong, _ = logging_host(tmp_path, capabilities={"streaming": "native", "vision": "native"})
        run, _ = await go(control, wanted, strong)
    assert run.end_error is None
    assert log.read_text().split() == ["started", "started", "run"]


@pytest.mark.parametrize("change", ["env", "argv", "program"])
async def test_a_host_whose_variables_words_or_program_changed_is_asked_again(
    change: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = """
import os
can = "vision" if "ABLE" in os.environ or "--able" in sys.argv else "streaming"
hello(capabilities={can: "native"})
run = take(); put(final(run)); end()
"""
    backend, wanted = script(tmp_path, body), order(root, **needing(("vision", "native")))
    assert isinstance(backend, ProcessBackend)
    async with plane(backplane_home) as control:
        for hint in ("or choose another backend", "; known from its hello of 20"):
            run = (await go(control, wanted, backend))[0]
            refused(run, "capability_unsupported")
            assert run.error is not None
            assert hint in (run.error.hint or "")
        able = {"env": {"ABLE": "1"}} if change == "env" else {"argv": (*backend.argv, "--able")}
        changed: dict[str, Any] = {} if change == "program" else able
        if change == "program":
            script(tmp_path, body.replace("streaming", "vision"))
        run, _ = await go(control, wanted, msgspec.structs.replace(backend, **changed))
    assert run.end_error is None


async def test_a_kept_hello_is_checked_against_the_real_one(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    """The program is the same, what it says is not: the hello of this run decides."""
    level = tmp_path / "level"
    level.write_text('"native"')
    body = f"""
with open({str(level)!r}) as file: hello(capabilities={{"vision": json.loads(file.read())}})
run = take(); put(final(run)); end()
"""
    backend, wanted = script(tmp_path, body), order(root, **needing(("vision", "native")))
    async with plane(backplane_home) as control:
        assert (await go(control, wanted, backend))[0].error is None
        level.write_text('"emulated"')
        refused((await go(control, wanted, backend))[0], "capability_unsupported")
    assert kept_manifest(backplane_home, backend.key) == {"vision": "emulated"}


@pytest.mark.parametrize("version", ["abp/v1.0", "abp/v9.9", "v0.1", "zzz", ""])
async def test_another_major_version_is_refused_before_the_order_is_sent(
    version: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    backend, log = logging_host(tmp_path, contract_version=version)
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root), backend)
    refused(run, "contract_version_mismatch")
    assert log.read_text().split() == ["started"]
    assert run.error is not None
    assert repr(version) in run.error.message
    assert kept_manifest(backplane_home, backend.key) is None


async def test_a_newer_minor_version_is_welcome(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    backend, _ = logging_host(tmp_path, contract_version="abp/v0.2")
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root), backend)
    assert run.end_error is None
    assert run.receipt.meta.contract_version == "abp/v0.1"


async def test_an_order_whose_policy_cannot_be_read_starts_nothing(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    backend, log = logging_host(tmp_path)
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, policy=PolicyProfile(deny_read=("[",))), backend)
    refused(run, "policy_invalid")
    assert not log.exists()
    assert backplane_of(run)["enforcement"] == {"rules": []} or "rules" in backplane_of(run)["enforcement"]


async def test_the_environment_of_an_order_is_stored_by_its_names_only(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    backend, _ = logging_host(tmp_path)
    secret = "correct-horse-battery-staple-42"
    async with plane(backplane_home) as control:
        await go(control, order(root, config=RuntimeConfig(env={"TOKEN_X": secret})), backend)
    files = everything(backplane_home)
    assert [path for path, data in files.items() if secret.encode() in data] == []
    (head,) = (data for path, data in files.items() if path.name == "head.jsonl")
    assert json.loads(head.splitlines()[0])["order"]["config"]["env"] == ["TOKEN_X"]


async def test_a_host_in_memory_keeps_its_hello_like_any_other(backplane_home: Path, root: Path) -> None:
    starts = 0

    async def work(host_run: HostRun) -> Done:
        nonlocal starts
        starts += 1
        return Done()

    async with plane(backplane_home) as control:
        await go(control, order(root), memory(work))
        run, _ = await go(control, order(root, **needing(("vision", "any"))), memory(work))
    refused(run, "capability_unsupported")
    assert starts == 1
