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
READ_BYTES: Final = 65_536
_CREDENTIALS: Final = struct.Struct("3i")

AsyncOnAsk = Callable[[Approval], Awaitable[Decision]]


class _Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb", forbid_unknown_fields=True):
    pass


class AnswerCommand(_Command, frozen=True, kw_only=True, tag="answer"):
    """A request to answer an open question."""

    ask: str
    """The question's id, or a beginning that no other open question's id has; empty if only one question is open."""
    decision: Literal["allow", "deny"]
    reason: str = ""
    text: str | None = None
    """The answer in words, for a question that asks for words; None for other questions."""
    remember: Remember = "once"
    """`run` to answer like calls the same way until the run ends (`policy.remembered`)."""


class CancelCommand(_Command, frozen=True, kw_only=True, tag="cancel"):
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


def find_ask(asks: Mapping[str, Approval], given: AnswerCommand) -> tuple[str, str | None]:
    """Find the open question that an answer is for.

    Returns:
        The question's id, and the answer's text, in which an option's number became its label; None without a text.

    Raises:
        ConfigError: `config_invalid`, no or several open questions fit the id, or the answer does not fit the question.
    """
    found = [id for id in asks if id == given.ask] or [id for id in asks if id.startswith(given.ask)]
    if len(found) != 1:
        if given.ask:
            fact = f"{'several open questions begin with' if found else 'no open question has the id'} {given.ask!r}"
        else:
            fact = "several questions are open, and none is named" if found else "no question is open"
        raise ConfigError("config_invalid", fact, hint=f"open questions: {', '.join(asks) or 'none'}")
    ask, text = asks[found[0]], given.text
    options = ask.body.get("options")
    if given.decision == "allow" and text is not None and chosen(text, options) is None:
        fact = f"the question has no option {text[:20]!r}"
        raise ConfigError("config_invalid", fact, hint=f"--text with 1 to {len(choices(options))}, or with words")
    if ask.kind == "input" and given.decision == "allow" and text is None:
        raise ConfigError("config_invalid", "this question wants an answer in words", hint="--text WORDS")
    if why := misfit(Decision(given.decision, text=text), ask.kind):
        raise ConfigError("config_invalid", why, hint="leave the text out, or say it as the reason of a denial")
    return found[0], text if text is None else chosen(text, options)


class Desk:
    """Keeps the open questions of a run; the first answer to a question counts.

    Args:
        first: a function that answers in this process, while clients of the door may, too; None if only they answer.
    """

    def __init__(self, first: AsyncOnAsk | None) -> None:
        self._first = first
        self._open: dict[str, tuple[Approval, anyio.CancelScope, list[Decision]]] = {}
        """Open questions by id, each with the scope of the wait for an answer, and the answers from the door."""

    async def answer(self, ask: Approval) -> Decision:
        """Wait for the first answer to a question. Raises what `first` raises."""
        id, scope, given = str(ask.body.get("id")), anyio.CancelScope(), list[Decision]()
        self._open[id] = ask, scope, given
        try:
            with scope:
                if self._first is not None:
                    return await self._first(ask)
                await anyio.sleep_forever()
        except Exception:
            if not given:
                raise
        finally:
            del self._open[id]
        return given[0]

    def decide(self, given: AnswerCommand, by: str) -> str:
        """Answer an open question; return a text that says what was done. Raises as `find_ask`."""
        id, text = find_ask({id: row[0] for id, row in self._open.items()}, given)
        ask, scope, answers = self._open[id]
        reason = f"{given.reason or f'a person said {given.decision}'} ({by})"
        answers.append(Decision(given.decision, reason, text=text, remember=given.remember))
        scope.cancel()
        return f"{given.decision}: {ask.message}"


