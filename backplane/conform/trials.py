"""What a driven agent can do, shown by letting it: a scripted model asks for each ability, and it is looked at.

The model is `testing`'s on loopback, the run any other run in a folder and a state folder of its own. The findings are
kept with their day and the program they were found with; another program makes them stale.
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
from backplane.config import BackendSettings, Isolation, Limits, Settings
from backplane.conform import matrix
from backplane.contract import canonical
from backplane.contract.approval import Decision
from backplane.contract.canonical import Json
from backplane.contract.capability import CAPABILITIES
from backplane.contract.events import Approval, AssistantDelta, Reasoning, SessionNamed, ToolResult, carried
from backplane.contract.work import PolicyProfile, RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import BackplaneError
from backplane.receipts.manifests import keep_manifest, kept_manifest
from backplane.resources import find as find_shared
from backplane.runtime import backends
from backplane.testing import SIDE_TURNS, Call, ModelServer, Turn

if TYPE_CHECKING:
    from backplane.contract.events import AgentEvent

RUN_S: Final = 60.0
"""For one trial: a run of an agent takes two seconds, a loaded machine needs ten times that."""

SEEN: Final = "heard\n"
WORD: Final = "marmot"
SCHEMA: Final[Json] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
KEY: Final = "trial-key-of-no-service"
PLACE: Final = "{url}"
"""In a row's options for trials, the scripted model's address."""
ROOT: Final = "{root}"
"""Placeholder for the folder in calls of a row whose trials work in place; some agents take only absolute paths."""


UNHEARD: Final = "?"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of one ability."""

    ability: str
    claim: str = matrix.NONE
    """Its level in the host's manifest: native, emulated, restricted, unsupported, `-` where it is not named, `?` where
    no manifest came."""
    proof: Literal["proved", "failed", "untried"]
    """untried: it is claimed, and no trial shows it."""
    why: str = ""
    """What was seen instead, or why nothing was tried; empty where it is proved."""

    @property
    def is_false(self) -> bool:
        """Return True if the trial did not show the ability, though it is claimed or no manifest came."""
        return self.claim in (*matrix.CLAIMS, UNHEARD) and self.proof == "failed"


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out about one backend's agent."""

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
    """What the model was told last, as JSON."""

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
    """How an ability is tried."""

    holds: Callable[[TrialRun], bool]
    wanted: str
    """What should have been seen, in words."""
    abp: dict[str, Json] = {}
    policy: PolicyProfile = PolicyProfile()
    answer: Decision | None = None
    """To what is asked; None where nobody is there."""
    calls: str = ""
    """The ability whose calls are made; empty takes its own."""
    text: Turn | None = None
    """What the model says in place of calls."""


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


