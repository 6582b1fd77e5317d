"""What was seen of a run, gathered at its end for the judge of claims: trace, difference, files. Blocks."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import NAMES_MAX
from backplane.receipts.build import OWN_LINES_MAX, RunState, workspace_path
from backplane.receipts.claims import Judge, Seen
from backplane.receipts.trace import Trace
from backplane.workspace import Patch, Workspace

FILES_BYTES_MAX: Final = 16 << 20
"""Of files that are read to hold a claim against them; what an agent writes by one call is kilobytes."""

_DELTA: Final = b'"type":"assistant_delta"}'
_TIME: Final = b'"ts":"'

_decode: Final = msgspec.json.Decoder(AgentEvent).decode


def judged(
    facts: RunState,
    trace: Trace,
    workspace: Workspace,
    patch: Patch | None,
    texts: tuple[str | None, str | None],
    duration_s: float,
    *,
    own_trace: bool | None,
    inner: bool | None,
) -> dict[str, Json]:
    """Judge the claims of one run, as `contracts/claims.md` says.

    Args:
        texts: diff and status, as the receipt has them.

    Raises:
        StoreError: `receipt_store_failed`, the trace cannot be read.
    """
    seen = _seen(facts, patch, texts, duration_s, own_trace, inner)
    judge = Judge(seen, lambda path: workspace_path(path, facts.root))
    _take_events(judge, trace, facts)
    root = None if seen.far or patch is None else Path(workspace.root)
    judge.files(_files(root, judge.wanted(facts.claim)) if root is not None else {})
    if facts.claim is not None:
        judge.final(facts.claim)
    return judge.to_wire()


def _seen(
    facts: RunState,
    patch: Patch | None,
    texts: tuple[str | None, str | None],
    duration_s: float,
    own_trace: bool | None,
    inner: bool | None,
) -> Seen:
    changed = patch.paths if patch is not None else None
    return Seen(
        run_id=facts.run_id,
        order_id=facts.order.id,
        started_s=facts.started_ns // 1_000_000_000,
        finished_s=time.time_ns() // 1_000_000_000,
        duration_ms=int(duration_s * 1000),
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


def _take_events(judge: Judge, trace: Trace, facts: RunState) -> None:
    """Every event by its time; those that claim more are decoded."""
    own, told_apart = set(facts.own_lines), len(facts.own_lines) < OWN_LINES_MAX
    in_time: dict[bytes, bool] = {}
    count = 0
    for number, line in enumerate(trace.lines()):
        ours = number in own
        if not ours:
            start = line.rfind(_TIME) + len(_TIME)
            text = line[start : start + 19]  # To the second; the print form has no other zone than Z.
            if text not in in_time:
                in_time = {text: judge.is_in_time(_second(text))}  # Most are of one second, one after the other.
            if in_time[text]:
                count += 1
            else:
                judge.take_time(number, _second(text))
        claims = b'"modify"' in line if ours else not line.endswith(_DELTA) or b'"ext"' in line
        if claims:
            judge.take(number, _decode(line), ours=ours or not told_apart)
        line = b""  # A long one is not kept beside the next.
    judge.take_times(count)


def _second(text: bytes) -> int | None:
    try:
        return int(datetime.fromisoformat(text.decode() + "+00:00").timestamp())
    except (ValueError, OverflowError):
        return None


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
