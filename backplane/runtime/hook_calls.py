"""Calls one hook: starts a program or calls a function, and reads its decision.

`hooks` chooses the hooks for an ask and applies their decisions.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_args

import anyio
import anyio.to_thread
import msgspec
from msgspec import UNSET, UnsetType

from backplane.config import HookEvent, child_environment
from backplane.contract.approval import Decision, DecisionKind
from backplane.contract.canonical import Json, duplicate_key
from backplane.errors import BackendError
from backplane.process.aio import asyncio_task, in_daemon
from backplane.process.child import Child, open_child
from backplane.process.launch import StartCommand
from backplane.process.programs import feed, piece
from backplane.protocol.lines import strict
from backplane.redact.secrets import Redactor

ANSWER_BYTES_MAX: Final = 1024 * 1024
"""Maximum size of a command's answer: a changed tool input with a whole file in it is much smaller."""

REASON_CHARS_MAX: Final = 2000
"""Maximum length of a command's reason: an agent reads it, and the receipt has it."""

DENIED: Final = 2
"""Exit code of a command that denies without JSON; its stderr is the reason."""

_as_lines: Final = msgspec.json.Encoder().encode_lines


class HookFailed(Exception):
    """Raised if a hook fails: it gave no valid answer, or none in time."""


class HookCall(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a hook. A command gets it as JSON on stdin.

    Attributes:
        event: `pre_tool`, `post_tool`, `run_start`, `run_end` or `subagent_end`.
        run: The run's id.
        tool: The agent's name for the tool; empty for the last three events.
        input: Input of the tool; for a patch its `diff` and `files`. For `run_start` the `task` and the `backend`, for
            `run_end` the `reason` and the error's `code`, for `subagent_end` what the agent tells of its sub-agent.
        output: Output of the tool; only after it ran.
        is_error: True if the tool failed; only after it ran.
        root: The folder in which the agent works.
    """

    event: HookEvent
    run: str
    tool: str = ""
    input: Json | UnsetType = UNSET
    output: Json | UnsetType = UNSET
    is_error: bool | UnsetType = UNSET
    root: str


async def put(
    run: Sequence[str] | Callable[[HookCall], Any], call: HookCall, environ: Mapping[str, str], redactor: Redactor
) -> Decision:
    """Ask a command or function. Raises HookFailed: it gives no valid answer.

    Args:
        redactor: removes secrets from texts before they are cut, as half a secret would not be found later.
    """
    if callable(run):
        return await _function(run, call, redactor)
    return await ask_command(run, call, environ, redactor)


async def _function(function: Callable[[HookCall], Any], call: HookCall, redactor: Redactor) -> Decision:
    try:
        answer = await call_function(function, call)
        if isinstance(answer, Decision):
            msgspec.json.encode(answer)
    except Exception as error:  # The caller's own code: its bug must not let a tool through.
        raise HookFailed(log_raised("hook", function, error, redactor)) from error
    if answer is None:
        return Decision(decision="allow")
    if not isinstance(answer, Decision) or answer.decision not in get_args(DecisionKind):
        raise HookFailed(f"it gave {redactor.text(repr(answer))[0][:80]}, which is neither a Decision nor None")
    return answer


async def call_function(function: Callable[..., Any], *given: object, **members: object) -> Any:
    """Call the caller's function, plain or `async`; a plain one runs in a thread, because it may block.

    Raises:
        RuntimeError: a task that the function waited for was cancelled, but this call was not.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*given, **members)
        # A thread that hangs cannot be stopped: its answer is dropped, and Python's exit does not wait for it.
        async with anyio.to_thread.current_default_thread_limiter():
            answer = await in_daemon(functools.partial(function, *given, **members))
        return await answer if inspect.isawaitable(answer) else answer
    except BaseException as error:
        if isinstance(error, Exception) or not _is_its_own(error):
            raise
        raise RuntimeError(f"{type(error).__name__}: a task that it waited for was cancelled") from error


def _is_its_own(error: BaseException) -> bool:
    """Return True if the caller's function caused a cancellation, which would end the run's tasks if raised further."""
    import asyncio  # Needed only for an exception outside `Exception`.

    if not isinstance(error, asyncio.CancelledError | anyio.get_cancelled_exc_class()):
        return False
    task = asyncio_task()
    return anyio.current_effective_deadline() != -math.inf and not (task is not None and task.cancelling())


def log_raised(role: str, function: Callable[..., Any], error: Exception, redactor: Redactor) -> str:
    """Log the exception of the caller's function with its traceback, and return the exception in one line."""
    import logging  # Needed only for a function that raises.

    fact = f"{type(error).__name__}: {redactor.text(str(error))[0][:200]}"
    name = getattr(function, "__qualname__", type(function).__name__)
    # With the traceback: the function's author has no other way to find the line that raised.
    logging.getLogger("backplane").error("the %s %s raised %s", role, name, fact, exc_info=error)
    return fact


async def ask_command(
    argv: Sequence[str], question: object, environ: Mapping[str, str], redactor: Redactor
) -> Decision:
    """Start a program with a question as JSON on its stdin, and read the decision that it prints. Raises HookFailed."""
    # Not in the workspace: the program must not load files that the agent wrote.
    command = StartCommand(argv=tuple(argv), env=child_environment({}, {}, environ), cwd="/")
    answer = bytearray()
    try:
        async with open_child(command) as child:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(feed, child, _as_lines([question]))
                while len(answer) <= ANSWER_BYTES_MAX and (data := await piece(child)) != b"":
                    answer += data or b""
                if len(answer) <= ANSWER_BYTES_MAX:
                    await child.wait(math.inf)  # The caller limits the time of the whole call.
                tasks.cancel_scope.cancel()
            await child.stop(grace_s=0.0)
    except BackendError as error:
        raise HookFailed(error.message) from error
    if len(answer) > ANSWER_BYTES_MAX:
        raise HookFailed(f"it answers more than {ANSWER_BYTES_MAX} bytes")
    return _read(child, bytes(answer), redactor)


def _read(child: Child, said: bytes, redactor: Redactor) -> Decision:
    assert child.exit is not None
    words = redactor.data(child.stderr_tail)[0].decode("utf-8", "replace").strip()[-REASON_CHARS_MAX:]
    if child.exit.code == DENIED:
        return Decision(decision="deny", reason=words)
    if child.exit.code != 0:
        raise HookFailed(f"{child.exit.describe()}{': ' + words if words else ''}")
    if not said.strip():
        return Decision(decision="allow")
    try:
        value = strict(said)
        if (twice := duplicate_key(said, value)) is not None:
            raise ValueError(f"the key {redactor.text(twice)[0][:40]!r} stands twice in one object")
        answer = msgspec.convert(value, Decision)
    except ValueError as error:
        why = redactor.text(str(error))[0][:REASON_CHARS_MAX]
        raise HookFailed(f"its answer is not the JSON of a decision: {why}") from error
    reason = redactor.text(answer.reason)[0][:REASON_CHARS_MAX]
    return msgspec.structs.replace(answer, reason=reason)
