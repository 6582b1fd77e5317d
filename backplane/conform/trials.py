"""Try the abilities of a driven agent: a scripted model asks it for each of them.

The model is the server of `testing`; each trial has a workspace and a state folder of its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

import anyio
import msgspec

from backplane import api
from backplane.agents import rows
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
from backplane.runtime import backends, readiness
from backplane.testing import SIDE_TURNS, Call, ModelServer, Turn

if TYPE_CHECKING:
    from backplane.contract.events import AgentEvent

RUN_S: Final = 60.0
"""Limit of one trial: a run of an agent takes two seconds, on a loaded machine ten times that."""

AT_ONCE: Final = 2
"""Trials side by side: an agent waits for its own start for most of a trial."""

SEEN: Final = "heard\n"
WORD: Final = "marmot"
SCHEMA: Final[Json] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
KEY: Final = "trial-key-of-no-service"
PLACE: Final = "{url}"
"""Placeholder for the address of the scripted model in a row's options."""
ROOT: Final = "{root}"
"""Placeholder for the folder in calls of a row whose trials work in place; some agents take only absolute paths."""

CLAIMS: Final = ("native", "emulated", "restricted")
"""Levels that claim an ability."""
NONE: Final = "-"
"""The manifest does not name the ability."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one ability."""

    ability: str
    claim: str = NONE
    """Its level in the host's manifest: native, emulated, restricted, unsupported or `-`."""
    proof: Literal["proved", "failed", "untried"]
    """untried: it is claimed, and no trial shows it."""
    why: str = ""
    """The observation that contradicts the claim, or why nothing was tried; empty if proved."""

    @property
    def is_false(self) -> bool:
        """True if the trial did not show the ability, though it is claimed."""
        return self.claim in CLAIMS and self.proof == "failed"


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The results for one backend's agent."""

    backend: str
    program: str
    """A hash of the host and of the agent's program; another version has another one."""
    on: str
    """The day and time, UTC."""
    version: str | None = None
    """The version as the agent reports it."""
    findings: tuple[Finding, ...] = ()


