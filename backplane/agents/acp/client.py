"""A client of the Agent Client Protocol: initialize, a session, a prompt, cancel.

It offers the agent no file system and no terminal, so every agent works on disk itself and the layers around it see
what it does. Whatever else an agent asks is refused as unknown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.process.jsonrpc import Pipe, Watch
from backplane.protocol.jsonrpc import METHOD_NOT_FOUND, Fault, Malformed, Notification, Reply, Request

PROTOCOL_VERSION: Final = 1

START_S: Final = 60.0
"""For an agent to answer its first questions: five seconds are usual on a loaded machine, a cold disk needs more."""

UNREAD_MAX: Final = 20
"""Lines of an agent's output that are no messages and are kept for its error."""

Permission = Callable[[dict[str, Any]], Awaitable[bool | None]]
"""Decides a `toolCall`: yes, no, or None when the turn was cancelled meanwhile."""


class Session(msgspec.Struct, frozen=True):
    """What an agent said about a new session."""

    id: str
    modes: tuple[str, ...] = ()
    """Ids of the modes it can be set to."""
    mode: str | None = None
    options: dict[str, tuple[str, ...]] = {}
    """Its own settings: id → values to choose from."""
    models: tuple[str, ...] = ()
    model: str | None = None
    """The one it has now."""


class Client:
    """One agent behind a pipe; `run` must be running while it is used.

    Args:
        update: takes each `session/update`, in order.
        permit: decides each `session/request_permission`.
        watch: told of every line and what it is, before it is heard or answered.
    """

    def __init__(
        self,
        write_fd: int,
        read_fd: int,
        *,
        update: Callable[[Json], Awaitable[None]],
        permit: Permission,
        watch: Watch | None = None,
    ) -> None:
        self._update, self._permit = update, permit
        self.unread: list[Malformed] = []
        self.agent: dict[str, Any] = {}
        """What it answered to `initialize`."""
        self._pipe = Pipe(write_fd, read_fd, answer=self._answer, hear=self._hear, unread=self._note, watch=watch)

    async def run(self) -> None:
        """Read until the agent closes its output."""
        await self._pipe.run()

    async def initialize(self, name: str, version: str) -> None:
        """Agree on the protocol.

        Raises:
            BackendError: `backend_unavailable` when it refuses, `protocol_version_mismatch`, `backend_timeout`.
        """
        offer = {
            "protocolVersion": PROTOCOL_VERSION,
            "clientCapabilities": {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False},
            "clientInfo": {"name": name, "version": version},
        }
        self.agent = await self._must("initialize", offer)
        spoken = self.agent.get("protocolVersion")
        if spoken != PROTOCOL_VERSION:
            raise BackendError("protocol_version_mismatch", f"the agent speaks protocol version {spoken}, not 1")

    def can(self, *path: str) -> bool:
        """Whether the agent announced this capability: `can("promptCapabilities", "image")`."""
        place: Any = self.agent.get("agentCapabilities")
        for name in path:
            place = place.get(name) if isinstance(place, dict) else None
        return place is not None and place is not False

    async def new_session(self, cwd: str, mcp_servers: list[Json]) -> Session:
        """Open a session that works in `cwd`, an absolute path.

        Raises:
            BackendError: `backend_unavailable`, `backend_auth_failed`, `backend_timeout`.
        """
        said = await self._must("session/new", {"cwd": cwd, "mcpServers": mcp_servers})
        if not isinstance(said.get("sessionId"), str):
            raise BackendError("contract_schema_violation", "the agent's answer to session/new names no session")
        return read_session(said)

    def way_on(self, *, fork: bool) -> str | None:
        """The call that goes on with a conversation, or with a copy of it; None where the agent announced none."""
        if fork:
            return "session/fork" if self.can("sessionCapabilities", "fork") else None
        if self.can("sessionCapabilities", "resume"):
            return "session/resume"
        return "session/load" if self.can("loadSession") else None

    async def old_session(
        self, method: str, id: str, cwd: str, mcp_servers: list[Json]
    ) -> tuple[Session | None, Fault | None]:
        """Go on with a conversation; the agent may tell its history before it answers.

        Returns:
            The session, under a new id for a fork; None with the agent's refusal.

        Raises:
            BackendError: `backend_timeout`.
        """
        params: Json = {"sessionId": id, "cwd": cwd, "mcpServers": mcp_servers}
        reply = await self._pipe.call(method, params, timeout_s=START_S)
        said = _dict(reply.result) | ({} if method == "session/fork" else {"sessionId": id})
        named = reply.fault is None and isinstance(said.get("sessionId"), str)
        return (read_session(said) if named else None), reply.fault

    async def set(self, method: str, session: str, **params: Json) -> Fault | None:
        """Change a setting of the session: `session/set_mode`, `session/set_model`, `session/set_config_option`."""
        reply = await self._pipe.call(method, {"sessionId": session, **params}, timeout_s=START_S)
        return reply.fault

    async def prompt(self, session: str, blocks: list[Json]) -> Reply:
        """One turn, from the user's words to its end; how long that may take is the caller's to bound."""
        return await self._pipe.call("session/prompt", {"sessionId": session, "prompt": blocks}, timeout_s=None)

    async def cancel(self, session: str) -> None:
        """Ask for the end of the turn; `prompt` returns when the agent has ended it."""
        await self._pipe.notify("session/cancel", {"sessionId": session})

    async def _must(self, method: str, params: Json) -> dict[str, Any]:
        reply = await self._pipe.call(method, params, timeout_s=START_S)
        if reply.fault is not None:
            login, gone = reply.fault.code == AUTH_REQUIRED, reply.fault.gone
            raise BackendError(
                "backend_auth_failed" if login else "backend_crashed" if gone else "backend_unavailable",
                f"the agent's program ended before it answered {method}"
                if gone
                else f"the agent refused {method}: {reply.fault.message}",
                hint="log in with the agent's own program, or give it its key" if login else None,
                evidence="; ".join(f"{line.why}: {line.evidence!r}" for line in self.unread) or None,
            )
        if not isinstance(reply.result, dict):
            raise BackendError("contract_schema_violation", f"the agent's answer to {method} is no object")
        return reply.result

    async def _hear(self, told: Notification) -> None:
        if told.method == "session/update":
            await self._update(told.params.get("update"))

    async def _answer(self, asked: Request) -> Json | Fault:
        if asked.method != "session/request_permission":
            return Fault(METHOD_NOT_FOUND, f"this client has no method {asked.method}")
        call = asked.params.get("toolCall")
        verdict = await self._permit(call if isinstance(call, dict) else {})
        option = None if verdict is None else choose(asked.params.get("options"), verdict)
        if option is None:
            return {"outcome": {"outcome": "cancelled"}}
        return {"outcome": {"outcome": "selected", "optionId": option}}

    def _note(self, line: Malformed) -> None:
        if len(self.unread) < UNREAD_MAX:
            self.unread.append(line)


