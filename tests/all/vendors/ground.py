"""Where a driven agent is played: its workspace, a scripted model, one run, and what was seen of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio

import backplane
from backplane.config import BackendSettings, Limits, ServerSettings, Settings
from backplane.contract.events import (
    AgentEvent,
    AssistantMessage,
    Failed,
    SessionNamed,
    carried,
)
from backplane.contract.work import PolicyProfile, RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.runtime.run import Run
from backplane.testing import SIDE_TURNS, Call, ModelServer, Turn

WAIT_S_MAX = 20.0
"""For something to happen in an agent on a busy machine."""
BEGUN_S_MAX = 60.0
"""For an agent of 600 MB to start and do its first step on a machine with other work."""
POLL_S = 0.02


HOUSE = Path(__file__).with_name("house_mcp.py")


def house(*word: str, **env: str) -> dict[str, Any]:
    """An order's row for a server of tools named `house`."""
    return {"name": "house", "command": sys.executable, "args": [str(HOUSE), *word], **({"env": env} if env else {})}


Played = TypeVar("Played")
"""A run that has ended, or several."""


class Agent(Protocol):
    """One driven agent, as its cases need it."""

    name: str
    host: str
    """The shipped host that drives it."""
    conversations_in: str
    """The mode of runs whose conversation is kept: `staged`, or `pass_through` where it stays with its folder."""
    ends_at_denial: bool = False
    """Its turn ends where a call is denied."""
    write_tool: str
    """What the contract calls the tool that writes a file."""
    env: dict[str, str]
    """Given with every order: retries capped."""
    patient: dict[str, Any]
    """Given with an order whose retries are to outlast our clock."""
    writable: tuple[str, ...] = ()
    """Folders that it may write to beside its own."""
    shown_chars_min: int = 1000
    """Of a megabyte of output, what its model is shown at the least."""
    labels: dict[str, str]
    """Case → "emulated: how" or "refused: why"; any other case passes."""
    alike: tuple[str, ...] = ()
    """Cases that run the same code of ours for this agent as for another one, which shows them."""

    def options(self, url: str) -> dict[str, Any]:
        """Options of its backend for a model at this address, which ends in no path."""
        ...

    def variables(self) -> dict[str, str]:
        """Its backend's own variables: a key."""
        ...

    def model(self, name: str) -> str:
        """How an order names a model of this service."""
        return name

    def writes(self, path: str, content: str) -> Turn: ...
    def runs(self, command: str) -> Turn: ...
    def calls(self, server: str, tool: str, **input: Any) -> Turn:
        """How its model calls a tool of a server."""
        return Turn(calls=(Call(name=f"mcp__{server}__{tool}", input=input),))

    def structured(self, value: Any) -> tuple[Turn, ...]:
        """The model's turns that answer with a value."""
        ...


def installed(kind: Callable[[], Agent]) -> Agent:
    """An agent; skips where its program is not there."""
    made = kind()
    made.options("http://127.0.0.1:9")
    return made


@dataclass
class Seen:
    """A run that has ended."""

    run: Run
    server: ModelServer
    root: Path
    events: list[AgentEvent] = field(default_factory=list)

    @property
    def receipt(self) -> Any:
        return self.run.receipt

    @property
    def end(self) -> dict[str, Any]:
        found: dict[str, Any] = self.receipt.usage_raw["backplane"]["end"]
        return found

    @property
    def codes(self) -> list[str]:
        return [str(event.error_code) for event in self.events if isinstance(event, Failed)]

    @property
    def patch(self) -> str:
        return self.receipt.verification.git_diff or ""

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def words(self) -> str:
        """The last message."""
        return str(self.of(AssistantMessage)[-1].text)

    @property
    def session(self) -> str:
        return str(self.of(SessionNamed)[0].body["id"])

    def layer(self, rule: str) -> Any:
        rows = self.receipt.usage_raw["backplane"]["enforcement"]["rules"]
        return next(row["layer"] for row in rows if row["rule"] == rule)


@dataclass
class Ground:
    """Where a case plays: an agent, a workspace with one file, a state folder."""

    agent: Agent
    root: Path
    kept: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Runs that several tests look at, by agent and name."""

    async def once(self, name: str, play: Callable[[], Awaitable[Played]]) -> Played:
        """Play runs unless a test has played them; an agent takes seconds to start."""
        key = self.agent.name, name
        if key not in self.kept:
            self.kept[key] = await play()
        found: Played = self.kept[key]
        return found

    @contextlib.asynccontextmanager
    async def begin(
        self,
        turns: Sequence[Turn],
        *,
        abp: dict[str, Any] | None = None,
        policy: PolicyProfile | None = None,
        limits: Limits | None = None,
        isolation: str = "off",
        mode: str = "staged",
        on_ask: Any = None,
        hooks: Sequence[backplane.Hook] = (),
        tools: Sequence[Callable[..., Any]] = (),
        options: dict[str, Any] | None = None,
        url: str | None = None,
        key_proxy: bool = False,
        task: str = "work",
        servers: dict[str, ServerSettings] | None = None,
        **config: Any,
    ) -> AsyncIterator[Seen]:
        """Start a run; it goes on while its events are asked for."""
        vendor = {**config.pop("vendor", {}), **({"abp": abp} if abp else {})}
        env = {**self.agent.env, **config.pop("env", {})}
        order = WorkOrder(
            task,
            policy=policy or PolicyProfile(),
            workspace=WorkspaceSpec(root=str(self.root), mode=mode),  # type: ignore[arg-type]
            config=RuntimeConfig(vendor=vendor, env=env, **config),
        )
        with ModelServer([*SIDE_TURNS, *turns]) as server:
            chosen = {**self.agent.options(url or server.url), **(options or {})}
            backend = BackendSettings(
                host=self.agent.host,
                options=chosen,
                env=self.agent.variables(),
                key_proxy=key_proxy,
                writable=self.agent.writable,
            )
            settings = Settings(
                backends={self.agent.name: backend},
                limits=limits or Limits(),
                mcp_servers=servers or {},
                isolation=isolation,  # type: ignore[arg-type]
            )
            given: Any = {"settings": settings, "on_ask": on_ask, "hooks": hooks, "tools": tools}
            start = backplane.start(order, backend=self.agent.name, **given)
            async with start as run:
                yield Seen(run, server, self.root)

    async def play(
        self, turns: Sequence[Turn], *, seen: Callable[[Seen, AgentEvent], Any] | None = None, **kw: Any
    ) -> Seen:
        """A run from its beginning to its end.

        Args:
            seen: looks at each event; may be a coroutine.
        """
        async with self.begin(turns, **kw) as found:
            async for event in found.run:
                found.events.append(carried(event))
                step = seen(found, found.events[-1]) if seen is not None else None
                if isinstance(step, Awaitable):
                    await step
        return found


async def until(what: Callable[[], bool]) -> None:
    """Wait for something outside of this program."""
    with anyio.fail_after(BEGUN_S_MAX):
        while not what():
            await anyio.sleep(POLL_S)


def running(words: str) -> list[int]:
    """Processes of this machine whose command line has these words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if words.encode() in (folder / "cmdline").read_bytes().replace(b"\0", b" "):
                found.append(int(folder.name))
    return found
