"""Every setting of an order × every agent: it is heeded, refused by name, or labelled; none is silently ignored.

Rows are the members of `config`, `policy`, `workspace`, `requirements`, `context` and `config.vendor.abp`; the agents
are the real ones and the host `api`. Many settings go into one order, so that an agent is started three times; what it
refuses is noted and taken out of the order. Of the agents behind the host `acp` codex-acp is asked for all of them, the
others once, for what their own programs decide.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

import backplane
from backplane.config import BackendSettings, Limits, Settings
from backplane.contract.approval import Decision
from backplane.contract.capability import Requirement, Requirements
from backplane.contract.events import Approval, SessionNamed, carried
from backplane.contract.pictures import image_from
from backplane.contract.work import (
    SETTINGS,
    ContextPacket,
    PolicyProfile,
    RuntimeConfig,
    Snippet,
    WorkOrder,
    WorkspaceSpec,
)
from backplane.receipts.journal import HEAD
from backplane.receipts.memory import remembered
from backplane.receipts.store import Store
from backplane.testing import SIDE_TURNS, ModelServer, ScriptUsage, Turn
from tests.all.vendors.cases import MODEL, PICTURE, SCHEMA
from tests.all.vendors.ground import Agent, Seen, house, installed
from tests.all.vendors.test_acp_orders import CodexAcp, OpenCode, Qwen
from tests.all.vendors.test_claude import Claude
from tests.all.vendors.test_codex import Codex
from tests.all.vendors.test_copilot import Copilot
from tests.all.vendors.test_gemini import Gemini
from tests.all.vendors.test_kimi import Kimi
from tests.all.vendors.test_same_order import of_protocol

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

AGENTS: dict[str, Callable[[], Agent]] = {
    "api": of_protocol("openai_compatible"), "claude": Claude, "codex": Codex, "copilot": Copilot, "gemini": Gemini,
    "kimi": Kimi, "opencode": OpenCode, "qwen": Qwen, "codex-acp": CodexAcp,
}  # fmt: skip
STARTS_MAX = 3
WORD, SECRET, TASK = "heard-from-the-order", "word-of-a-forbidden-file", "a task that is kept as its hash"
GIVEN = "given-word"
PARENT = {"run_id": "5f0c2f4e-6d1b-4c8e-9a57-0d9a3a1f7b11"}

Asked = dict[str, Any]
"""Name of a row, `config.model` say → the value that an order asks for."""


@dataclass
class Story:
    """One run with many settings, and what it left."""

    seen: Seen
    home: Path

    @property
    def sent(self) -> str:
        """All that the model was sent, as JSON."""
        return json.dumps([request.body for request in self.seen.server.requests])

    @property
    def own(self) -> dict[str, Any]:
        found: dict[str, Any] = self.seen.receipt.usage_raw["backplane"]
        return found

    @property
    def code(self) -> str | None:
        return self.seen.run.error.code if self.seen.run.error is not None else None

    def label(self, name: str) -> bool:
        """Whether a layer before the deed held a rule, or its row says what was left open."""
        row = next(row for row in self.own["enforcement"]["rules"] if row["rule"] == name)
        return row["layer"] in ("os", "host", "vendor") or bool(row.get("gap"))

    def listed(self, file: str) -> bool:
        """Whether a file was in the folder that the agent worked in."""
        return f"+{file}\n" in self.seen.patch.partition("b/names.txt")[2]


WRITES = ("write_file", "edit_file", "apply_patch")

Row = tuple[Any, Callable[[Story], bool]]
"""What is asked for, and whether the run shows that it was heeded."""


def _tags(story: Story) -> bool:
    with Store.open(story.home, readonly=True) as store:
        return [run.tags for run in remembered(store)] == [("case=settings",)]


def _model(story: Story) -> bool:
    return any(str(one.body.get("model")).endswith(MODEL) or f"/{MODEL}:" in one.path for one in asked(story))


def asked(story: Story) -> list[Any]:
    return [request for request in story.seen.server.requests if request.turn is not None]


WORK: dict[str, Row] = {
    "config.model": (MODEL, _model),
    "config.env": ({"CASE_WORD": GIVEN}, lambda it: "+equal" in it.seen.patch),
    "config.vendor": (..., lambda it: "parent" in it.own),
    "policy.deny_read": (("secret.txt",), lambda it: SECRET not in it.sent and it.label("deny_read")),
    "policy.deny_write": (("locked.txt",), lambda it: "b/locked.txt" not in it.seen.patch and it.label("deny_write")),
    "policy.allow_network": (("allowed.example",), lambda it: it.label("allow_network")),
    "policy.deny_network": (("denied.example",), lambda it: it.label("deny_network")),
    "policy.require_approval_for": (("bash",), lambda it: bool(it.seen.of(Approval))),
    "policy.disallowed_tools": (WRITES, lambda it: "b/new.txt" not in it.seen.patch),
    "workspace.root": (..., lambda it: "b/word.txt" in it.seen.patch),
    "workspace.include": (("*.txt",), lambda it: it.listed("a.txt") and not it.listed("other.md")),
    "workspace.exclude": (("left_out.txt",), lambda it: not it.listed("left_out.txt")),
    "context.snippets": ((Snippet("note", WORD),), lambda it: WORD in it.sent),
    "context.files": (("a.txt",), lambda it: "a.txt" in json.dumps([one.body for one in asked(it)])),
    "requirements.required": (
        (Requirement("streaming", "emulated"),), lambda it: it.seen.receipt.capabilities["streaming"] == "native"
    ),
    "abp.checkpoints": ("auto", lambda it: any("checkpoint" in (event.ext or {}) for event in it.seen.events)),
    "abp.credentials": (
        ["aws"], lambda it: "aws" in str(it.own["enforcement"]["kinds"]["credentials"].get("gap"))
    ),
    "abp.enforcement": ({"deny_write": "audit"}, lambda it: it.label("deny_write")),
    "abp.fail_on": (["false-claims"], lambda it: it.own["fail_on"] == ["false-claims"]),
    "abp.hooks": (
        [{"event": "pre_tool", "tools": ["bash"], "command": ["/bin/true"]}],
        lambda it: bool(it.own["hooks"]["counts"]["true"]),
    ),
    "abp.isolation": ("best_effort", lambda it: it.own["enforcement"]["isolation"] == "best_effort"),
    "abp.lenient": (True, lambda it: "lenient" in it.own),
    "abp.mcp_servers": ([house("hello")], lambda it: "the word" in it.sent),
    "abp.parent": (PARENT, lambda it: it.own["parent"] == PARENT),
    "abp.route": ({"priority": "high"}, lambda it: it.code != "config_invalid"),
    "abp.tags": (["case=settings"], _tags),
    "abp.task_text": (
        "hash", lambda it: TASK.encode() not in (it.home / "runs" / it.seen.run.id / HEAD).read_bytes()
    ),
    "abp.unheard": ({"strange": 1}, lambda it: "strange" in json.dumps(it.own["unheard"])),
}  # fmt: skip
"""A copy of the folder, in a cage: its commands look at what they may see."""

ENDS: dict[str, Row] = {
    "config.max_turns": (2, lambda it: it.seen.end["reason"] == "max_turns" or len(asked(it)) <= 2),
    "workspace.mode": ("pass_through", lambda it: (it.seen.root / "again.txt").exists()),
    "abp.history": ([{"role": "user", "content": WORD}], lambda it: WORD in it.sent),
    "abp.images": ([msgspec.to_builtins(image_from(PICTURE))], lambda it: str(image_from(PICTURE).data) in it.sent),
    "abp.mode": (
        "passthrough", lambda it: any("raw_message" in (event.ext or {}) for event in it.seen.events)
    ),
    "abp.output_schema": (SCHEMA, lambda it: "additionalProperties" in it.sent),
    "abp.sampling": ({"temperature": 0.5}, lambda it: "0.5" in it.sent),
    "abp.session": ({"keep": True}, lambda it: bool(it.seen.of(SessionNamed))),
    "abp.system": (WORD, lambda it: WORD in it.sent),
}  # fmt: skip
"""In the folder itself, with a model that never stops calling a command."""

TOKENS: dict[str, Row] = {
    "abp.budget_tokens": (50_000, lambda it: (it.seen.end["reason"], it.code) == ("budget", "policy_denied")),
    "policy.allowed_tools": (("read_file",), lambda it: "b/again.txt" not in it.seen.patch),
}
"""Every request uses 100,000 tokens, and the command is not allowed."""

TOKENS_ALIKE = ("copilot", "gemini", "kimi")
"""The control plane counts and judges these alone, and the agents show with `disallowed_tools` and with a budget in
dollars (`test_requests.py`, `test_gemini.py`) that they heed it."""

PROFILE = ("config.model", "abp.mcp_servers", *ENDS)
"""What another agent behind the host `acp` is asked for, with the model of `ENDS`."""

ELSEWHERE: dict[str, Any] = {
    "abp.on_lost_worker": "fail", "abp.secrets": ["A_KEY"], "abp.remote_root": "/srv/work",
}  # fmt: skip
"""Settings for a queue or another machine; the control plane refuses each before any host starts."""

TRIED = {
    "config.max_budget_usd": "test_requests, test_acp_orders, test_gemini; tests/all/doors/test_api_host_ends.py",
    "abp.backend": "tests/all/doors/test_heeded.py: an order names its backend where nothing else does",
    "abp.children_budget_tokens": "tests/all/doors/test_budgets.py",
    "abp.children_budget_usd_micros": "tests/all/doors/test_budgets.py",
    "abp.project_instructions": "tests/test_instructions.py, test_instructions",
    "abp.pure": "tests/test_cache.py",
    "abp.wait_for_limit_s": "tests/test_limits.py, test_limits",
}  # fmt: skip
"""Settings that other tests try with each host, or that are the control plane's alone, and where."""

