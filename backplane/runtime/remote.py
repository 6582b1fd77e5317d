"""The near side of a run on another machine: what is sent there, and how its patch comes back.

The workspace travels as the copy that was made here, and the patch that comes back is put into
that copy: from there on it is a staged run like any other. With `remote_root` nothing travels.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import msgspec

from backplane.config import Limits
from backplane.contract import canonical
from backplane.contract import envelope as wire
from backplane.contract.canonical import Json
from backplane.contract.receipt import Receipt
from backplane.contract.work import WorkOrder, settings_of
from backplane.errors import BackendError, WorkspaceError
from backplane.workspace import archive

if TYPE_CHECKING:
    from backplane.workspace import Quota, Workspace

PATCH_NAME: Final = "remote.diff"
"""What came back, in the run's own folder."""

_RESULT: Final = "execution_workspace_error"


@asynccontextmanager
async def incoming(home: Path) -> AsyncIterator[Path]:
    """A folder for what travels; making and removing it may take a while, and others run meanwhile."""
    opened = archive.incoming(home)
    folder = await anyio.to_thread.run_sync(opened.__enter__)
    try:
        yield folder
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(opened.__exit__, None, None, None)


class Remote:
    """One run's way there and back.

    Args:
        near: the backend's name here, which says nothing there.
        isolation: the least that is asked for here; it is asked for there.
    """

    def __init__(self, run_id: str, order: WorkOrder, near: str, limits: Limits, isolation: str) -> None:
        self._run_id = run_id
        self._order = order
        self._near = near
        self._limits = limits
        self._isolation = isolation
        named = order.abp("remote_root")
        self.root = named if isinstance(named, str) else None
        """The folder there to work in; None when the workspace travels."""
        self.extensions = ("stage/1",) if self.root is not None else ("stage/1", "tree/1")
        self._arriving: archive.Arriving | None = None
        self._left_bytes = limits.workspace_bytes_max

    def check(self, hello: wire.Hello) -> None:
        """Whether the far side can do this at all.

        Raises:
            BackendError: `backend_unavailable`.
        """
        missing = [name for name in self.extensions if name not in hello.extensions]
        if missing:
            raise BackendError(
                "backend_unavailable",
                f"{self._near!r} is marked remote, and its host does not speak {' and '.join(missing)}",
                hint="its command must end in `backplane serve`; else take `remote` off",
            )

    def order(self) -> WorkOrder:
        """The order as it is sent: nothing in it that means something here only."""
        spec = self._order.workspace
        if self.root is not None:
            sent = msgspec.structs.replace(self._order, workspace=msgspec.structs.replace(spec, root=self.root))
        else:
            # What was selected is all that travels; the lane has its effect here.
            spec = msgspec.structs.replace(spec, root=".", mode="staged", include=(), exclude=())
            sent = msgspec.structs.replace(self._order, workspace=spec, lane="patch_first")
        vendor = {name: value for name, value in sent.config.vendor.items() if name.partition(".")[0] != "abp"}
        config = msgspec.structs.replace(sent.config, vendor={**vendor, "abp": self._settings()})
        return msgspec.structs.replace(sent, config=config)

    def _settings(self) -> dict[str, Json]:
        settings = settings_of(self._order.config.vendor)
        settings.pop("remote_root", None)
        if settings.get("backend") == self._near:
            del settings["backend"]
        return {**settings, "isolation": self._isolation}

    def chunks(self, folder: Path, quota: Quota, stopped: Callable[[], bool]) -> Iterator[wire.TreeChunk]:
        """The workspace in messages. Blocks; raises WorkspaceError `workspace_staging_failed`."""
        for chunk in archive.chunks(archive.pack(folder, quota, stopped), self._limits.line_bytes_max):
            yield wire.TreeChunk(ref_id=self._run_id, seq=chunk.seq, data=chunk.data, end=chunk.end)

    def expect(self, folder: Path) -> None:
        """Where a patch that does not fit the receipt is kept."""
        self._arriving = archive.Arriving(folder / PATCH_NAME, self._count)

    def _count(self, size: int) -> None:
        self._left_bytes -= size
        if self._left_bytes < 0:
            fact = f"the patch that comes back is over {self._limits.workspace_bytes_max} bytes (workspace_bytes_max)"
            raise WorkspaceError(_RESULT, fact)

    def take(self, patch: wire.PatchChunk) -> None:
        """Keep one chunk of the patch. Raises as `parcel.Arriving.take`, and over the quota."""
        assert self._arriving is not None, "chunks come after the order was sent"
        self._arriving.take(patch)

    def bring_back(self, claim: Receipt | None, workspace: Workspace, folder: Path) -> None:
        """Put the far side's patch into the copy it was made from. Blocks.

        Raises:
            WorkspaceError: `execution_workspace_error`, it is not the patch that the receipt names, or does not fit.
        """
        named = _named(claim)
        if claim is None or named is None:
            return
        path = folder / PATCH_NAME
        try:
            if claim.verification.git_diff is not None:
                path.write_bytes(claim.verification.git_diff.encode())
            size, digest = (path.stat().st_size, _sha256(path)) if path.exists() else (0, canonical.sha256_hex(b""))
            if (size, digest) != named:
                raise WorkspaceError(_RESULT, "the patch that came back is not the one that the receipt there names")
            if size:
                workspace.take_patch(path)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "unknown error")
            raise WorkspaceError(_RESULT, f"the patch that came back cannot be kept: {name}") from error
        finally:
            path.unlink(missing_ok=True)


def _named(claim: Receipt | None) -> tuple[int, str] | None:
    """Size and hash of the patch by the far side's receipt; None when it made none."""
    patch = claim.backplane.get("patch") if claim is not None else None
    if not isinstance(patch, dict) or not isinstance(patch.get("bytes"), int):
        return None
    return patch["bytes"], str(patch.get("sha256"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
