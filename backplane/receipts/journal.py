"""Writes the journal of one run while it happens, and reads its head.

A folder `runs/RUN_ID` has `head.jsonl` (facts of the control plane) and `trace.jsonl` (the canonical bytes of each
event, one a line), so that a run survives `kill -9`; at its end the store adds the receipt. A live writer locks
`head.jsonl`.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.work import PolicyProfile, WorkOrder
from backplane.errors import StoreError
from backplane.receipts.trace import Trace, open_plain

HEAD: Final = "head.jsonl"
TRACE: Final = "trace.jsonl"
PATCH: Final = "patch.diff"
RECEIPT: Final = "receipt.json"
"""The sealed receipt in canonical form, with an empty trace: the events are in `trace.jsonl`."""
COPIED: Final = "copied"
"""Name of the first fact of a run that happened elsewhere."""
TASK_HASH: Final = "sha256:"
"""Prefix of a task's hash, stored if `config.vendor.abp.task_text` is `hash`; events may still contain the task."""
FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
"""Mode of the files: only the owner may read them, because events contain the user's text."""
HEAD_BYTES_MAX: Final = 64 << 20
"""Maximum size of a head that is read; an order with its context has some kilobytes."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

Facts = dict[str, Any]


class HeadWorkspace(msgspec.Struct, frozen=True):
    """The member `workspace` of the order in a head."""

    root: str = ""
    mode: str = ""


class HeadConfig(msgspec.Struct, frozen=True):
    """The member `config` of the order in a head."""

    model: str | None = None
    vendor: dict[str, Any] = {}


class HeadOrder(msgspec.Struct, frozen=True):
    """The order in a head; not a `WorkOrder`, because `config.env` has only names."""

    id: str = ""
    task: str | None = None
    workspace: HeadWorkspace = HeadWorkspace()
    policy: PolicyProfile | None = None
    config: HeadConfig = HeadConfig()


class HeadBackend(msgspec.Struct, frozen=True):
    id: str


class JournalHead(msgspec.Struct, frozen=True):
    """The first fact of a journal; a missing member has its default."""

    fact: str = ""
    started_at: str = ""
    backend: HeadBackend | None = None
    order: HeadOrder = HeadOrder()
    boot_id: str | None = None
    """Id of the machine's boot in which the run began; None if unknown."""
    route: Json = None
    check: dict[str, Any] | None = None
    """For a run that checks the result of another run, `of` is the other run's id; None for a usual run."""
    patch: bool = True
    """False if the run is a copy without its patch."""


_decode_head: Final = msgspec.json.Decoder(JournalHead).decode


def read_head(folder: Path) -> JournalHead:
    """Read the first fact of the journal in this folder.

    Raises:
        OSError: there is none, or it is no plain file.
        msgspec.MsgspecError: its first line is no such fact.
    """
    with open_plain(folder / HEAD) as file:
        return _decode_head(file.readline(HEAD_BYTES_MAX))


def head_fact(
    order: WorkOrder, *, run_id: str, started_at: str, backend: str | None, route: Json = None, check: Json = None
) -> Facts:
    """Return the first fact of a run, from which recovery makes a receipt.

    Args:
        order: stored with the names of `config.env` only, as the values are secrets, and with the task's hash if the
            order asks for that.
        started_at: in the contract's print form.
        backend: id of the chosen backend, before any hello; None if another machine chooses it.
        route: reason for the choice, as in the receipt; None if the order named the backend.
        check: for a run that checks another run's result, names that run, as in the receipt; None for a usual run.
    """
    stored = msgspec.to_builtins(order)
    stored["config"]["env"] = sorted(order.config.env)
    if order.abp("task_text") == "hash":
        stored["task"] = TASK_HASH + canonical.sha256_hex(order.task.encode("utf-8", "surrogatepass"))
    fact = {"fact": "order", "run_id": run_id, "started_at": started_at, "order": stored}
    more = {"backend": None if backend is None else {"id": backend}, "route": route, "check": check}
    return fact | {name: value for name, value in more.items() if value is not None}


