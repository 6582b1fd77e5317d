"""Runs backplane as a host: it speaks the protocol on its own stdin and stdout.

Each `run` message starts a run on this control plane. The run's events and sealed receipt are sent as the bytes that
are stored. A client in any language, or another backplane, can use it like any other host.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec

from backplane import host as sidecar
from backplane.config import Settings
from backplane.contract.approval import Decision
from backplane.contract.canonical import Json, uuid_text
from backplane.contract.capability import Level, Manifest, read_manifest
from backplane.contract.events import Approval
from backplane.contract.work import OF_HOST, WorkOrder
from backplane.errors import BackendError, BackplaneError, unforeseen
from backplane.receipts.manifests import kept_manifest
from backplane.routing.driver import backend_for
from backplane.runtime import backends, readiness
from backplane.runtime.approvals import OnAsk
from backplane.runtime.backends import Backend
from backplane.runtime.place import incoming
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from backplane.serve import messages
from backplane.workspace import archive

EXTENSIONS: Final = (*sidecar.EXTENSIONS, "many/1", "stage/1", "subagent/1")

LADDER_S: Final = 0.9
"""Seconds that the end of an inner run needs besides its host's grace period: for stop, diff and seal."""

ORDERS_BYTES_MAX: Final = 512 * 1024 * 1024
"""Maximum size of all open orders together, which is thousands of usual ones; a further order is refused."""

FRAME_BYTES: Final = 1024
"""Bytes of a line that are reserved for the run's id, which the client chooses."""

PIPE_BYTES: Final = 1024 * 1024
"""Size of the stdout pipe, if the system allows it, so that many runs on one pipe wait less often for the reader.
Linux allows every user at most this size."""

_RANK: Final = ("native", "emulated", "restricted", "unsupported")


def host(settings: Settings, home: Path, environ: Mapping[str, str]) -> sidecar.Host:
    """Describe this control plane as a host, with the union of the capabilities that its backends last announced."""
    entries: list[dict[str, Any]] = []
    union: dict[str, Level] = {}
    for status in readiness.known(settings, environ):
        manifest = _manifest(status.id, settings, home, environ) if status.ready else Manifest()
        entries.append({"id": status.id, "ready": status.ready, "capabilities": manifest.to_wire()})
        for name, level in manifest.levels.items():
            if name not in union or _RANK.index(level.name) < _RANK.index(union[name].name):
                union[name] = level
    return sidecar.Host(
        id="backplane", capabilities=union, extensions=EXTENSIONS, backends=tuple(entries), heeds=tuple(OF_HOST)
    )


def _manifest(name: str, settings: Settings, home: Path, environ: Mapping[str, str]) -> Manifest:
    kept = kept_manifest(home, backends.find(name, settings, environ).key)
    return read_manifest(kept) if kept is not None else Manifest()


def main(
    settings: Settings,
    home: Path,
    environ: Mapping[str, str],
    make: Callable[[ControlPlane, int], Server] | None = None,
) -> tuple[int | None, tuple[str, ...]]:
    """Serve on this process's stdin and stdout until stdin and the last run have ended, or until a signal.

    Args:
        make: makes the server; None runs the orders in this process.

    Returns:
        The number of the signal (None without one), and the state folder's problems: a line for each leftover of a run
        that could not be sealed or removed.

    Raises:
        BrokenPipeError: the reader of stdout closed it before the hello.
    """
    line_bytes_max = settings.limits.line_bytes_max
    below = msgspec.structs.replace(settings.limits, line_bytes_max=max(line_bytes_max - FRAME_BYTES, 1))
    archive.sweep(home)
    _widen(1)
    plane = ControlPlane(msgspec.structs.replace(settings, limits=below), home, environ)
    plane.keep_warm()
    server = (make or Server)(plane, line_bytes_max)
    try:
        number = sidecar.speak(server.host(), server.work, line_bytes_max=line_bytes_max)
    finally:
        server.close()
    return number, tuple(server.plane.state_folder.problems)