class AbilityTrial:
    """One ability of one backend, tried; a value for each ability.

    Args:
        declared: the backend as it is configured.
        environ: what its own environment is chosen from.
        folder: a new one, for workspaces and a state folder; the caller removes it.
        isolation: as of the user's own runs.
    """

    def __init__(
        self,
        name: str,
        declared: BackendSettings,
        environ: Mapping[str, str],
        folder: Path,
        isolation: Isolation = "best_effort",
    ) -> None:
        self.name, self.declared, self.environ, self.folder = name, declared, environ, folder
        self.isolation = isolation
        file, *row = backends.SHIPPED[declared.host or name]
        table = tomllib.loads((find_shared("hosts") / file).with_suffix(".toml").read_text(encoding="utf-8"))
        self.row: dict[str, Any] = table[row[0]]
        self.version: str | None = None
        self.manifest: dict[str, Any] | None = None
        self._in_place = bool(self.row.get("trial_in_place"))
        """True for an agent whose conversations are bound to a folder: all trials work in one, in place."""
        self._runs = 0

    def turns(self, ability: str, way: Way) -> list[Turn] | None:
        """What the model says; None where this agent has no such calls."""
        if way.text is not None:
            return [way.text]
        rows = self.row.get("trials", {}).get(way.calls or ability)
        if rows is None:
            return None
        return [*map(_turn, _filled(rows, ROOT, str(self.folder / "work"))), Turn(text="that is all")]

    async def find(self, ability: str) -> Finding | None:
        """Try the ability; None where there is no way to."""
        if ability in CONVERSATIONS:
            return await self._again(ability)
        way = WAYS.get(ability)
        turns = self.turns(ability, way) if way is not None else None
        if way is None or turns is None:
            return None
        seen = await self.run(turns, way.abp, way.policy, way.answer)
        return _finding(ability, way.holds(seen), way.wanted, seen)

    async def _again(self, ability: str) -> Finding:
        first = await self.run([Turn(text="noted")], {"session": {"keep": True}}, task=f"the word is {WORD}")
        ids = [event.body.get("id") for event in first.of(SessionNamed)]
        wanted = "a conversation that can be named again"
        if not ids:
            return _finding(ability, False, wanted, first)
        session = {CONVERSATIONS[ability]: ids[0]}
        second = await self.run([Turn(text="yes")], {"session": session}, task="which word was it?")
        again = [event.body.get("id") for event in second.of(SessionNamed)]
        right = bool(again) and (again[0] == ids[0]) == (ability == "session_resume")
        return _finding(ability, right and WORD in second.last, "what was said before", second)

    async def run(
        self,
        turns: list[Turn],
        abp: dict[str, Json],
        policy: PolicyProfile | None = None,
        answer: Decision | None = None,
        *,
        task: str = "a trial",
    ) -> TrialRun:
        """One run against a scripted model."""

        async def answered(ask: Approval) -> Decision:
            return answer or Decision(decision="deny", reason="nobody is there")

        self._runs += 1
        root = self.folder / ("work" if self._in_place else f"work-{self._runs}")
        root.mkdir(exist_ok=True)
        (root / "seen.txt").write_text(SEEN)
        order = WorkOrder(
            task,
            workspace=WorkspaceSpec(root=str(root), mode="pass_through" if self._in_place else "staged"),
            policy=policy or PolicyProfile(),
            config=RuntimeConfig(vendor={"abp": abp}),
        )
        seen = TrialRun(events=[])
        with ModelServer([*SIDE_TURNS, *turns]) as server:
            backend = backends.find(self.name, self._settings(server.url), self._environ())
            async with api.start(
                order, backend=backend, on_ask=answered, settings=self._settings(server.url),
                home=self.folder / "home",
            ) as run:  # fmt: skip
                async for event in run:
                    seen.events.append(carried(event))
            asked = [request for request in server.requests if request.asks == "generate" and request.turn is not None]
            seen.last = msgspec.json.encode(asked[-1].body).decode() if asked else ""
        return self._look(run, seen)

    def _look(self, run: Any, seen: TrialRun) -> TrialRun:
        seen.outcome, seen.patch = run.receipt.outcome, run.receipt.verification.git_diff or ""
        seen.raw = run.receipt.usage_raw if isinstance(run.receipt.usage_raw, dict) else {}
        if run.end_error is not None:
            seen.raw = {**seen.raw, "error": str(run.end_error)}
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
        return Settings(backends={self.name: mine}, limits=Limits(run_s=RUN_S), isolation=self.isolation)

    def _environ(self) -> dict[str, str]:
        return {**self.environ, "BACKPLANE_HOME": str(self.folder / "home")}


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
    """Try everything that can be tried of one backend's agent, and keep what was found; `progress` hears what is next.

    Raises:
        BackplaneError: the backend is not there or not ready, or its model cannot be replaced by a scripted one.
    """
    declared = settings.backends.get(name) or BackendSettings(host=name)
    backend = backends.find(name, settings, environ)
    if not provable(backend):
        fix = "only agents whose model has an address of its own setting can be tried"
        raise BackplaneError("capability_unsupported", f"nothing of {name!r} can be tried", hint=fix)
    missing = backends.missing_program(backend, environ)
    if missing is not None:
        raise missing
    with tempfile.TemporaryDirectory(prefix="backplane-trials-", ignore_cleanup_errors=True) as folder:
        found = await _try_all(name, declared, environ, Path(folder), settings.isolation, progress)
    manifest = next((trial.manifest for trial, _ in found if trial.manifest is not None), None)
    version = next((trial.version for trial, _ in found if trial.version is not None), None)
    findings = judge(
        [told for _, told in found if told is not None], manifest or {}, matrix.untried(declared.host or name)
    )
    now = canonical.timestamp_at(time.time_ns())
    proof = Proof(backend=name, program=stamp(backend, environ), on=now, version=version, findings=findings)
    keep_manifest(home, _key(name), msgspec.to_builtins(proof))
    if manifest is not None:
        keep_manifest(home, backend.key, manifest)
    return proof


