"""Try what a driven agent can do: a scripted model asks it for each ability.

The model is `testing`'s on loopback, the run any other run in a folder and a state folder of its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

import anyio
import msgspec

from backplane import api
from backplane.agents import shipped
from backplane.config import BackendSettings, Limits, Settings
from backplane.contract import canonical
from backplane.contract.approval import Decision
from backplane.contract.canonical import Json
from backplane.contract.capability import CAPABILITIES
from backplane.contract.events import Approval, AssistantDelta, Reasoning, SessionNamed, ToolResult, carried
from backplane.contract.work import PolicyProfile, RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import BackplaneError
from backplane.receipts.manifests import keep_manifest
from backplane.resources import find as find_shared
from backplane.runtime import backends
from backplane.testing import SIDE_TURNS, Call, ModelServer, Turn

if TYPE_CHECKING:
    from backplane.contract.events import AgentEvent

RUN_S: Final = 60.0
"""Limit of one trial: a run of an agent takes two seconds, on a loaded machine ten times that."""

SEEN: Final = "heard\n"
WORD: Final = "marmot"
SCHEMA: Final[Json] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
KEY: Final = "trial-key-of-no-service"
PLACE: Final = "{url}"
"""Placeholder for the address of the scripted model in a row's options."""
ROOT: Final = "{root}"
"""Placeholder for the folder in calls of a row whose trials work in place; some agents take only absolute paths."""


CLAIMS: Final = ("native", "emulated", "restricted")
"""Levels that say that an ability is there."""
NONE: Final = "-"
"""The manifest does not name the ability."""
UNHEARD: Final = "?"
"""No manifest came."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one ability."""

    ability: str
    claim: str = NONE
    """Its level in the host's manifest: native, emulated, restricted, unsupported, `-` or `?`."""
    proof: Literal["proved", "failed", "untried"]
    """untried: it is claimed, and no trial shows it."""
    why: str = ""
    """The observation that contradicts the claim, or why nothing was tried; empty if proved."""

    @property
    def is_false(self) -> bool:
        """Return True if the trial did not show the ability, though it is claimed or no manifest came."""
        return self.claim in (*CLAIMS, UNHEARD) and self.proof == "failed"


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The results for one backend's agent."""

    backend: str
    program: str
    """Names the host and the agent's program as they were; changes when either does."""
    on: str
    """The day and time, UTC."""
    version: str | None = None
    """The agent's own word for it."""
    findings: tuple[Finding, ...] = ()


