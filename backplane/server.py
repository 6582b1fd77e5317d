"""The backplane as a host: the same protocol on its own stdin and stdout, one floor up.

Each `run` that comes in is a run of this control plane; its events and its sealed receipt go
out in the bytes they were stored in. So a client in any language is anything that can host a
sidecar, and a backplane can be another backplane's host.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from backplane import backends, relay, sidecar
from backplane.asks import Decision
from backplane.backends import Backend
from backplane.config import Settings
from backplane.contract.capability import Level, Manifest, read_manifest
from backplane.contract.events import AskRaised
from backplane.contract.work import WorkOrder
from backplane.errors import BackendError
from backplane.negotiate import negotiate
from backplane.receipts.manifests import kept_manifest
from backplane.runtime import ControlPlane, Run

EXTENSIONS: Final = (*sidecar.EXTENSIONS, "many/1", "stage/1")

LADDER_S: Final = 0.5
"""What the stop ladder of a host below takes beside its grace."""

_RANK: Final = ("native", "emulated", "restricted", "unsupported")


def host(settings: Settings, home: Path, environ: Mapping[str, str]) -> sidecar.Host:
    """Who this control plane is to those above: the union of what its backends were last seen to have."""
    entries: list[dict[str, Any]] = []
    union: dict[str, Level] = {}
    for status in backends.known(settings, environ):
        manifest = _manifest(status.id, settings, home, environ) if status.ready else Manifest()
        entries.append({"id": status.id, "ready": status.ready, "capabilities": manifest.to_wire()})
        for name, level in manifest.levels.items():
            if name not in union or _RANK.index(level.name) < _RANK.index(union[name].name):
                union[name] = level
    return sidecar.Host(id="backplane", capabilities=union, extensions=EXTENSIONS, backends=tuple(entries))


def _manifest(name: str, settings: Settings, home: Path, environ: Mapping[str, str]) -> Manifest:
    kept = kept_manifest(home, backends.find(name, settings, environ).key)
    return read_manifest(kept) if kept is not None else Manifest()


def main(settings: Settings, home: Path, environ: Mapping[str, str]) -> None:
    """Serve on this process's stdin and stdout until the end of stdin and of the last run."""
    plane = ControlPlane(settings, home, environ)

    async def work(run: sidecar.HostRun) -> sidecar.Told:
        return await _run_below(plane, run)

    try:
        sidecar.main(host(settings, home, environ), work)
    finally:
        plane.keeper.close()


async def _run_below(plane: ControlPlane, above: sidecar.HostRun) -> sidecar.Told:
    """One run of this control plane for whoever asked for it."""
    order = above.order if "stage/1" in above.extensions else _in_place(above.order)
    backend = choose(order, plane.settings, plane.home, plane.environ)

    async def on_ask(event: AskRaised) -> Decision:
        verdict = await above.pass_on(event.body)
        if verdict is None:
            return Decision(decision="deny", reason="nobody above can be asked")
        return Decision(decision=verdict.decision, reason=verdict.reason, input=verdict.input, text=verdict.text)

    ended: Run
    async with plane.start(order, backend, on_ask=on_ask) as ended:
        try:
            async for batch in ended.batches():
                await above.write_raw(relay.events(above.id, batch.records))
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await ended.cancel(above.cancelled_because or "cancelled", grace_s=max(above.grace_s - LADDER_S, 0.1))
                async for batch in ended.batches():
                    await above.write_raw(relay.events(above.id, batch.records))
    return sidecar.Told(relay.ending(ended, ref_id=above.id, line_bytes_max=plane.settings.limits.line_bytes_max))


def _in_place(order: WorkOrder) -> WorkOrder:
    """Whoever did not ask us to stage has staged already: the root is the place to work in."""
    workspace = msgspec.structs.replace(order.workspace, mode="pass_through")
    return msgspec.structs.replace(order, workspace=workspace)


def choose(order: WorkOrder, settings: Settings, home: Path, environ: Mapping[str, str]) -> Backend:
    """The backend an order names, else the default, else the first ready one that is known to fit.

    Raises:
        BackendError: `backend_not_found`, `backend_unavailable`.
    """
    named = order.abp("backend", settings.default_backend)
    if isinstance(named, str):
        return backends.find(named, settings, environ)
    ready = [status.id for status in backends.known(settings, environ) if status.ready]
    for name in ready:
        fits = negotiate(order.requirements, _manifest(name, settings, home, environ)).satisfied
        if fits and name not in backends.NEVER_CHOSEN:
            return backends.find(name, settings, environ)
    raise BackendError(
        "backend_not_found",
        "the order names no backend and none is known to fit",
        hint=f"set config.vendor.abp.backend; ready here: {', '.join(ready) or 'none'}",
    )