def applied_fact(files: int) -> Facts:
    """Return the fact that a run's patch was applied to its original."""
    return {"fact": "applied", "files": files}


def held_fact(held: Json) -> Facts:
    """Return the fact with the layers that enforce the rules, as in `enforcement` of the receipt."""
    return {"fact": "held", "enforcement": held}


def host_fact(pid: int, start: int) -> Facts:
    """Return the fact that names the host's process, or its sandbox; viewers of a live run read it.

    Args:
        start: clock ticks from the machine's boot to the start of the process; a later process with the same id has
            another value.
    """
    return {"fact": "host", "pid": pid, "start": start, "plane": os.getpid()}


def failed_fact(code: str) -> Facts:
    """Return the fact that a run failed by an unforeseen exception.

    With it, a receipt that was sealed but not stored is replaced by one of a failed run.
    """
    return {"fact": "failed", "code": code}


class Journal:
    """One run's open journal; `create` opens it, `close` closes it.

    Every failure of the disk is a `StoreError` with `receipt_store_failed` and the errno's name.
    """

    def __init__(self, folder: Path, run_id: str, head: int, trace: int) -> None:
        self.folder = folder
        self.run_id = run_id
        self.count = 0
        """Number of written events."""
        self.size_bytes = 0
        """Size in bytes of the written events."""
        self._head = head
        self._trace = trace
        self._distrusted: str | None = None

    @classmethod
    def create(cls, home: Path, run_id: str, *head: Facts) -> Journal:
        """Make the folder of a run with its first facts, and lock it.

        Raises:
            StoreError: `receipt_store_failed`, also if the run has a folder already.
        """
        run_id = canonical.uuid_text(run_id)
        runs = home / "runs"
        # Recovery ignores this name. The folder gets its final name once it is locked and has its first fact.
        building = runs / f".{run_id}.{os.urandom(4).hex()}.new"
        with _disk(f"the journal of run {run_id}"):
            try:
                runs.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            except FileExistsError:
                raise NotADirectoryError(errno.ENOTDIR, f"{runs} is no folder") from None
            building.mkdir(mode=FOLDER_MODE)
            head_fd = trace_fd = -1
            try:
                head_fd = _open_new(building / HEAD)
                fcntl.flock(head_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                trace_fd = _open_new(building / TRACE)
                journal = cls(runs / run_id, run_id, head_fd, trace_fd)
                journal.note({**head[0], "boot_id": boot_id()}, *head[1:])
                os.rename(building, journal.folder)
            except BaseException:
                _close_all(head_fd, trace_fd)
                shutil.rmtree(building, ignore_errors=True)
                raise
        return journal

    def note(self, *facts: Facts) -> None:
        """Add facts to the head."""
        self._write(self._head, canonical.encode_lines(facts))

    def append(self, batch: bytes, count: int | None = None) -> None:
        """Write canonical events, each ended by a newline, all or none.

        Args:
            count: number of the events; None to count the newlines.
        """
        if not batch.endswith(b"\n"):
            raise ValueError("a batch of events ends in a newline")
        self._write(self._trace, batch, keep_bytes=self.size_bytes)
        self.size_bytes += len(batch)
        # Counting newlines takes longer than the write; most callers know the number.
        self.count += batch.count(b"\n") if count is None else count

    @property
    def trace(self) -> Trace:
        """Return the events written so far."""
        return Trace(self.folder / TRACE, self.count, self.size_bytes)

    def seal(self, body: bytes) -> None:
        """Sync all files of this run to the disk, and then write its receipt.

        Args:
            body: the receipt in canonical form, with an empty trace.
        """
        if self._distrusted is not None:
            # After a failed fsync, the kernel may treat lost pages as written, so a second try may wrongly succeed.
            raise StoreError("receipt_store_failed", f"{self.folder} could not be synced before: {self._distrusted}")
        try:
            with _disk(str(self.folder)):
                os.fsync(self._trace)
                os.fsync(self._head)
                # git itself syncs its packs, which are in deeper folders.
                for path in (*self.folder.glob("*/*"), *self.folder.glob("*")):
                    if path.name not in (HEAD, TRACE) and not path.is_symlink() and (path.is_file() or path.is_dir()):
                        flush_path(path)
        except StoreError as error:
            self._distrusted = error.message
            raise
        replace_file(self.folder / RECEIPT, body, durable=True)
        with _disk(str(self.folder)):
            flush_path(self.folder)
            flush_path(self.folder.parent)

    def close(self) -> None:
        """Close the files and release the lock; a second call does nothing."""
        _close_all(self._head, self._trace)
        self._head = self._trace = -1

    def discard(self) -> None:
        """Remove everything of this run, which was never acknowledged."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, fd: int, data: bytes, keep_bytes: int | None = None) -> None:
        with _disk(str(self.folder)):
            before = os.fstat(fd).st_size if keep_bytes is None else keep_bytes
            try:
                written = os.write(fd, data)
                while written < len(data):
                    written += os.write(fd, memoryview(data)[written:])
            except BaseException:
                # Remove a partly written line, because the next line would continue it.
                with suppress(OSError):
                    os.ftruncate(fd, before)
                raise


def read_facts(folder: Path) -> list[Facts]:
    """Return the facts of a run's head, oldest first, up to the first line that is cut off or no fact."""
    facts: list[Facts] = []
    with _disk(str(folder)), open_plain(folder / HEAD) as file:
        lines = file.read(HEAD_BYTES_MAX).split(b"\n")[:-1]
    with suppress(ValueError, RecursionError):
        for line in lines:
            fact = canonical.decode(line)
            if not isinstance(fact, dict):
                break
            facts.append(fact)
    return facts


def opening_of(folder: Path) -> JournalHead:
    """Read the first fact of the journal in this folder; return an empty one if it cannot be read."""
    try:
        return read_head(folder)
    except (OSError, msgspec.MsgspecError):
        return JournalHead()


def backend_name(folder: Path) -> str | None:
    """Return the configured name of a run's backend; None if the head has none."""
    backend = opening_of(folder).backend
    return None if backend is None else backend.id


@functools.cache
def boot_id() -> str | None:
    """Return the id of this boot of the machine; None if the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


def flush_path(path: Path) -> None:
    """fsync a file or folder by name, if it exists."""
    with suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def _disk(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_error(what, error) from error


def replace_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file atomically by a rename.

    Args:
        durable: True to sync the content to the disk before the rename.

    Raises:
        StoreError: `receipt_store_failed`.
    """
    fresh = path.with_name(f".{path.name}.{os.urandom(8).hex()}.new")
    with _disk(str(path)):
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        try:
            with open(_open_new(fresh), "wb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(fresh, path)
        except BaseException:
            with suppress(OSError):
                fresh.unlink()
            raise


def disk_error(what: str, error: OSError, *, chosen: bool = False) -> StoreError:
    """Make the error for a failing disk, with the errno's name and the next step.

    Args:
        chosen: True if the user named the place, which is not in the state folder.
    """
    name = errno.errorcode.get(error.errno or 0, "EIO")
    hint = _HINTS.get(name, "look at the disk")
    if chosen and name not in _OF_ANY_DISK:
        hint = f"name another place than {what}, one that this user can write"
    return StoreError("receipt_store_failed", f"{what}: {name} ({error.strerror})", hint=hint)


_OF_ANY_DISK: Final = frozenset({"ENOSPC", "EDQUOT", "EFBIG", "EIO"})
"""Errno names whose next step does not depend on the place."""


_HINTS: Final = {
    "ENOSPC": "free some space and run again",
    "EDQUOT": "free some space and run again",
    "EFBIG": "raise the limit on file sizes (ulimit -f)",
    "EROFS": "point the state directory (BACKPLANE_HOME) to a writable disk; inside of a sandbox below /tmp, say",
    "EACCES": "give this user the state directory",
    "ENOTEMPTY": "this run id was used before; take a new one",
    "ENOTDIR": "move away what lies there, or point the state directory to another folder",
    "EEXIST": "this run id was used before; take a new one",
}


def _open_new(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)


def _close_all(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)