AUTH_REQUIRED: Final = -32000
"""The protocol's code for an agent that wants a login first."""

_KINDS: Final = {True: ("allow_once", "allow_always"), False: ("reject_once", "reject_always")}
"""Options by their kind: ids are each agent's own. One call at a time is asked, so `once` comes first."""


def choose(options: Json, allow: bool) -> str | None:
    """The id of the option that says yes or no; None when there is none, which only cancelling the turn answers."""
    offered = [option for option in options if isinstance(option, dict)] if isinstance(options, list) else []
    by_kind = {option.get("kind"): option.get("optionId") for option in offered}
    return next((by_kind[kind] for kind in _KINDS[allow] if isinstance(by_kind.get(kind), str)), None)


def read_session(said: dict[str, Any]) -> Session:
    """What `session/new` offers, from whichever of the two places an agent puts it."""
    modes, models = _dict(said.get("modes")), _dict(said.get("models"))
    options = {
        str(option.get("id")): _ids(option.get("options"), "value") for option in _dicts(said.get("configOptions"))
    }
    current = modes.get("currentModeId")
    chosen = [option.get("currentValue") for option in _dicts(said.get("configOptions")) if option.get("id") == "model"]
    model = next((one for one in (*chosen, models.get("currentModelId")) if isinstance(one, str)), None)
    return Session(
        id=said["sessionId"],
        modes=_ids(modes.get("availableModes"), "id"),
        mode=current if isinstance(current, str) else None,
        options=options,
        models=_ids(models.get("availableModels"), "modelId"),
        model=model,
    )


def _dict(value: Json) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: Json) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _ids(value: Json, name: str) -> tuple[str, ...]:
    # An agent may group its choices: then the groups hold the list.
    flat = [inner for one in _dicts(value) for inner in (_dicts(one.get("options")) or [one])]
    return tuple(one[name] for one in flat if isinstance(one.get(name), str))