PLACES = {
    "config": RuntimeConfig, "policy": PolicyProfile, "workspace": WorkspaceSpec, "requirements": Requirements,
    "context": ContextPacket,
}  # fmt: skip


def test_every_setting_has_a_row() -> None:
    members = {f"{place}.{name}" for place, kind in PLACES.items() for name in kind.__struct_fields__}
    assert {*WORK, *ENDS, *TOKENS, *ELSEWHERE, *TRIED} == members | {f"abp.{name}" for name in SETTINGS}


def order_of(rows: Asked, root: Path) -> WorkOrder:
    members: dict[str, dict[str, Any]] = {place: {} for place in (*PLACES, "abp")}
    for row, value in rows.items():
        place, name = row.split(".")
        if value is not ...:
            members[place][name] = value
    abp, config = members.pop("abp"), members.pop("config")
    vendor = {**config.pop("vendor", {}), "abp": abp}
    made = {place: PLACES[place](**given) for place, given in members.items() if place != "workspace"}
    workspace = WorkspaceSpec(root=str(root), **members["workspace"])
    return WorkOrder(TASK, workspace=workspace, config=RuntimeConfig(vendor=vendor, **config), **made)


REFUSES = ("capability_unsupported", "backend_model_not_found")


class Table:
    """The cells of one agent.

    Attributes:
        cells: row → heeded, refused: WHY, or silent.
        starts: runs whose agent asked its model.
    """

    def __init__(self, agent: Agent, folder: Path) -> None:
        self.agent, self.folder = agent, folder
        self.cells: dict[str, str] = {}
        self.starts = 0

    async def play(self, rows: dict[str, Row], turns: list[Turn], *, key_proxy: bool = False) -> None:
        """Run an order with these settings; take out what is refused, and look what became of the others."""
        left: Asked = {name: value for name, (value, _) in rows.items()}
        while left:
            story = await self.run(left, turns, key_proxy=key_proxy)
            refused = self._refused(story, left)
            if refused is None:
                break
            self.cells[refused] = f"refused: {story.seen.run.error}"
            del left[refused]
        assert story.seen.server.requests, story.seen.run.error
        self.starts += 1
        for name in left:
            self.cells[name] = "heeded" if rows[name][1](story) else f"silent: {story.seen.run.error}"

    def _refused(self, story: Story, left: Asked) -> str | None:
        """The row that a refusal before the first request is about."""
        if story.code not in REFUSES or story.seen.server.requests:
            return None
        words = str(story.seen.run.error)
        named = [name for name in left if place_of(name) in words]
        assert named or "has no model" in words, words
        return named[0] if named else "config.model"

    async def run(self, rows: Asked, turns: list[Turn], *, key_proxy: bool = False) -> Story:
        number = len(list(self.folder.iterdir()))
        root, home = self.folder / f"{number}" / "work", self.folder / f"{number}" / "home"
        root.mkdir(parents=True)
        for name, text in FILES.items():
            (root / name).write_text(text)
        rows = {name: self.agent.model(value) if name == "config.model" else value for name, value in rows.items()}
        order = order_of(rows, root)
        env = {**self.agent.env, **order.config.env}
        order = msgspec.structs.replace(order, config=msgspec.structs.replace(order.config, env=env))
        with ModelServer([*SIDE_TURNS, *turns]) as server:
            declared = BackendSettings(
                host=self.agent.host,
                options=self.agent.options(server.url),
                env=self.agent.variables(),
                writable=self.agent.writable,
                key_proxy=key_proxy,
                endpoints=(f"127.0.0.1:{server.port}",),
            )
            settings = Settings(backends={self.agent.name: declared}, limits=Limits(run_s=120.0))
            start = backplane.start(order, backend=self.agent.name, settings=settings, home=home, on_ask=yes)
            async with start as run:
                seen = Seen(run, server, root)
                async for event in run:
                    seen.events.append(carried(event))
        return Story(seen, home)


