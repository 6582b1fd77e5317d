"""Prepares an order for a control plane on another machine, which has the workspace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from backplane.contract import envelope as wire
from backplane.contract.work import WorkOrder, settings_of
from backplane.errors import BackendError
from backplane.workspace import archive

STAGE: Final = "stage/1"
"""Extension of a host that itself stages the workspace and applies the lane."""


@asynccontextmanager
async def incoming(home: Path) -> AsyncIterator[Path]:
    """Make a temporary folder in the state folder, and remove it after the block."""
    opened = archive.incoming(home)
    folder = await anyio.to_thread.run_sync(opened.__enter__)
    try:
        yield folder
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(opened.__exit__, None, None, None)


class Remote:
    """Turns the order of a run into the one for another machine.

    Args:
        near: the backend's name on this machine, which the other machine does not know.
        isolation: the least isolation, which is sent with the order.
    """

    extensions = (STAGE,)

    def __init__(self, order: WorkOrder, near: str, isolation: str) -> None:
        self._order, self._near, self._isolation = order, near, isolation

    def check(self, hello: wire.Hello) -> None:
        """Refuse a host that cannot stage the workspace. Raises BackendError: `backend_unavailable`."""
        if STAGE not in hello.extensions:
            fact = f"{self._near!r} is marked remote, and its host does not speak {STAGE}"
            fix = "its command must end in `backplane serve`; else take `remote` off"
            raise BackendError("backend_unavailable", fact, hint=fix)

    def order(self) -> WorkOrder:
        """Return the order to send: with the other machine's folder, and without settings for this machine."""
        settings = settings_of(self._order.config.vendor)
        root = str(settings.pop("remote_root"))
        if settings.get("backend") == self._near:
            del settings["backend"]
        settings["isolation"] = self._isolation
        spec = msgspec.structs.replace(self._order.workspace, root=root)
        vendor = {name: value for name, value in self._order.config.vendor.items() if name.partition(".")[0] != "abp"}
        config = msgspec.structs.replace(self._order.config, vendor={**vendor, "abp": settings})
        return msgspec.structs.replace(self._order, workspace=spec, config=config)