async def _try_all(
    name: str,
    declared: BackendSettings,
    environ: Mapping[str, str],
    folder: Path,
    isolation: Isolation,
    progress: Callable[[str], object],
) -> list[tuple[AbilityTrial, Finding | None]]:
    """Every ability that has a trial, `AT_ONCE` of them side by side, told in their order."""
    found: dict[str, tuple[AbilityTrial, Finding | None]] = {}
    room = anyio.CapacityLimiter(AT_ONCE)

    async def one(ability: str) -> None:
        async with room:
            progress(ability)
            (folder / ability).mkdir()
            trial = AbilityTrial(name, declared, environ, folder / ability, isolation)
            found[ability] = trial, await trial.find(ability)

    async with anyio.create_task_group() as tasks:
        for ability in (*WAYS, *CONVERSATIONS):
            tasks.start_soon(one, ability)
    return [found[ability] for ability in (*WAYS, *CONVERSATIONS)]


def judge(
    tried: Iterable[Finding], manifest: Mapping[str, Json] | None, untried: Mapping[str, str]
) -> tuple[Finding, ...]:
    """What was tried beside what the host claims: what it claims and nobody tried is told, too.

    Args:
        manifest: None where the host never said one.
        untried: ability → why no trial can show it.
    """
    shown = {finding.ability: finding for finding in tried}
    for ability, others in SHOWN_BY.items():
        if any(other in shown and shown[other].proof == "proved" for other in others):
            shown[ability] = Finding(ability=ability, proof="proved")
    told = []
    for ability in CAPABILITIES:
        claim, finding = UNHEARD if manifest is None else matrix.level(manifest.get(ability)), shown.get(ability)
        if finding is not None:
            told.append(msgspec.structs.replace(finding, claim=claim))
        elif claim in matrix.CLAIMS:
            why = untried.get(ability, "no trial shows it")
            told.append(Finding(ability=ability, claim=claim, proof="untried", why=why))
    return tuple(told)


def provable(backend: backends.Backend) -> bool:
    """Whether the agent's model can be a scripted one."""
    agent = getattr(backend, "agent", None)
    return isinstance(agent, shipped.ShippedAgent) and (agent.base_url is not None or agent.is_tried)


def kept_proof(name: str, home: Path) -> Proof | None:
    """What was found out last; None where nothing was, or by a version that wrote it down otherwise."""
    kept = kept_manifest(home, _key(name))
    try:
        return msgspec.convert(kept, Proof) if kept is not None else None
    except msgspec.ValidationError:
        return None


def findings(proof: Proof, program: str) -> dict[str, str]:
    """Ability → proved or failed; stale for all of them when the program is another by now."""
    fresh = proof.program == program
    return {
        finding.ability: finding.proof if fresh else "stale" for finding in proof.findings if finding.proof != "untried"
    }


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


def _key(name: str) -> str:
    return f"proof:{name}"