def place_of(name: str) -> str:
    """Return how an error names the setting of a row."""
    return name.replace("abp.", "config.vendor.abp.")


async def yes(ask: Approval) -> Decision:
    return Decision("allow")


FILES = {
    "a.txt": "one\n",
    "secret.txt": f"{SECRET}\n",
    "locked.txt": "as it was\n",
    "left_out.txt": "x\n",
    "other.md": "x\n",
}
LOOKS = (
    f'test "$CASE_WORD" = {GIVEN} && echo equal > word.txt; ls > names.txt; cat secret.txt; echo x >> locked.txt; true'
)


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> Agent:
    return installed(AGENTS[request.param])


async def test_no_setting_is_silently_ignored(agent: Agent, tmp_path: Path, needs: Any) -> None:
    needs("bwrap")
    (Path.home() / ".aws").mkdir()
    (Path.home() / ".aws" / "credentials").write_text("[default]\n")
    table = Table(agent, tmp_path)
    used = ScriptUsage(input=100_000, output=10)
    again = msgspec.structs.replace(agent.runs("echo again >> again.txt"), times=None, usage=used)
    if agent.name in ("opencode", "qwen"):
        rows = {**WORK, **ENDS}
        await table.play({name: rows[name] for name in PROFILE}, [again])
    else:
        turns = [agent.runs(LOOKS), agent.writes("new.txt", "made\n"), Turn(text="done", times=None)]
        await table.play(WORK, turns, key_proxy=True)
        await table.play(ENDS, [again])
        if agent.name not in TOKENS_ALIKE:
            await table.play(TOKENS, [again], key_proxy=True)
    assert {name: cell for name, cell in table.cells.items() if cell.startswith("silent")} == {}
    assert table.starts <= STARTS_MAX


@pytest.mark.parametrize("name", ELSEWHERE)
async def test_what_no_agent_heeds_is_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    story = await Table(AGENTS["api"](), tmp_path).run({name: ELSEWHERE[name]}, [Turn(text="x")])
    assert story.code == "config_invalid"
    assert f"config.vendor.{name}" in str(story.seen.run.error)
    assert story.seen.server.requests == ()
