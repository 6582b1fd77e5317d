"""A live run's door: the user's other programs answer its questions through it, and cancel it.

One Unix socket a run, in the state folder, which no sandbox shows. One line of JSON in, one out. The kernel names who
knocks: another user, and whatever descends from a control plane, an agent above all, is refused.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Literal

import anyio
import msgspec

from backplane.contract.approval import Decision, Remember, choices, chosen, misfit
from backplane.contract.events import Approval
from backplane.errors import BackplaneError, ConfigError, PolicyError, from_code
from backplane.process.aio import visited
from backplane.receipts.recovery import is_live
from backplane.runtime.run import Run

FOLDER: Final = "doors"
LINE_BYTES_MAX: Final = 1 << 20
OPENS_S_MAX: Final = 1.0
"""Time that a visitor waits until a live run's door opens. A program that answers its own asks has no door."""
OPENS_POLL_S: Final = 0.02
KNOCK_S: Final = 10.0
"""A line and its answer take a millisecond; whoever is slower than this is gone."""
VISITORS_MAX: Final = 32
"""At once; another one waits until a visitor has left."""
ANCESTORS_MAX: Final = 1_000
READ_BYTES: Final = 65_536
_CREDENTIALS: Final = struct.Struct("3i")

AsyncOnAsk = Callable[[Approval], Awaitable[Decision]]


class AnswerCommand(
    msgspec.Struct, frozen=True, kw_only=True, tag="answer", tag_field="verb", forbid_unknown_fields=True
):
    """Decide about an open question."""

    ask: str
    """The question's id, or its beginning if no other open one's begins so; empty for the only open question."""
    decision: Literal["allow", "deny"]
    reason: str = ""
    text: str | None = None
    """The answer to a question in words."""
    remember: Remember = "once"
    """`run`: the same for this tool until the run ends."""


class CancelCommand(
    msgspec.Struct, frozen=True, kw_only=True, tag="cancel", tag_field="verb", forbid_unknown_fields=True
):
    """End the run in order."""

    reason: str = ""


Request = AnswerCommand | CancelCommand
Obey = Callable[[Request, str], Awaitable[str]]
"""Does what is asked, by whom, and says what was done."""
CANCELLED: Final = "cancelled: the run ends cleanly, with its receipt"


class DoorReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of it: `done` in words, or an error."""

    done: str = ""
    code: str = ""
    message: str = ""
    hint: str = ""


_read_request: Final = msgspec.json.Decoder(Request).decode
_read_reply: Final = msgspec.json.Decoder(DoorReply).decode


class _Waiting:
    def __init__(self, ask: Approval) -> None:
        self.ask = ask
        self.settled = anyio.Event()
        self.decision: Decision | None = None
        self.error: Exception | None = None

    def settle(self, decision: Decision | None, error: Exception | None = None) -> None:
        if not self.settled.is_set():
            self.decision, self.error = decision, error
            self.settled.set()


def find_ask(asks: Mapping[str, Approval], given: AnswerCommand) -> str:
    """Return the id of the open question that an answer is for.

    Raises:
        ConfigError: `config_invalid`, no open question has this id, several begin so, or it wants words and got none,
            or wants none.
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
    """Return the words of an answer; for the number of an option its label."""
    return None if given.text is None else chosen(given.text, ask.body.get("options"))


class Desk:
    """Where the open questions of a run lie; the first answer counts, whoever gives it.

    Args:
        first: is asked here, beside whoever comes to the door; None waits for the door alone.
    """

    def __init__(self, first: AsyncOnAsk | None) -> None:
        self._first = first
        self._open: dict[str, _Waiting] = {}

    async def answer(self, ask: Approval) -> Decision:
        """Wait for the first answer. Raises what `first` raises."""
        waiting = _Waiting(ask)
        id = str(ask.body.get("id"))
        self._open[id] = waiting
        try:
            async with anyio.create_task_group() as tasks:
                if self._first is not None:
                    tasks.start_soon(self._ask_here, self._first, waiting)
                await waiting.settled.wait()
                tasks.cancel_scope.cancel()
        finally:
            del self._open[id]
        if waiting.error is not None:
            raise waiting.error
        assert waiting.decision is not None
        return waiting.decision

    async def _ask_here(self, first: AsyncOnAsk, waiting: _Waiting) -> None:
        try:
            waiting.settle(await first(waiting.ask))
        except Exception as error:
            waiting.settle(None, error)

    def decide(self, given: AnswerCommand, by: str) -> str:
        """Answer an open question; gives what was done, in words. Raises as `find_ask`."""
        id = find_ask({id: waiting.ask for id, waiting in self._open.items()}, given)
        waiting = self._open[id]
        waiting.settle(
            Decision(
                decision=given.decision,
                reason=f"{given.reason or f'a person said {given.decision}'} ({by})",
                text=answer_text(waiting.ask, given),
                remember=given.remember,
            )
        )
        return f"{given.decision}: {waiting.ask.message}"