class TrialRun(msgspec.Struct):
    """One trial that has run."""

    events: list[AgentEvent] = []
    outcome: str = "failed"
    patch: str = ""
    raw: dict[str, Any] = {}
    last: str = ""
    """The last request to the model, as JSON."""

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def pieces(self) -> int:
        """Number of pieces in which answers came; those of thoughts do not count."""
        return sum(bool(event.text) and not isinstance(event, Reasoning) for event in self.of(AssistantDelta))

    @property
    def found_one(self) -> bool:
        """Return True if a search gave the file's name, or the count that an agent shows instead."""
        return "seen.txt" in self.outputs or re.search(r"\b1 match", self.outputs) is not None

    @property
    def outputs(self) -> str:
        return "\n".join(str(event.output) for event in self.of(ToolResult) if not event.is_error)


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A way to try an ability."""

    holds: Callable[[TrialRun], bool]
    wanted: str
    """The expected observation, in words."""
    abp: dict[str, Json] = {}
    policy: PolicyProfile = PolicyProfile()
    answer: Decision | None = None
    """The answer to asks; None denies them."""
    calls: str = ""
    """The ability whose calls are made; empty takes its own."""
    text: Turn | None = None
    """A turn of the model in place of calls."""


_TEXT: Final = Turn(text="four pieces of an answer", reasoning="a thought")
_HOOK: Final = {"event": "post_tool", "command": ["/bin/sh", "-c", 'printf \'{"decision":"modify","text":"unheard"}\'']}

_SERVER: Final = {"name": "trial", "command": sys.executable, "args": ["-m", "backplane", "mcp"]}
"""Ours: its tool `validate` says that a document with a task is a work_order."""

WAYS: Final[Mapping[str, Way]] = {
    "streaming": Way(holds=lambda seen: seen.pieces > 1, wanted="an answer in pieces", text=_TEXT),
    "extended_thinking": Way(holds=lambda seen: bool(seen.of(Reasoning)), wanted="thoughts as such", text=_TEXT),
    "tool_read": Way(holds=lambda seen: SEEN.strip() in seen.outputs, wanted="the file's word"),
    "tool_write": Way(holds=lambda seen: f"+{WORD}" in seen.patch, wanted="a new file"),
    "tool_edit": Way(holds=lambda seen: f"+{WORD}" in seen.patch, wanted="a changed file"),
    "tool_bash": Way(holds=lambda seen: f"+{WORD}" in seen.patch, wanted="what the command made"),
    "tool_glob": Way(holds=lambda seen: seen.found_one, wanted="the file's name, or that one was found"),
    "tool_grep": Way(holds=lambda seen: seen.found_one, wanted="the file's name, or that one was found"),
    "tool_ask_user": Way(
        holds=lambda seen: any(event.body.get("kind") == "input" for event in seen.of(Approval)),
        wanted="a question to a person",
    ),
    "hooks_pre_tool_use": Way(
        holds=lambda seen: WORD not in seen.patch and bool(seen.of(Approval)) and seen.outcome != "failed",
        wanted="a command that was asked about and not run",
        policy=PolicyProfile(require_approval_for=("*",)),
        answer=Decision(decision="deny", reason="a trial"),
        calls="tool_bash",
    ),
    "hooks_post_tool_use": Way(
        holds=lambda seen: "unheard" in seen.last, wanted="a result as a hook changed it", abp={"hooks": [_HOOK]},
        calls="tool_read",
    ),
    "structured_output_json_schema": Way(
        holds=lambda seen: seen.raw.get("structured_output") == {"n": 7}, wanted="a value of the wanted shape",
        abp={"output_schema": SCHEMA},
    ),
    "mcp_client": Way(
        holds=lambda seen: "work_order" in seen.outputs, wanted="what a server's tool answers",
        abp={"mcp_servers": [_SERVER]},
    ),
}  # fmt: skip
"""Abilities that one run shows. Whether a conversation goes on takes two, see `_again`."""

CONVERSATIONS: Final = {"session_resume": "resume", "session_fork": "fork"}

SHOWN_BY: Final = {"tool_use": ("tool_bash", "tool_read", "tool_write")}
"""Abilities that the trial of another shows."""

AT_ONCE: Final = 2
"""Trials side by side: an agent waits for its own start for most of a trial."""


class Trials:
    """The trials of one backend.

    Args:
        settings: the user's own; the backend's options and the isolation are taken from there.
        environ: what the environment of the agent is chosen from.
        folder: a new one, for workspaces and state folders; the caller removes it.
    """

    def __init__(self, name: str, settings: Settings, environ: Mapping[str, str], folder: Path) -> None:
        self.name, self.settings, self.environ, self.folder = name, settings, environ, folder
        self.declared = settings.backends.get(name) or BackendSettings(host=name)
        file, *row = backends.SHIPPED[self.declared.host or name]
        table = tomllib.loads((find_shared("hosts") / file).with_suffix(".toml").read_text(encoding="utf-8"))
        self.row: dict[str, Any] = table[row[0]]
        self.version: str | None = None
        self.manifest: dict[str, Any] | None = None

    def turns(self, ability: str, way: Way) -> list[Turn] | None:
        """Return what the model says; None if this agent has no such calls."""
        if way.text is not None:
            return [way.text]
        rows = self.row.get("trials", {}).get(way.calls or ability)
        if rows is None:
            return None
        return [*map(_turn, _filled(rows, ROOT, str(self.folder / ability / "work"))), Turn(text="that is all")]

    async def find(self, ability: str) -> Finding | None:
        """Try an ability; return None if this agent has no way to show it."""
        (self.folder / ability).mkdir()
        if ability in CONVERSATIONS:
            return await self._again(ability)
        way = WAYS[ability]
        turns = self.turns(ability, way)
        if turns is None:
            return None
        seen = await self.run(ability, turns, way.abp, way.policy, way.answer)
        return _finding(ability, way.holds(seen), way.wanted, seen)

    async def _again(self, ability: str) -> Finding:
        keep: dict[str, Json] = {"session": {"keep": True}}
        first = await self.run(ability, [Turn(text="noted")], keep, task=f"the word is {WORD}")
        ids = [event.body.get("id") for event in first.of(SessionNamed)]
        if not ids:
            return _finding(ability, False, "a conversation that can be named again", first)
        session: dict[str, Json] = {"session": {CONVERSATIONS[ability]: ids[0]}}
        second = await self.run(ability, [Turn(text="yes")], session, task="which word was it?")
        again = [event.body.get("id") for event in second.of(SessionNamed)]
        right = bool(again) and (again[0] == ids[0]) == (ability == "session_resume")
        return _finding(ability, right and WORD in second.last, "what was said before", second)

    async def run(
        self,
        ability: str,
        turns: list[Turn],
        abp: dict[str, Json],
        policy: PolicyProfile | None = None,
        answer: Decision | None = None,
        *,
        task: str = "a trial",
    ) -> TrialRun:
        """Run the agent once with a scripted model."""

        async def answered(ask: Approval) -> Decision:
            return answer or Decision(decision="deny", reason="nobody is there")

        folder, in_place = self.folder / ability, bool(self.row.get("trial_in_place"))
        # The conversations of some agents are bound to a folder: all runs of a trial work in one, in place.
        root = folder / ("work" if in_place else f"work-{len(list(folder.glob('work-*')))}")
        root.mkdir(exist_ok=True)
        (root / "seen.txt").write_text(SEEN)
        order = WorkOrder(
            task,
            workspace=WorkspaceSpec(root=str(root), mode="pass_through" if in_place else "staged"),
            policy=policy or PolicyProfile(),
            config=RuntimeConfig(vendor={"abp": abp}),
        )
        home = folder / "home"
        with ModelServer([*SIDE_TURNS, *turns]) as server:
            settings = self._settings(server.url)
            backend = backends.find(self.name, settings, {**self.environ, "BACKPLANE_HOME": str(home)})
            async with api.start(order, backend=backend, on_ask=answered, settings=settings, home=home) as run:
                events = [carried(event) async for event in run]
            asked = [request for request in server.requests if request.asks == "generate" and request.turn is not None]
        raw = run.receipt.usage_raw if isinstance(run.receipt.usage_raw, dict) else {}
        seen = TrialRun(
            events=events,
            outcome=run.receipt.outcome,
            patch=run.receipt.verification.git_diff or "",
            raw={**raw, "error": str(run.end_error)} if run.end_error is not None else raw,
            last=msgspec.json.encode(asked[-1].body).decode() if asked else "",
        )
        self.manifest = run.receipt.capabilities or self.manifest
        named = [event.body.get("version") for event in seen.of(SessionNamed)]
        self.version = next((word for word in named if isinstance(word, str)), self.version)
        return seen

    def _settings(self, url: str) -> Settings:
        options = {**self.declared.options, **_filled(self.row.get("trial_options", {}), PLACE, url)}
        if "base_url" in self.row:
            options["base_url"] = url + urlsplit(self.row["base_url"]).path
        options.pop("key_env", None)
        key = {self.row["key_env"]: KEY} if "key_env" in self.row else {}
        env = {**self.declared.env, **_filled(self.row.get("trial_env", {}), PLACE, url), **key}
        mine = msgspec.structs.replace(self.declared, options=options, env=env)
        return Settings(backends={self.name: mine}, limits=Limits(run_s=RUN_S), isolation=self.settings.isolation)


def _filled(value: Any, place: str, text: str) -> Any:
    """Replace a placeholder everywhere in a row's value by a text."""
    if isinstance(value, dict):
        return {name: _filled(inner, place, text) for name, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, place, text) for inner in value]
    return value.replace(place, text) if isinstance(value, str) else value