def _widen(stdout: int) -> None:
    with suppress(OSError, AttributeError):  # Stdout is no pipe, or the system has no such call.
        fcntl.fcntl(stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


class Server:
    """Runs the orders of one client on this process's control plane."""

    def __init__(self, plane: ControlPlane, line_bytes_max: int) -> None:
        self.plane = plane
        self._line_bytes_max = line_bytes_max
        self._orders_bytes = 0

    def host(self) -> sidecar.Host:
        """Describe this server as a host."""
        return host(self.plane.settings, self.plane.home, self.plane.environ)

    def close(self) -> None:
        """Close the state folder, after the last run."""
        self.plane.state_folder.close()

    async def work(self, above: sidecar.HostRun) -> sidecar.Written:
        """Run one order; return the message that ends the run."""
        order_bytes = len(msgspec.json.encode(above.order))
        if self._orders_bytes + order_bytes > ORDERS_BYTES_MAX:
            raise BackendError(
                "rate_limit_exceeded",
                f"the open orders are over {ORDERS_BYTES_MAX} bytes together",
                hint="wait for the end of some runs, or name files in place of long texts",
            )
        self._orders_bytes += order_bytes
        try:
            ended = await self._run_below(above)
        except Exception as error:  # A BackplaneError reaches the client without a traceback on stderr.
            raise unforeseen(error) from error
        finally:
            self._orders_bytes -= order_bytes
        return sidecar.Written(self._ending(above, ended))

    def _ending(self, above: sidecar.HostRun, ended: messages.EndedRun) -> Iterator[bytes]:
        return messages.ending(ended, ref_id=above.id, line_bytes_max=self._line_bytes_max)

    async def _choose(self, order: WorkOrder) -> tuple[WorkOrder, Backend, Json]:
        return await backend_for(order, self.plane)

    async def _run_below(self, above: sidecar.HostRun) -> messages.EndedRun:
        stages = "stage/1" in above.extensions
        order = above.order if stages else _in_place(above.order)
        order, backend, route = await self._choose(order)
        if stages or above.names_root:
            return await self._run_here(above, order, backend, route)
        async with incoming(self.plane.home) as folder:
            empty = folder / "empty"  # An order without a root must not work in our current folder.
            empty.mkdir()
            workspace = msgspec.structs.replace(order.workspace, root=str(empty))
            order = msgspec.structs.replace(order, workspace=workspace)
            return await self._run_here(above, order, backend, route)

    async def _run_here(
        self, above: sidecar.HostRun, order: WorkOrder, backend: Backend, route: Json
    ) -> messages.EndedRun:
        run_id = as_uuid(above.id)
        run: Run | None = None
        try:
            async with self.plane.start(order, backend, on_ask=_asking(above), run_id=run_id, route=route) as run:
                # From here on a cancel goes through `run.cancel`, so that the remaining events are forwarded.
                with anyio.CancelScope(shield=True):
                    try:
                        await self._forward(above, run)
                    except BackplaneError:  # The client has stopped reading.
                        raise
                    except Exception as error:
                        run.fail(error)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                if run is None:
                    why = above.cancelled_because or "cancelled"
                    run = await self.plane.end_unstarted(order, backend, why, run_id=run_id)
        assert run is not None
        return run

    async def _forward(self, above: sidecar.HostRun, run: Run) -> None:
        """Forward a run's events, as the bytes that are stored, until the run has ended."""

        async def cancel() -> None:
            grace_s = max(above.grace_s - LADDER_S, 0.1)
            await run.cancel(above.cancelled_because or "cancelled", grace_s=grace_s)

        above.on_cancel = cancel
        if above.cancelled_because is not None:
            await cancel()
        async for batch in run.batches():
            await above.write_raw(messages.events(above.id, batch.records, line_bytes_max=self._line_bytes_max))


def _asking(above: sidecar.HostRun) -> OnAsk | None:
    """Return a function that asks the client what the policy does not decide; None if the client takes no asks."""
    if "ask/1" not in above.extensions:
        return None

    async def on_ask(event: Approval) -> Decision:
        verdict = await above.pass_on(event.body)
        if verdict is not None:
            return verdict
        default: Any = event.body.get("default", "deny") if event.body.get("kind") != "tool" else "deny"
        return Decision(decision=default, reason="the client can no longer be asked")

    return on_ask


def as_uuid(text: str) -> str | None:
    try:
        return uuid_text(text)
    except ValueError:
        return None


def _in_place(order: WorkOrder) -> WorkOrder:
    """Change an order to work directly in its whole root: a client without `stage/1` has already staged the files."""
    workspace = msgspec.structs.replace(order.workspace, mode="pass_through", include=(), exclude=())
    return msgspec.structs.replace(order, workspace=workspace)
