"""Judges a host's claims about a run by what the control plane saw: the diff and the files. Its functions block."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, cast

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, ToolCall
from backplane.contract.receipt import NAMES_MAX, Receipt
from backplane.policy.rules import MALFORMED
from backplane.receipts.claimed_texts import Likeness, likeness, written
from backplane.receipts.claims import Files, Judge, Seen
from backplane.receipts.enforcement import violations
from backplane.receipts.state import RunState
from backplane.receipts.trace import Trace
from backplane.workspace import Patch, Workspace
from backplane.workspace.tree import opened, read_all

FILES_BYTES_MAX: Final = 16 << 20
"""Total size limit of the files read for the claims of one run; an agent's call usually writes kilobytes."""


_decode: Final = cast("Callable[[bytes], AgentEvent]", msgspec.json.Decoder(AgentEvent).decode)


def judged(
    facts: RunState,
    trace: Trace,
    workspace: Workspace,
    patch: Patch | None,
    diff: str | None,
    *,
    own_trace: Literal["same", "part", "other"] | None,
    inner: bool | None,
) -> dict[str, Json]:
    """Judge the claims of one run, as `docs/guide/claims.md` describes.

    Args:
        trace: the run's events, read again only if a file differs from the text that a call wrote.
        diff: the patch as it is in the receipt.

    Raises:
        StoreError: `receipt_store_failed`, the trace cannot be read.
    """
    seen = _seen(facts, patch, diff, own_trace, inner)
    judge = facts.judge()
    here = not seen.far and patch is not None
    judge.end(seen, _look(judge, seen, facts.claim, trace, Path(workspace.root)) if here else Files(), facts.claim)
    return judge.to_wire()


def _look(judge: Judge, seen: Seen, claim: Receipt | None, trace: Trace, root: Path) -> Files:
    """Hash the files that the claims are about, and compare them with what the calls wrote."""
    sha256 = _hashes(root, judge.wanted(claim))
    differing = judge.differing(sha256)
    likeness = _compare_texts(root, differing, trace) if differing else {}
    top = os.path.realpath(root)
    links = {
        path: os.path.relpath(os.path.realpath(os.path.join(top, path)), top) for path in judge.unseen(seen.changed)
    }
    return Files(sha256=sha256, likeness=likeness, real=links)


def _compare_texts(root: Path, differing: dict[int, str], trace: Trace) -> dict[int, Likeness]:
    """Compare files with the texts that calls wrote, which only the trace has."""
    found: dict[int, Likeness] = {}
    last = max(differing)
    for number, line in enumerate(trace.lines()):
        if number in differing:
            event = _decode(line)
            write = written(event.tool_name, event.input) if isinstance(event, ToolCall) else None
            with suppress(OSError):
                if write is not None and write.content is not None:
                    data = _read(os.path.join(os.path.realpath(root), differing[number]), FILES_BYTES_MAX)
                    found[number] = likeness(write.content, data)
        if number == last:
            break
    return found


def _seen(
    facts: RunState,
    patch: Patch | None,
    diff: str | None,
    own_trace: Literal["same", "part", "other"] | None,
    inner: bool | None,
) -> Seen:
    changed = patch.paths | set(patch.left_out) if patch is not None else None
    return Seen(
        run_id=facts.run_id,
        order_id=facts.order.id,
        backend_id=facts.backend.id,
        backend_version=facts.backend.backend_version,
        capabilities={**facts.manifest.unknown, **facts.manifest.to_wire()},
        mode=facts.mode,
        violations=sum(row["rule"] != MALFORMED.name for row in violations(facts)),
        changed=changed if changed is not None and len(changed) <= NAMES_MAX else None,
        hidden=patch is not None and bool(patch.ignored_count),
        git_diff=diff,
        far=facts.root == "/",
        plane=facts.plane,
        inner_verified=inner,
        own_trace=own_trace,
        usage=facts.usage_seen,
        asked_passthrough=facts.settings.get("mode") == "passthrough",
        denied=facts.calls.denied,
        modified=facts.calls.modified > 0,
        resumed=bool(facts.settings.get("session")),
    )


def _hashes(root: Path, paths: list[str]) -> dict[str, str | None]:
    """Hash the files at these paths of the workspace, except links and files that are too large."""
    found: dict[str, str | None] = {}
    left, top = FILES_BYTES_MAX, os.path.realpath(root)
    for path in paths:
        whole = os.path.join(top, path)
        if not (os.path.realpath(os.path.dirname(whole)) + os.sep).startswith(top + os.sep):
            continue
        try:
            data = _read(whole, left)
        except FileNotFoundError:
            found[path] = None
        except IsADirectoryError:
            found[path] = ""
        except OSError:
            continue
        else:
            found[path] = hashlib.sha256(data).hexdigest()
            left -= len(data)
    return found


def _read(path: str, bytes_max: int) -> bytes:
    """Return the content of a file. Raises OSError: it is no regular file, or larger than `bytes_max`."""
    with opened(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as handle:
        facts = os.fstat(handle)
        if stat.S_ISDIR(facts.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > bytes_max:
            raise OSError(errno.EFBIG, "no regular file, or too large")
        return read_all(handle, facts.st_size)