def _turn(row: dict[str, Any]) -> Turn:
    if "text" in row:
        return Turn(text=row["text"])
    return Turn(calls=(msgspec.convert(row, Call),))


def _finding(ability: str, holds: bool, wanted: str, seen: TrialRun) -> Finding:
    if holds:
        return Finding(ability=ability, proof="proved")
    error = seen.raw.get("error")
    return Finding(
        ability=ability,
        proof="failed",
        why=f"not seen: {wanted}; the run ended {seen.outcome}{f' ({error})' if error else ''}",
    )


async def prove(
    name: str,
    settings: Settings,
    environ: Mapping[str, str],
    home: Path,
    progress: Callable[[str], object] = lambda ability: None,
) -> Proof:
    """Try everything that can be tried of one backend's agent, and call `progress` with each ability before its trial.

    Raises:
        BackplaneError: the backend is not there or not ready, or its model cannot be replaced by a scripted one.
    """
    backend = backends.find(name, settings, environ)
    if not provable(backend):
        fix = "choose an agent whose model's address can be configured"
        raise BackplaneError("capability_unsupported", f"backend {name!r} cannot be tried", hint=fix)
    missing = backends.missing_program(backend, environ)
    if missing is not None:
        raise missing
    found: dict[str, Finding | None] = {}
    room = anyio.CapacityLimiter(AT_ONCE)
    with tempfile.TemporaryDirectory(prefix="backplane-trials-", ignore_cleanup_errors=True) as folder:
        trials = Trials(name, settings, environ, Path(folder))

        async def one(ability: str) -> None:
            async with room:
                progress(ability)
                found[ability] = await trials.find(ability)

        async with anyio.create_task_group() as tasks:
            for ability in (*WAYS, *CONVERSATIONS):
                tasks.start_soon(one, ability)
    if trials.manifest is not None:
        keep_manifest(home, backend.key, trials.manifest)
    findings = judge([finding for finding in found.values() if finding is not None], trials.manifest or {})
    now = canonical.timestamp_at(time.time_ns())
    return Proof(backend=name, program=stamp(backend, environ), on=now, version=trials.version, findings=findings)