def of_run(run: Run, desk: Desk) -> Obey:
    """What a run of this process does where it is told something."""

    async def obey(asked: Request, by: str) -> str:
        match asked:
            case AnswerCommand():
                return desk.decide(asked, by)
            case CancelCommand():
                await run.cancel(f"{asked.reason or 'cancelled'} ({by})")
                return CANCELLED

    return obey


async def open_door(home: Path, run_id: str, obey: Obey, tell: Callable[[str], object] = str) -> None:
    """Let visitors of a run in until cancelled; where no socket can be made, that is told, and the run goes on.

    Args:
        home: the state folder.
        obey: does what a visitor asks, raising what it is refused with.
        tell: takes what is wrong, in words.
    """
    try:
        await _serve(home, run_id, obey)
    except OSError as error:
        tell(f"no other terminal can answer or cancel this run: no socket in {home}: {error.strerror}")


async def _serve(home: Path, run_id: str, obey: Obey) -> None:
    folder = home / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.setblocking(False)
            # By the folder's descriptor: a socket's address has room for 107 bytes, and folders are longer.
            listener.bind(f"/proc/self/fd/{fd}/{run_id}")
            os.chmod(run_id, 0o600, dir_fd=fd)
            listener.listen(VISITORS_MAX)
            await visited(listener, partial(_attend, home=home, obey=obey), VISITORS_MAX)
    finally:
        with suppress(OSError):
            os.unlink(run_id, dir_fd=fd)
        os.close(fd)
        _sweep(home, folder)


async def _attend(visitor: socket.socket, home: Path, obey: Obey) -> None:
    with suppress(OSError), anyio.move_on_after(KNOCK_S):
        pid, uid, _ = _peer(visitor)
        # 0 where it is none of this user's that is in sight.
        reply = await _reply(pid if uid == os.geteuid() else 0, await _line(visitor), home, obey)
        left = msgspec.json.encode(reply) + b"\n"
        while left:
            await anyio.wait_writable(visitor)
            left = left[visitor.send(left) :]


async def _reply(pid: int, line: bytes, home: Path, obey: Obey) -> DoorReply:
    try:
        _require_stranger(pid, home)
        return DoorReply(done=await obey(_read_request(line), f"from process {pid}"))
    except msgspec.MsgspecError as error:
        return DoorReply(code="config_invalid", message=f"no request that this run knows: {error}")
    except BackplaneError as error:
        return DoorReply(code=error.code, message=error.message, hint=error.hint or "")


async def _line(visitor: socket.socket) -> bytes:
    """Read one line. Raises OSError where none comes."""
    data = b""
    while b"\n" not in data:
        await anyio.wait_readable(visitor)
        piece = visitor.recv(READ_BYTES)
        if not piece or len(data) > LINE_BYTES_MAX:
            raise ConnectionError
        data += piece
    return data.partition(b"\n")[0]


def _peer(raw: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end, as this process numbers them."""
    pid, uid, gid = _CREDENTIALS.unpack(raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid


def _require_stranger(pid: int, home: Path) -> None:
    """Refuse who is no process of this user's in sight, and whatever descends from a control plane of a live run.

    Raises:
        PolicyError: `policy_denied`.
    """
    planes, above = {os.getpid(), *_planes(home)}, _ancestors(pid)
    if pid <= 0 or above is None or planes & above:
        fact = "what a run has started may answer and cancel no run"
        raise PolicyError("policy_denied", fact, hint="from a terminal of your own")


def _ancestors(pid: int) -> set[int] | None:
    """The processes above this one; None where one of them cannot be seen."""
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
    """The processes that hold the other live runs of this state folder, as the kernel names them."""
    found = []
    with suppress(OSError):
        for name in os.listdir(home / FOLDER):
            with suppress(OSError), _connected(home, name) as raw:
                found.append(_peer(raw)[0])
    return found


def _connected(home: Path, name: str) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        fd = os.open(home / FOLDER, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            raw.settimeout(KNOCK_S)
            raw.connect(f"/proc/self/fd/{fd}/{name}")
        finally:
            os.close(fd)
    except BaseException:
        raw.close()
        raise
    return raw


def _connected_soon(home: Path, run_id: str) -> socket.socket:
    """Connect to a run's door, which opens a moment after the run is listed as live."""
    ends_s = time.monotonic() + OPENS_S_MAX
    while True:
        try:
            return _connected(home, run_id)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > ends_s or not is_live(home, run_id):
                raise
            time.sleep(OPENS_POLL_S)


def _sweep(home: Path, folder: Path) -> None:
    """Take away the doors of runs that are dead: killed planes leave theirs."""
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(BackplaneError, OSError):
                if not is_live(home, name):
                    os.unlink(folder / name)


def knock(home: Path, run_id: str, asked: Request) -> str:
    """Ask something of a live run; gives what was done, in words. For any process of the user that no run has started.

    Raises:
        ConfigError: `config_invalid`, the run has no door (it has ended, or another program holds it), or as it says.
        PolicyError: `policy_denied`, this process descends from a run.
        CapabilityError: `capability_unsupported`, its host cannot do it.
        ProtocolError: `protocol_unexpected_message`, its host has not said its hello yet.
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