def of_run(run: Run, desk: Desk) -> Obey:
    """Return the handler of requests to a run of this process."""

    async def obey(asked: Request, by: str) -> str:
        if isinstance(asked, AnswerCommand):
            return desk.decide(asked, by)
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
        (home / FOLDER).mkdir(mode=0o700, exist_ok=True)
        with _opened(home) as fd, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.setblocking(False)
                listener.bind(f"/proc/self/fd/{fd}/{run_id}")
                os.chmod(run_id, 0o600, dir_fd=fd)
                listener.listen(VISITORS_MAX)
                await visited(listener, partial(_attend, home=home, obey=obey), VISITORS_MAX)
            finally:
                with suppress(OSError):
                    os.unlink(run_id, dir_fd=fd)
                _sweep(home)
    except OSError as error:
        tell(f"no other terminal can answer or cancel this run: no socket in {home}: {error.strerror}")


@contextmanager
def _opened(home: Path) -> Iterator[int]:
    """Open the folder of sockets: addresses through its descriptor fit into 107 bytes, whatever the folder's path."""
    fd = os.open(home / FOLDER, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


async def _attend(visitor: socket.socket, home: Path, obey: Obey) -> None:
    """Read one request, a line of at most `LINE_BYTES_MAX`, and send the reply."""
    with suppress(OSError), anyio.move_on_after(KNOCK_S):
        (pid, uid), line = _peer(visitor), b""
        while b"\n" not in line:
            piece = await receive(visitor, READ_BYTES)
            if not piece or len(line) > LINE_BYTES_MAX:
                return
            line += piece
        try:
            _require_stranger(pid if uid == os.geteuid() else 0, home)
            reply = DoorReply(done=await obey(_read_request(line), f"from process {pid}"))
        except msgspec.MsgspecError as error:
            reply = DoorReply(code="config_invalid", message=f"no request that this run knows: {error}")
        except BackplaneError as error:
            reply = DoorReply(code=error.code, message=error.message, hint=error.hint or "")
        await send(visitor, msgspec.json.encode(reply) + b"\n")


def _peer(raw: socket.socket) -> tuple[int, int]:
    """Return the ids of process and user at the other end, as the kernel reports them; 0 for a process out of sight."""
    pid, uid, _ = _CREDENTIALS.unpack(raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def _require_stranger(pid: int, home: Path) -> None:
    """Refuse a process out of sight, and descendants of the control plane of any live run.

    Args:
        pid: the caller's process; 0 if it is another user's, or out of sight.

    Raises:
        PolicyError: `policy_denied`.
    """
    above = _ancestors(pid)
    if pid <= 0 or above is None or above & {os.getpid(), *_planes(home)}:
        fact = "what a run has started may answer and cancel no run"
        raise PolicyError("policy_denied", fact, hint="from a terminal of your own")


def _ancestors(pid: int) -> set[int] | None:
    """Return the ids of a process's ancestors; None if they cannot all be seen."""
    found: set[int] = set()
    while pid > 1:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        except OSError:
            return None
        pid = int(fields[1])
        if pid in found:  # Ids were reused while they were read.
            return None
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


@contextmanager
def _connected(home: Path, run_id: str, wait_s: float = 0.0) -> Iterator[socket.socket]:
    """Connect to a run's door; wait for the door, which opens a moment after the run is listed as live."""
    ends_s = time.monotonic() + wait_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.settimeout(KNOCK_S)
        while True:
            try:
                with _opened(home) as fd:
                    raw.connect(f"/proc/self/fd/{fd}/{run_id}")
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() >= ends_s or not is_live(home, run_id):
                    raise
            time.sleep(OPENS_POLL_S)
        yield raw


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
        with _connected(home, run_id, OPENS_S_MAX) as raw, raw.makefile("rb") as replies:
            raw.sendall(msgspec.json.encode(asked) + b"\n")
            reply = _read_reply(replies.readline())
    except (OSError, msgspec.MsgspecError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "no answer"
        hint = "it has ended, or it belongs to a program that answers for itself: backplane runs"
        raise ConfigError("config_invalid", f"run {run_id} has no open door ({why})", hint=hint) from error
    if not reply.code:
        return reply.done
    raise from_code(reply.code, reply.message, hint=reply.hint or None)