def judge(tried: Iterable[Finding], manifest: Mapping[str, Json] | None) -> tuple[Finding, ...]:
    """Put what was tried beside what the host claims; claims that no trial shows are findings, too.

    Args:
        manifest: None if the host sent none.
    """
    shown = {finding.ability: finding for finding in tried}
    for ability, others in SHOWN_BY.items():
        if any(other in shown and shown[other].proof == "proved" for other in others):
            shown[ability] = Finding(ability=ability, proof="proved")
    found = []
    for ability in CAPABILITIES:
        level = UNHEARD if manifest is None else manifest.get(ability, NONE)
        claim = level if isinstance(level, str) else "restricted"
        if ability in shown:
            found.append(msgspec.structs.replace(shown[ability], claim=claim))
        elif claim in CLAIMS:
            found.append(Finding(ability=ability, claim=claim, proof="untried", why="no trial shows it"))
    return tuple(found)


def provable(backend: backends.Backend) -> bool:
    """Return True if the agent can be given a scripted model."""
    agent = getattr(backend, "agent", None)
    return isinstance(agent, shipped.ShippedAgent) and (agent.base_url is not None or agent.is_tried)


def stamp(backend: backends.Backend, environ: Mapping[str, str]) -> str:
    """Names the host and the agent's program as they are now: another version is another name."""
    agent = getattr(backend, "agent", None)
    words = [backend.key]
    path = shutil.which(agent.options.program, path=environ.get("PATH")) if agent is not None else None
    if path is not None:
        real = os.path.realpath(path)
        facts = os.stat(real)
        words += [real, str(facts.st_size), str(facts.st_mtime_ns)]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()
