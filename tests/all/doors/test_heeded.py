"""Every setting that only a host can do × every host that is shipped: it has an effect, or the order is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane import resources
from backplane.config import Settings
from backplane.contract import envelope as wire
from backplane.contract.capability import NATIVE
from backplane.contract.events import Warned
from backplane.contract.work import OF_AGENT, OF_HOST, ContextPacket, PolicyProfile, RuntimeConfig, Snippet, WorkOrder
from backplane.host import Host
from backplane.runtime.backends import Backend, ProcessBackend, find
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from backplane.testing import Call, Turn
from tests.all.vendors import table
from tests.all.vendors.cases import CASES, SYSTEM
from tests.api_agent import job, solve
from tests.peers import PYTHON, Child
from tests.peers import run as message
from tests.runs import QUICK, go, order, plane, script, texts

pytestmark = pytest.mark.anyio
HOSTS = resources.find("hosts")

SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
WORD = "heard-from-the-order"

ASKED: dict[str, dict[str, Any]] = {
    "model": {"config": RuntimeConfig(model="m-2")},
    "max_turns": {"config": RuntimeConfig(max_turns=1)},
    "max_budget_usd": {"config": RuntimeConfig(max_budget_usd=1e-6)},
    "context": {"context": ContextPacket(snippets=(Snippet("note", WORD),))},
    "history": {"config": RuntimeConfig(vendor={"abp": {"history": [{"role": "user", "content": WORD}]}})},
    "system": {"config": RuntimeConfig(vendor={"abp": {"system": WORD}})},
    "sampling": {"config": RuntimeConfig(vendor={"abp": {"sampling": {"max_tokens": 7}}})},
    "images": {"config": RuntimeConfig(vendor={"abp": {"images": [{"url": f"https://a/{WORD}.png"}]}})},
    "session": {"config": RuntimeConfig(vendor={"abp": {"session": {"keep": True}}})},
    "mcp_servers": {"config": RuntimeConfig(vendor={"abp": {"mcp_servers": [{"name": "x", "command": "true"}]}})},
    "output_schema": {"config": RuntimeConfig(vendor={"abp.output_schema": SCHEMA})},
    "mode": {"config": RuntimeConfig(vendor={"abp": {"mode": "passthrough"}})},
    "project_instructions": {"config": RuntimeConfig(vendor={"abp": {"project_instructions": False}})},
    "wait_for_limit_s": {"config": RuntimeConfig(vendor={"abp": {"wait_for_limit_s": 5}})},
}
NOTHING: dict[str, Any] = {
    "history": [],
    "system": "",
    "sampling": {},
    "images": [],
    "session": {},
    "mcp_servers": [],
    "output_schema": None,
    "mode": "mapped",
    "project_instructions": True,
    "wait_for_limit_s": 0,
}
"""The same settings where they ask for nothing."""

EXAMPLES = {
    "node": ("node", str(HOSTS / "node" / "shell.mjs")), "echo:node": ("node", str(HOSTS / "node" / "echo.mjs")),
    "echo:sh": ("sh", str(HOSTS / "sh" / "echo.sh")), "echo:perl": ("perl", str(HOSTS / "perl" / "echo.pl")),
}  # fmt: skip


def test_every_setting_is_tried() -> None:
    assert set(ASKED) == set(OF_HOST)


def test_an_order_says_which_of_them_it_has() -> None:
    for name, members in ASKED.items():
        assert WorkOrder("x", **members).of_host() == (name,)
    assert WorkOrder("x", config=RuntimeConfig(vendor={"abp": NOTHING})).of_host() == ()


def shell() -> Backend:
    return find("shell", Settings(limits=QUICK), os.environ)


async def run_on(backend: Backend, home: Path, root: Path, name: str) -> Run:
    async with plane(home) as control:
        run, _ = await go(control, order(root, task="true", **ASKED[name]), backend)
    return run


def check_needless_or_refused(run: Run, name: str, *, needless: bool) -> None:
    if needless:
        assert run.receipt.outcome == "complete"
    else:
        check_refused(run, name)


def check_refused(run: Run, name: str) -> None:
    assert run.error is not None
    assert (run.error.code, run.error.facts.exit_code) == ("capability_unsupported", 4)
    assert OF_HOST[name] in run.error.message
    assert run.error.hint


@pytest.mark.parametrize(
    ("host", "name"), [*(("shell", name) for name in OF_HOST), *(("mock", name) for name in ("model", "max_turns"))]
)
async def test_a_host_without_a_model_needs_no_effect_or_refuses(
    host: str, name: str, backplane_home: Path, root: Path
) -> None:
    run = await run_on(find(host, Settings(limits=QUICK), os.environ), backplane_home, root, name)
    check_needless_or_refused(run, name, needless=name in table.HEEDS[host])


@pytest.mark.parametrize(
    ("host", "name"),
    [*(("node", name) for name in OF_HOST), *((host, "session") for host in EXAMPLES if host != "node")],
)
async def test_an_example_in_another_language_refuses_what_it_does_not_do(
    host: str, name: str, backplane_home: Path, root: Path, needs: Any
) -> None:
    program, *words = EXAMPLES[host]
    run = await run_on(ProcessBackend(id="example", argv=(needs(program), *words)), backplane_home, root, name)
    check_needless_or_refused(run, name, needless=host == "node" and name in table.HEEDS["shell"])


@pytest.mark.parametrize("name", OF_HOST)
async def test_the_api_host_heeds_or_refuses(name: str, backplane_home: Path, root: Path) -> None:
    turns = [Turn(calls=(Call("read_file", {"path": "none"}),)), Turn(text='{"n": 7}')]
    (root / "AGENTS.md").write_text(f"say {name}-from-the-project\n")
    run, _, server = await solve(backplane_home, turns, job(root, **ASKED[name]))
    if name not in table.HEEDS["api"]:
        check_refused(run, name)
        assert not server.requests
        return
    sent = [request.body for request in server.requests]
    shown = json.dumps(sent[0])
    match name:
        case "model":
            assert sent[0]["model"] == "m-2"
        case "context" | "history" | "system" | "images":
            assert WORD in shown
        case "sampling":
            assert 7 in (sent[0].get("max_tokens"), sent[0].get("max_completion_tokens"))
        case "output_schema":
            assert '\\"integer\\"' in shown
        case "mcp_servers":
            warnings = [event.message for event in run.receipt.trace if isinstance(event, Warned)]
            assert any("the MCP server 'x' is not there" in words for words in warnings)
        case "project_instructions":
            assert f"{name}-from-the-project" not in shown
        case "wait_for_limit_s":
            assert run.receipt.outcome == "complete"  # `tests/test_limits.py` has a limit, and waits for it.
        case _:
            assert len(sent) == 1, "the second turn is not asked for"
            assert run.receipt.outcome == "partial"


def test_what_the_driven_agents_heed_is_tried_with_the_real_ones() -> None:
    for name in ("claude", "codex", "copilot", "kimi", "acp"):
        assert table.HEEDS[name] == (*OF_AGENT, *(("system",) if name in ("claude", "copilot") else ()))
    assert {"model and environment", "max turns", "resume, usage of this run alone", "structured output right",
            "passthrough keeps every message", SYSTEM} <= set(CASES)  # fmt: skip


def test_a_host_on_the_kit_refuses_by_itself_under_any_control_plane(tmp_path: Path) -> None:
    with Child((*PYTHON, HOSTS / "shell.py")) as child:
        hello = child.read()
        assert set(hello["heeds"]) == {"max_turns", "max_budget_usd"}
        child.send(
            message("r-1", "touch made", config={"vendor": {"abp": {"mode": "passthrough"}}}, root=str(tmp_path))
        )
        fatal = child.read()
    assert (fatal["t"], fatal["error_code"]) == ("fatal", "capability_unsupported")
    assert not (tmp_path / "made").exists()


async def test_a_host_that_does_not_say_what_it_heeds_is_sent_everything(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    host = script(tmp_path, "hello(); run = take(); put(final(run)); end()")
    for name in OF_HOST:
        run = await run_on(host, backplane_home, root, name)
        assert run.end_error is None


@pytest.mark.parametrize("heeds", ["all", [1], {"model": 1}, None])
async def test_a_list_that_cannot_be_read_is_none(heeds: Any, backplane_home: Path, root: Path, tmp_path: Path) -> None:
    host = script(tmp_path, f"hello(heeds={heeds!r}); run = take(); put(final(run)); end()")
    assert (await run_on(host, backplane_home, root, "session")).error is None


ELSEWHERE: dict[str, Any] = {
    "secrets": ["A_KEY"],
    "on_lost_worker": "fail",
    "remote_root": "/srv/work",
    "route": {"max_cost_usd_micros": 1},
}
"""Settings that somebody else heeds: a queue, another machine, the router."""


@pytest.mark.parametrize("name", ELSEWHERE)
async def test_a_setting_that_nobody_here_heeds_is_refused_before_anything_is_started(
    name: str, backplane_home: Path, root: Path
) -> None:
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, task="touch made").with_abp(name, ELSEWHERE[name]), shell())
    assert run.error is not None
    assert (run.error.code, run.error.facts.exit_code) == ("config_invalid", 2)
    assert f"config.vendor.abp.{name}" in run.error.message
    assert not (root / "made").exists()


async def test_a_priority_and_a_type_count_where_a_backend_is_named(backplane_home: Path, root: Path) -> None:
    asked = {"priority": "high", "type": "shell_execution"}
    async with plane(backplane_home) as control:
        run, _ = await go(control, order(root, task="true").with_abp("route", asked), shell())
        wrong, _ = await go(control, order(root, task="true").with_abp("route", {"priority": "hihg"}), shell())
    assert run.receipt.outcome == "complete"
    assert wrong.error is not None
    assert wrong.error.code == "config_invalid"


async def test_what_the_router_has_heeded_is_not_asked_of_a_control_plane_below(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    say = "put(event(run, str(run['work_order']['config']['vendor']))); put(final(run))"
    host = script(tmp_path, f"hello(); run = take(); {say}; end()")
    asked = {"max_cost_usd_micros": 1, "priority": "high"}
    control, asking = plane(backplane_home), order(root).with_abp("route", asked)
    async with control, control.start(asking, host, route={"by": "a test"}) as run:
        await run.wait()
    assert run.end_error is None
    assert texts(run.receipt.trace) == ["{'abp': {'route': {'priority': 'high'}}}"]


async def test_an_order_names_its_backend_where_nobody_else_does(backplane_home: Path, root: Path) -> None:
    control = ControlPlane(Settings(limits=QUICK, isolation="off", default_backend="shell"), backplane_home, os.environ)
    async with control, control.start(order(root).with_abp("backend", "mock")) as run:
        await run.wait()
    assert run.backend_id == "mock"


async def test_the_configured_policy_holds_for_an_order_that_brings_none_whoever_starts_it(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    (tmp_path / "no-bash.json").write_text('{"disallowed_tools": ["bash"]}')
    settings = Settings(limits=QUICK, isolation="off", policy=str(tmp_path / "no-bash.json"))
    control = ControlPlane(settings, backplane_home, os.environ)
    own = order(root, task="touch made", policy=PolicyProfile(deny_read=("none",)))
    async with control:
        async with control.start(order(root, task="touch made"), "shell") as run:
            await run.wait()
        assert (run.receipt.outcome, (root / "made").exists()) == ("failed", False)
        async with control.start(own, "shell") as run:
            await run.wait()
        assert (run.receipt.outcome, (root / "made").exists()) == ("complete", True)


def test_a_misspelt_setting_of_a_host_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="'sesion' is no setting of the contract: session"):
        Host(id="x", capabilities={"streaming": NATIVE}, heeds=("sesion",))
    assert msgspec.json.decode(msgspec.json.encode(Host(id="x", capabilities={}).hello()), type=wire.Hello).heeds