class TrialRun(msgspec.Struct):
    """The observations of a trial."""

    events: list[AgentEvent] = []
    receipt: Any = None
    last: str = ""
    """The last request to the model, as JSON."""
    before: Json = None
    """Id of the conversation that was continued."""
    error: str = ""

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def patch(self) -> str:
        return self.receipt.verification.git_diff or ""

    @property
    def pieces(self) -> int:
        """Number of pieces in which answers came, without those of thoughts."""
        return sum(bool(event.text) and not isinstance(event, Reasoning) for event in self.of(AssistantDelta))

    @property
    def outputs(self) -> str:
        return "\n".join(str(event.output) for event in self.of(ToolResult) if not event.is_error)

    @property
    def found_one(self) -> bool:
        """True if a search gave the file's name, or the count that an agent shows instead."""
        return "seen.txt" in self.outputs or re.search(r"\b1 match", self.outputs) is not None

    @property
    def session(self) -> Json:
        """Id of its own conversation."""
        return next((event.body.get("id") for event in self.of(SessionNamed)), None)


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A way to try an ability."""

    holds: Callable[[TrialRun], Any]
    wanted: str
    """The expected observation, in words."""
    abp: dict[str, Json] = {}
    policy: PolicyProfile = PolicyProfile()
    calls: str = ""
    """The ability whose calls are made (default: its own)."""
    text: Turn | None = None
    """A turn of the model in place of calls."""
    continues: Literal["", "resume", "fork"] = ""
    """A second run continues the conversation of a first one, in this way."""


_TEXT: Final = Turn(text="four pieces of an answer", reasoning="a thought")
_HOOK: Final = {"event": "post_tool", "command": ["/bin/sh", "-c", 'printf \'{"decision":"modify","text":"unheard"}\'']}
_SERVER: Final = {"name": "trial", "command": sys.executable, "args": ["-m", "backplane", "mcp"]}
"""Our server: its tool `validate` answers that a document with a task is a work_order."""

WAYS: Final[Mapping[str, Way]] = {
    "streaming": Way(holds=lambda seen: seen.pieces > 1, wanted="an answer in pieces", text=_TEXT),
    "extended_thinking": Way(holds=lambda seen: seen.of(Reasoning), wanted="thoughts as reasoning", text=_TEXT),
    "tool_read": Way(holds=lambda seen: SEEN.strip() in seen.outputs, wanted="the word in the file"),
    "tool_write": Way(holds=lambda seen: f"+{WORD}" in seen.patch, wanted="a new file"),
    "tool_edit": Way(holds=lambda seen: f"+{WORD}" in seen.patch, wanted="a changed file"),
    "tool_bash": Way(holds=lambda seen: f"+{WORD}" in seen.patch, wanted="a file that the command wrote"),
    "tool_glob": Way(holds=lambda seen: seen.found_one, wanted="the name of the file, or the count 1"),
    "tool_grep": Way(holds=lambda seen: seen.found_one, wanted="the name of the file, or the count 1"),
    "tool_ask_user": Way(
        holds=lambda seen: any(event.body.get("kind") == "input" for event in seen.of(Approval)),
        wanted="a question to a person",
    ),
    "hooks_pre_tool_use": Way(
        holds=lambda seen: WORD not in seen.patch and seen.of(Approval) and seen.receipt.outcome != "failed",
        wanted="a request for approval of a command, which then did not run",
        policy=PolicyProfile(require_approval_for=("*",)), calls="tool_bash",
    ),
    "hooks_post_tool_use": Way(
        holds=lambda seen: "unheard" in seen.last, wanted="the result of a tool, as changed by a hook",
        abp={"hooks": [_HOOK]}, calls="tool_read",
    ),
    "structured_output_json_schema": Way(
        holds=lambda seen: seen.receipt.usage_raw.get("structured_output") == {"n": 7},
        wanted="a value that satisfies the JSON Schema", abp={"output_schema": SCHEMA},
    ),
    "mcp_client": Way(
        holds=lambda seen: "work_order" in seen.outputs, wanted="the answer of an MCP server's tool",
        abp={"mcp_servers": [_SERVER]},
    ),
    "session_resume": Way(
        holds=lambda seen: seen.before and seen.session == seen.before and WORD in seen.last,
        wanted="the text of the earlier conversation", text=Turn(text="yes"), continues="resume",
    ),
    "session_fork": Way(
        holds=lambda seen: seen.before and seen.session not in (None, seen.before) and WORD in seen.last,
        wanted="the text of the earlier conversation", text=Turn(text="yes"), continues="fork",
    ),
}  # fmt: skip
"""Ability → how one or two runs show it."""

SHOWN_BY: Final = {"tool_use": ("tool_bash", "tool_read", "tool_write")}
"""Abilities that the trial of another shows."""


class Trials:
    """The trials of one backend.

    Args:
        settings: the user's own; the backend's options and the isolation are taken from there.
        environ: the variables from which the environment of the agent is chosen.
        folder: a new one, for workspaces and state folders; the caller removes it.
    """

    def __init__(self, name: str, settings: Settings, environ: Mapping[str, str], folder: Path) -> None:
        self.name, self.settings, self.environ, self.folder = name, settings, environ, folder
        self.declared = settings.backends.get(name) or BackendSettings(host=name)
        row = self.declared.options.get("profile", self.declared.host or name)
        self.row: dict[str, Any] = rows.rows_of(str(find_shared("hosts")))[row]
        self.version: str | None = None
        self.manifest: dict[str, Any] | None = None

    async def find(self, ability: str) -> Finding | None:
        """Try an ability; return None if this agent has no calls to show it."""
        way, folder = WAYS[ability], self.folder / ability
        rows = self.row.get("trials", {}).get(way.calls or ability)
        if way.text is None and rows is None:
            return None
        turns = [
            Turn(text=row["text"]) if "text" in row else Turn(calls=(msgspec.convert(row, Call),))
            for row in _filled(rows or [], ROOT, str(folder / "work"))
        ]
        turns = [*turns, Turn(text="that is all")] if way.text is None else [way.text]
        folder.mkdir()
        if not way.continues:
            seen = await self.run(folder, turns, way.abp, way.policy)
        else:
            task = f"the word is {WORD}"
            seen = await self.run(folder, [Turn(text="noted")], {"session": {"keep": True}}, way.policy, task)
            if (before := seen.session) is not None:
                again: dict[str, Json] = {"session": {way.continues: before}}
                seen = await self.run(folder, turns, again, way.policy, "which word was it?")
                seen.before = before
        if way.holds(seen):
            return Finding(ability=ability, proof="proved")
        error = f" ({seen.error})" if seen.error else ""
        why = f"the run did not show {way.wanted}; it ended as {seen.receipt.outcome}{error}"
        return Finding(ability=ability, proof="failed", why=why)

    async def run(
        self, folder: Path, turns: list[Turn], abp: dict[str, Json], policy: PolicyProfile, task: str = "a trial"
    ) -> TrialRun:
        """Run the agent once with a scripted model."""

        async def deny(ask: Approval) -> Decision:
            return Decision(decision="deny", reason="a trial")

        in_place = bool(self.row.get("trial_in_place"))
        # The conversations of some agents are bound to a folder: all runs of a trial work in one, in place.
        root = folder / "work" if in_place else Path(tempfile.mkdtemp(dir=folder))
        root.mkdir(exist_ok=True)
        (root / "seen.txt").write_text(SEEN)
        order = WorkOrder(
            task,
            workspace=WorkspaceSpec(root=str(root), mode="pass_through" if in_place else "staged"),
            policy=policy,
            config=RuntimeConfig(vendor={"abp": abp}),
        )
        home = folder / "home"
        with ModelServer([*SIDE_TURNS, *turns]) as server:
            settings = self._settings(server.url)
            backend = backends.find(self.name, settings, {**self.environ, "BACKPLANE_HOME": str(home)})
            async with api.start(order, backend=backend, on_ask=deny, settings=settings, home=home) as run:
                events = [carried(event) async for event in run]
            asked = [request for request in server.requests if request.asks == "generate" and request.turn is not None]
        last = msgspec.json.encode(asked[-1].body).decode() if asked else ""
        seen = TrialRun(events, run.receipt, last, error=str(run.end_error or ""))
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
    return msgspec.json.decode(msgspec.json.encode(value).replace(place.encode(), msgspec.json.encode(text)[1:-1]))


async def prove(
    name: str,
    settings: Settings,
    environ: Mapping[str, str],
    home: Path,
    progress: Callable[[str], object] = lambda ability: None,
) -> Proof:
    """Try every ability of one backend's agent that has a trial; call `progress` with each before its trial.

    Raises:
        BackplaneError: the backend is not there or not ready, or its model cannot be replaced by a scripted one.
    """
    backend = backends.find(name, settings, environ)
    if not provable(backend):
        fix = "choose an agent for which the address of the model can be configured"
        raise BackplaneError(
            "capability_unsupported", f"backend {name!r} cannot be tested with a scripted model", hint=fix
        )
    missing = readiness.missing_program(backend, environ)
    if missing is not None:
        raise missing
    found: list[Finding | None] = []
    room = anyio.CapacityLimiter(AT_ONCE)
    with tempfile.TemporaryDirectory(prefix="backplane-trials-", ignore_cleanup_errors=True) as folder:
        trials = Trials(name, settings, environ, Path(folder))

        async def one(ability: str) -> None:
            async with room:
                progress(ability)
                found.append(await trials.find(ability))

        async with anyio.create_task_group() as tasks:
            for ability in WAYS:
                tasks.start_soon(one, ability)
    if trials.manifest is not None:
        keep_manifest(home, backend.key, trials.manifest)
    return Proof(
        backend=name,
        program=stamp(backend, environ),
        on=canonical.timestamp_at(time.time_ns()),
        version=trials.version,
        findings=tuple(_judged({finding.ability: finding for finding in found if finding}, trials.manifest or {})),
    )


def _judged(tried: dict[str, Finding], manifest: Mapping[str, Json]) -> Iterator[Finding]:
    """Compare the trials with the host's claims; a claim that no trial shows is a finding, too."""
    for ability in CAPABILITIES:
        level = manifest.get(ability, NONE)
        claim = level if isinstance(level, str) else "restricted"
        if any(other in tried and tried[other].proof == "proved" for other in SHOWN_BY.get(ability, ())):
            yield Finding(ability=ability, claim=claim, proof="proved")
        elif ability in tried:
            yield msgspec.structs.replace(tried[ability], claim=claim)
        elif claim in CLAIMS:
            yield Finding(ability=ability, claim=claim, proof="untried", why="no test covers this capability")


def provable(backend: backends.Backend) -> bool:
    """Return True if the agent can be given a scripted model."""
    agent = getattr(backend, "agent", None)
    return isinstance(agent, rows.AgentRow) and (agent.base_url is not None or bool(agent.trials))


def stamp(backend: backends.Backend, environ: Mapping[str, str]) -> str:
    """Return a hash of the host and the agent's program; another version has another one."""
    agent = getattr(backend, "agent", None)
    words = [backend.key]
    path = shutil.which(agent.program, path=environ.get("PATH")) if agent is not None else None
    if path is not None:
        real = os.path.realpath(path)
        facts = os.stat(real)
        words += [real, str(facts.st_size), str(facts.st_mtime_ns)]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()
