"""Opens a live run's door: a Unix socket through which the user's other programs answer its questions or cancel it.

The socket is in the state folder, which sandboxes hide. A request and its reply are one line of JSON each. The kernel
reports the caller's process: processes of another user are refused, and so are descendants of a control plane, such as
agents.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, Literal

import anyio
import msgspec

from backplane.contract.approval import Decision, Remember, choices, chosen, misfit
from backplane.contract.events import Approval
from backplane.errors import BackplaneError, ConfigError, PolicyError, from_code
from backplane.process.aio import receive, send, visited
from backplane.receipts.recovery import is_live
from backplane.runtime.run import Run

FOLDER: Final = "doors"
LINE_BYTES_MAX: Final = 1 << 20
OPENS_S_MAX: Final = 1.0
"""Seconds that a caller waits until a live run's door opens. A program that answers asks itself opens no door."""
OPENS_POLL_S: Final = 0.02
KNOCK_S: Final = 10.0
"""Time limit of a request and its reply, which take a millisecond; a slower caller is disconnected."""
VISITORS_MAX: Final = 32
"""Limit of connected callers; a further one waits until another has left."""
ANCESTORS_MAX: Final = 1_000
READ_BYTES: Final = 65_536
_CREDENTIALS: Final = struct.Struct("3i")

AsyncOnAsk = Callable[[Approval], Awaitable[Decision]]


class AnswerCommand(
    msgspec.Struct, frozen=True, kw_only=True, tag="answer", tag_field="verb", forbid_unknown_fields=True
):
    """A request to answer an open question."""

    ask: str
    """The question's id, or a beginning that no other open question's id has; empty if only one question is open."""
    decision: Literal["allow", "deny"]
    reason: str = ""
    text: str | None = None
    """The answer in words, for a question that asks for words."""
    remember: Remember = "once"
    """`run` to give the same answer for this tool until the run ends."""


class CancelCommand(
    msgspec.Struct, frozen=True, kw_only=True, tag="cancel", tag_field="verb", forbid_unknown_fields=True
):
    """A request to cancel the run."""

    reason: str = ""


Request = AnswerCommand | CancelCommand
Obey = Callable[[Request, str], Awaitable[str]]
"""Handles a request, given a description of its caller; returns a text that says what was done."""
CANCELLED: Final = "cancelled: the run ends cleanly, with its receipt"


class DoorReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reply to a request: a text that says what was done, or an error."""

    done: str = ""
    code: str = ""
    message: str = ""
    hint: str = ""


_read_request: Final = msgspec.json.Decoder(Request).decode
_read_reply: Final = msgspec.json.Decoder(DoorReply).decode


def find_ask(asks: Mapping[str, Approval], given: AnswerCommand) -> str:
    """Find the open question that an answer is for; return its id.

    Raises:
        ConfigError: `config_invalid`, no or several open questions fit the id, or the answer does not fit the question.
    """
    found = [id for id in asks if id == given.ask] or [id for id in asks if id.startswith(given.ask)]
    if len(found) != 1:
        there = ", ".join(asks) or "none"
        if given.ask:
            fact = f"{'several open questions begin with' if found else 'no open question has the id'} {given.ask!r}"
        else:
            fact = "several questions are open, and none is named" if found else "no question is open"
        raise ConfigError("config_invalid", fact, hint=f"open questions: {there}")
    options = asks[found[0]].body.get("options")
    if given.decision == "allow" and given.text is not None and chosen(given.text, options) is None:
        fact = f"the question has no option {given.text[:20]!r}"
        raise ConfigError("config_invalid", fact, hint=f"--text with 1 to {len(choices(options))}, or with words")
    if asks[found[0]].kind == "input" and given.decision == "allow" and given.text is None:
        raise ConfigError("config_invalid", "this question wants an answer in words", hint="--text WORDS")
    if why := misfit(Decision(given.decision, text=given.text), asks[found[0]].kind):
        raise ConfigError("config_invalid", why, hint="leave the text out, or say it as the reason of a denial")
    return found[0]


def answer_text(ask: Approval, given: AnswerCommand) -> str | None:
    """Return the text of an answer; an option's number is replaced by the option's label."""
    return None if given.text is None else chosen(given.text, ask.body.get("options"))


class _Waiting:
    """An open question, its answer from the door, and the scope of the wait for an answer."""

    def __init__(self, ask: Approval) -> None:
        self.ask = ask
        self.decision: Decision | None = None
        self.scope = anyio.CancelScope()


class Desk:
    """Keeps the open questions of a run; the first answer to a question counts.

    Args:
        first: a function that answers in this process, while clients of the door may, too; None if only they answer.
    """

    def __init__(self, first: AsyncOnAsk | None) -> None:
        self._first = first
        self._open: dict[str, _Waiting] = {}

    async def answer(self, ask: Approval) -> Decision:
        """Wait for the first answer to a question. Raises what `first` raises."""
        id = str(ask.body.get("id"))
        waiting = self._open[id] = _Waiting(ask)
        own: Decision | None = None
        try:
            with waiting.scope:
                if self._first is None:
                    await anyio.sleep_forever()
                else:
                    own = await self._first(ask)
        except Exception:
            if waiting.decision is None:
                raise
        finally:
            del self._open[id]
        decision = waiting.decision or own
        assert decision is not None
        return decision

    def decide(self, given: AnswerCommand, by: str) -> str:
        """Answer an open question; return a text that says what was done. Raises as `find_ask`."""
        id = find_ask({id: waiting.ask for id, waiting in self._open.items()}, given)
        waiting = self._open[id]
        waiting.decision = waiting.decision or Decision(
            decision=given.decision,
            reason=f"{given.reason or f'a person said {given.decision}'} ({by})",
            text=answer_text(waiting.ask, given),
            remember=given.remember,
        )
        waiting.scope.cancel()
        return f"{given.decision}: {waiting.ask.message}"


def of_run(run: Run, desk: Desk) -> Obey:
    """Return the handler of requests to a run of this process."""

    async def obey(asked: Request, by: str) -> str:
        match asked:
            case AnswerCommand():
                return desk.decide(asked, by)
            case CancelCommand():
                await run.cancel(f"{asked.reason or 'cancelled'} ({by})")
                return CANCELLED

    return obey


async def open_door(home: Path, run_id: str, obey: Obey, tell: Callable[[str], object] = str) -> None:
    """Answer other programs' requests to a run until cancelled; return if no socket can be opened.

    Args:
        home: the state folder.
        obey: handles a request; its errors are sent to the other program.
        tell: called with the reason why no socket can be opened.
    """
    try:
        await _serve(home, run_id, obey)
    except OSError as error:
        tell(f"no other terminal can answer or cancel this run: no socket in {home}: {error.strerror}")


async def _serve(home: Path, run_id: str, obey: Obey) -> None:
    (home / FOLDER).mkdir(mode=0o700, exist_ok=True)
    with _opened(home) as fd:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.setblocking(False)
                listener.bind(f"/proc/self/fd/{fd}/{run_id}")
                os.chmod(run_id, 0o600, dir_fd=fd)
                listener.listen(VISITORS_MAX)
                await visited(listener, partial(_attend, home=home, obey=obey), VISITORS_MAX)
        finally:
            with suppress(OSError):
                os.unlink(run_id, dir_fd=fd)
            _sweep(home)


@contextmanager
def _opened(home: Path) -> Iterator[int]:
    """Open the folder of sockets: addresses through its descriptor fit into 107 bytes, whatever the folder's path."""
    fd = os.open(home / FOLDER, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


async def _attend(visitor: socket.socket, home: Path, obey: Obey) -> None:
    with suppress(OSError), anyio.move_on_after(KNOCK_S):
        pid, uid, _ = _peer(visitor)
        # 0 stands for a process of another user, or one that is not visible to this process.
        reply = await _reply(pid if uid == os.geteuid() else 0, await _line(visitor), home, obey)
        await send(visitor, msgspec.json.encode(reply) + b"\n")


async def _reply(pid: int, line: bytes, home: Path, obey: Obey) -> DoorReply:
    try:
        _require_stranger(pid, home)
        return DoorReply(done=await obey(_read_request(line), f"from process {pid}"))
    except msgspec.MsgspecError as error:
        return DoorReply(code="config_invalid", message=f"no request that this run knows: {error}")
    except BackplaneError as error:
        return DoorReply(code=error.code, message=error.message, hint=error.hint or "")


async def _line(visitor: socket.socket) -> bytes:
    """Read one line. Raises OSError if there is none, or if it is too long."""
    data = b""
    while b"\n" not in data:
        piece = await receive(visitor, READ_BYTES)
        if not piece or len(data) > LINE_BYTES_MAX:
            raise ConnectionError
        data += piece
    return data.partition(b"\n")[0]


def _peer(raw: socket.socket) -> tuple[int, int, int]:
    """Return the ids of process, user and group at the other end, as this process sees them."""
    pid, uid, gid = _CREDENTIALS.unpack(raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid


def _require_stranger(pid: int, home: Path) -> None:
    """Refuse callers of another user, and descendants of the control plane of any live run.

    Raises:
        PolicyError: `policy_denied`, the process is one of these, or not visible.
    """
    planes, above = {os.getpid(), *_planes(home)}, _ancestors(pid)
    if pid <= 0 or above is None or planes & above:
        fact = "what a run has started may answer and cancel no run"
        raise PolicyError("policy_denied", fact, hint="from a terminal of your own")


def _ancestors(pid: int) -> set[int] | None:
    """Return the ids of a process's ancestors; None if one of them is not visible."""
    found: set[int] = set()
    while pid > 1 and len(found) < ANCESTORS_MAX:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        except OSError:
            return None
        pid = int(fields[1])
        found.add(pid)
    return found


def _planes(home: Path) -> list[int]:
    """Return the ids of the processes that listen at a state folder's doors, as the kernel reports them."""
    found = []
    with suppress(OSError):
        for name in os.listdir(home / FOLDER):
            with suppress(OSError), _connected(home, name) as raw:
                found.append(_peer(raw)[0])
    return found


def _connected(home: Path, name: str) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        raw.settimeout(KNOCK_S)
        with _opened(home) as fd:
            raw.connect(f"/proc/self/fd/{fd}/{name}")
    except BaseException:
        raw.close()
        raise
    return raw


def _connected_soon(home: Path, run_id: str) -> socket.socket:
    """Connect to a run's door; wait for the door, which opens a moment after the run is listed as live."""
    ends_s = time.monotonic() + OPENS_S_MAX
    while True:
        try:
            return _connected(home, run_id)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > ends_s or not is_live(home, run_id):
                raise
            time.sleep(OPENS_POLL_S)


def _sweep(home: Path) -> None:
    """Remove the sockets of runs that are not live, which killed control planes leave behind."""
    with suppress(OSError):
        for door in (home / FOLDER).iterdir():
            with suppress(BackplaneError, OSError):
                if not is_live(home, door.name):
                    door.unlink()


def knock(home: Path, run_id: str, asked: Request) -> str:
    """Send a request to a live run; return a text that says what was done. A run refuses processes that runs started.

    Raises:
        ConfigError: `config_invalid`, the run has no door (it has ended, or its program answers itself) or refuses.
        PolicyError: `policy_denied`, a run has started this process.
        CapabilityError: `capability_unsupported`, the run's host does not support the request.
        ProtocolError: `protocol_unexpected_message`, the run's host has not sent its hello yet.
    """
    try:
        with _connected_soon(home, run_id) as raw:
            raw.sendall(msgspec.json.encode(asked) + b"\n")
            data = b""
            while not data.endswith(b"\n") and (block := raw.recv(READ_BYTES)):
                data += block
        reply = _read_reply(data)
    except (OSError, msgspec.MsgspecError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "no answer"
        hint = "it has ended, or it belongs to a program that answers for itself: backplane runs"
        raise ConfigError("config_invalid", f"run {run_id} has no open door ({why})", hint=hint) from error
    if not reply.code:
        return reply.done
    raise from_code(reply.code, reply.message, hint=reply.hint or None)
