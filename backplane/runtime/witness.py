"""Gathers what the control plane saw of a run, for the judge of its claims: difference and files. Blocks."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import Final

from backplane.contract.canonical import Json
from backplane.contract.receipt import NAMES_MAX
from backplane.receipts.build import RunState, workspace_path
from backplane.receipts.claims import Judge, Seen
from backplane.workspace import Patch, Workspace

FILES_BYTES_MAX: Final = 16 << 20
"""Of files that are read to hold a claim against them; what an agent writes by one call is kilobytes."""


def judged(
    facts: RunState,
    workspace: Workspace,
    patch: Patch | None,
    texts: tuple[str | None, str | None],
    *,
    own_trace: bool | None,
    inner: bool | None,
) -> dict[str, Json]:
    """Judge the claims of one run, as `contracts/claims.md` says.

    Args:
        texts: diff and status, as the receipt has them.
    """
    seen = _seen(facts, patch, texts, own_trace, inner)
    judge = facts.claims or Judge(lambda path: workspace_path(path, facts.root))
    root = None if seen.far or patch is None else Path(workspace.root)
    judge.end(seen, _files(root, judge.wanted(facts.claim)) if root is not None else {}, facts.claim)
    return judge.to_wire()


def _seen(
    facts: RunState,
    patch: Patch | None,
    texts: tuple[str | None, str | None],
    own_trace: bool | None,
    inner: bool | None,
) -> Seen:
    changed = patch.paths if patch is not None else None
    return Seen(
        run_id=facts.run_id,
        order_id=facts.order.id,
        backend_id=facts.backend.id,
        backend_version=facts.backend.backend_version,
        capabilities={**facts.manifest.unknown, **facts.manifest.to_wire()},
        mode=facts.mode,
        violations=len(facts.violations()),
        changed=changed if changed is not None and len(changed) <= NAMES_MAX else None,
        hidden=patch is not None and bool(patch.ignored_count or patch.left_out),
        git_diff=texts[0],
        git_status=texts[1],
        redacted=bool(facts.counts["redacted"]),
        far=facts.root == "/",
        plane=facts.plane,
        inner_verified=inner,
        own_trace=own_trace,
        usage=facts.usage_seen,
    )


def _files(root: Path, paths: list[str]) -> dict[str, str | None]:
    """What is at these paths of the workspace: no link is followed out of it, and what is too long is not there."""
    found: dict[str, str | None] = {}
    left, top = FILES_BYTES_MAX, os.path.realpath(root)
    for path in paths:
        whole = os.path.join(top, path)
        if not (os.path.realpath(os.path.dirname(whole)) + os.sep).startswith(top + os.sep):
            continue
        try:
            size = os.lstat(whole).st_size
            data = _read(whole, left) if size <= left else None
        except FileNotFoundError:
            found[path] = None
        except OSError:
            continue
        else:
            if data is not None:
                found[path] = hashlib.sha256(data).hexdigest() if data != _FOLDER else ""
                left -= size
    return found


_FOLDER: Final = b"\0folder"


def _read(path: str, bytes_max: int) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        return _FOLDER if stat.S_ISDIR(mode) else None
    with open(fd, "rb") as file:
        data = file.read(bytes_max + 1)
        return data if len(data) <= bytes_max else None
