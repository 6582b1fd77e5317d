"""Plain ends of the line for tests: a control plane over pipes or a child, and orders as they go over the wire."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec

from backplane import host as sidecar
from backplane.contract.work import WorkOrder
from backplane.host.link import serve as serve_host

WAIT_S = 5.0
"""The bound of every wait for a message here."""

PLAIN: tuple[str, ...] = ()
OURS = ("cancel/1", "ping/1", "ask/1")
ROOT = Path(__file__).parent.parent
PYTHON = (sys.executable, "-E", "-s")


def order(task: str = "say hi", **members: Any) -> dict[str, Any]:
    """A work order as it goes to a host: whole."""
    value: dict[str, Any] = json.loads(msgspec.json.encode(WorkOrder(task)))
    for name, member in members.items():
        value[name] = {**value[name], **member} if isinstance(member, dict) else member
    return value


def run(run_id: str = "r1", task: str = "say hi", extensions: Sequence[str] = OURS, **members: Any) -> dict[str, Any]:
    return {"t": "run", "id": run_id, "work_order": order(task, **members), "extensions": list(extensions)}


class Talk:
    """A control plane's end of two descriptors on an event loop."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self._held = b""

    def send(self, *messages: dict[str, Any] | bytes) -> None:
        for message in messages:
            data = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"
            assert os.write(self.stdin, data) == len(data)

    async def read(self) -> Any:
        """The next message; None at the end."""
        with anyio.fail_after(WAIT_S):
            while b"\n" not in self._held:
                await anyio.wait_readable(self.stdout)
                data = os.read(self.stdout, 65536)
                if not data:
                    assert self._held == b"", self._held
                    return None
                self._held += data
        line, _, self._held = self._held.partition(b"\n")
        return json.loads(line)

    async def until(self, t: str) -> list[Any]:
        """Messages up to the next one of this kind, which is the last."""
        found = [await self.read()]
        while found[-1] is not None and found[-1]["t"] != t:
            found.append(await self.read())
        assert found[-1] is not None, found
        return found

    def close_stdin(self) -> None:
        if self.stdin >= 0:
            os.close(self.stdin)
        self.stdin = -1

    def close_stdout(self) -> None:
        if self.stdout >= 0:
            os.close(self.stdout)
        self.stdout = -1


@asynccontextmanager
async def talk(host: sidecar.Host, work: sidecar.Work, *, greeted: bool = True) -> AsyncIterator[Talk]:
    """A host in memory with its end of the line; on leaving, stdin ends and the host must end by itself."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    os.set_blocking(theirs_out, False)
    line = Talk(ours_out, ours_in)
    try:
        async with anyio.create_task_group() as tasks:

            async def serve() -> None:
                try:
                    await serve_host(host, work, theirs_in, theirs_out)
                finally:
                    os.close(theirs_in)
                    os.close(theirs_out)

            tasks.start_soon(serve)
            if greeted:
                assert (await line.read())["t"] == "hello"
            yield line
            line.close_stdin()
            tasks.cancel_scope.deadline = anyio.current_time() + WAIT_S
        assert not tasks.cancel_scope.cancelled_caught, "the host did not end after the end of its stdin"
    finally:
        line.close_stdin()
        line.close_stdout()


class Child:
    """A plain control plane over a real child: announces nothing by itself and reads with a bound."""

    def __init__(self, argv: Sequence[str | Path], *, cwd: Path | None = None, **options: Any) -> None:
        self.process = subprocess.Popen(
            [str(word) for word in argv],
            stdin=options.pop("stdin", subprocess.PIPE),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            start_new_session=True,
            **options,
        )
        self.lines: list[bytes] = []
        """Every line it wrote, as it came."""
        self._held = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue

    def send(self, *messages: dict[str, Any] | bytes) -> None:
        assert self.process.stdin is not None
        for message in messages:
            data = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def read(self, wait_s: float = WAIT_S) -> Any:
        """The next message; None at the end of its output."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + wait_s
        while b"\n" not in self._held:
            left_s = deadline - time.monotonic()
            ready, _, _ = select.select([self.process.stdout], [], [], max(left_s, 0))
            if not ready:
                raise TimeoutError(f"nothing for {wait_s} s after {self.lines[-1:]}")
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                assert self._held == b"", self._held
                return None
            self._held += data
        line, _, self._held = self._held.partition(b"\n")
        self.lines.append(line)
        return json.loads(line)

    def until(self, *kinds: str, wait_s: float = WAIT_S) -> list[Any]:
        """Messages up to the next of these kinds, which is the last."""
        found = [self.read(wait_s)]
        while found[-1] is not None and found[-1]["t"] not in kinds:
            found.append(self.read(wait_s))
        assert found[-1] is not None, (found, self.stderr())
        return found

    def wait(self, wait_s: float = WAIT_S) -> int:
        return self.process.wait(wait_s)

    def stderr(self) -> str:
        """What it said on standard error; only after its end."""
        assert self.process.stderr is not None
        data: bytes = self.process.stderr.read()
        return data.decode()


def is_gone(pid: int, wait_s: float = WAIT_S) -> bool:
    """Whether a process that is nobody's child here ends in time."""
    deadline = time.monotonic() + wait_s
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        os.sched_yield()
    return not Path(f"/proc/{pid}").exists()
