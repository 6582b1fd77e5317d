"""`receipts`: the store from the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from backplane.cli import show, streams
from backplane.cli.parser import Options
from backplane.cli.start import before_ms, load_settings, open_store, wrong, wrong_words
from backplane.contract.events import carried
from backplane.errors import BackplaneError, StoreError
from backplane.receipts import signatures
from backplane.receipts.bundle import (
    RECEIPT_BYTES_MAX,
    SIGNATURE,
    export,
    import_bundle,
    parse_receipt,
    verified_bundle,
)
from backplane.receipts.comparison import ABSENT, compare
from backplane.receipts.database import ChainCheckpoint, ReceiptRow, is_full
from backplane.receipts.journal import backend_name
from backplane.receipts.pieces import canonical_chunks
from backplane.receipts.recovery import is_run_id
from backplane.receipts.signatures import read_checkpoint
from backplane.receipts.store import Store
from backplane.runtime.state import left_behind

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey as PublicKey

    from backplane.contract.receipt import Receipt
    from backplane.receipts.claims import FalseClaim, Verdict
    from backplane.receipts.database import Listed


NUMBER_MAX = (1 << 63) - 1
"""SQLite counts no further."""

CHECKPOINT_BYTES_MAX = 64 * 1024
"""A checkpoint is one short line, a signed one a kilobyte."""


def _say_left_behind(store: Store) -> None:
    """On stderr: it is no receipt and no fault of one."""
    for line in left_behind(store.home, store):
        streams.note(line)


def list_receipts(options: Options) -> int:
    limit = _number("--limit", options.limit, "0 lists none of them")
    with open_store() as store:
        rows = list(store.listed(limit))
        _say_left_behind(store)
    streams.write_rows(rows, _row, "no receipts", as_json=options.json)
    return 0


def _row(row: Listed) -> str:
    reason = f" ({row.reason})" if row.reason and row.reason != row.outcome else ""
    run_id, started_at, ended = map(streams.one_line, (row.run_id, row.started_at[:19], row.outcome + reason))
    took = f"{row.duration_ms / 1000:8.1f} s"
    return f"{run_id}  {started_at}Z  {took}  {ended:<22}  {_backend(row.backend, row.backend_name)}"


def _backend(own: str, name: str | None) -> str:
    """The name it has here, with its own where that is another one."""
    shown = streams.one_line(own, 40)
    return shown if name in (None, own) else f"{streams.one_line(name, 40)} ({shown})"


def show_receipt(options: Options) -> int:
    with open_store() as store:
        row = store.find(options.id)
        receipt, patch = store.load(row.run_id), store.patch(row)
        if options.json:
            for chunk in canonical_chunks(receipt):
                streams.write_bytes(chunk)
            streams.write("\n")
            return 0
        look = show.Look.here()
        for event in receipt.trace:
            streams.write(look.event(carried(event)))
        name = backend_name(store.folder(row.run_id))
        streams.write(look.end_line() + f"backend {_backend(receipt.backend.id, name)}\n")
        streams.write(show.summary(receipt, look, patch))
    return 0


class ReceiptFault(msgspec.Struct, frozen=True):
    """A fault of one receipt or of the store."""

    name: str | None
    """Run id, file or folder; None for the store."""
    code: str | None
    """The error code; None for a signature."""
    fact: str


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `receipts verify`."""

    checked: int
    pruned: int = 0
    """Pruned receipts: only their place in the chain can be checked."""
    rollback_checked: bool = False
    """True if a checkpoint was given; without one a cut tail or an older copy of the store cannot be seen."""
    faults: tuple[ReceiptFault, ...]


def verify(options: Options) -> int:
    key = signatures.public_key(options.key) if options.key is not None else None
    if options.names and options.checkpoint is not None:
        raise wrong_words("--checkpoint is about everything stored", "name no receipt with it")
    found = _verify_named(options.names, key) if options.names else _verify_all(options.checkpoint, key)
    if options.json:
        streams.write_record(found)
    else:
        _show_verified(found, options.names)
    return 1 if found.faults else 0


def _verify_named(names: Sequence[str], key: PublicKey | None) -> Verified:
    faults = (fault for name in names for fault in _faults_of(name, key))
    return Verified(checked=len(names), faults=tuple(faults))


def _show_verified(found: Verified, names: Sequence[str]) -> None:
    for name in names:
        facts = [_words(fault) for fault in found.faults if fault.name == name]
        streams.write(f"{streams.one_line(name)}: {'; '.join(facts) or 'intact'}\n")
    if names:
        return
    for fault in found.faults:
        streams.write(f"{streams.one_line(fault.name or 'store')}: {_words(fault)}\n")
    pruned = f", {found.pruned} pruned ones by their place in the chain" if found.pruned else ""
    checked = streams.count(found.checked, "receipt")
    streams.write(f"{checked} checked{pruned}, {streams.count(len(found.faults), 'fault')}\n")
    if not found.rollback_checked:
        streams.write("without --checkpoint FILE a cut tail or an older copy of the store cannot be seen\n")


def _words(fault: ReceiptFault) -> str:
    return streams.one_line(fault.fact if fault.code is None else f"{fault.code}: {fault.fact}")


def _verify_all(checkpoint: str | None, key: PublicKey | None) -> Verified:
    with open_store() as store:
        audit = store.verify_all(_read_checkpoint(checkpoint, key) if checkpoint is not None else None)
        signed = store.scan() if key is not None else ()
        unsigned = [
            ReceiptFault(row.run_id, None, fault) for row in signed for fault in _signature_faults(store, row, key)
        ]
        _say_left_behind(store)
    broken = [ReceiptFault(finding.run_id, finding.code, finding.fact) for finding in audit.findings]
    return Verified(
        checked=audit.checked,
        pruned=audit.pruned,
        rollback_checked=audit.rollback_checked,
        faults=(*unsigned, *broken),
    )


def _signature_faults(store: Store, row: ReceiptRow, key: PublicKey | None) -> list[str]:
    if key is None:
        return []
    fault = signatures.receipt_fault(signatures.read(signatures.path_of(store.home, row.run_id)), key, row.sha256)
    return [] if fault is None else [fault]


def _read_checkpoint(name: str, key: PublicKey | None) -> ChainCheckpoint:
    data = streams.read_input(name, CHECKPOINT_BYTES_MAX)
    try:
        return read_checkpoint(data, key)
    except ValueError as error:
        raise wrong(f"{streams.source(name)} is no checkpoint: {error}", "`receipts checkpoint` prints one") from error


def _number(option: str, value: int, hint: str) -> int:
    if not 0 <= value <= NUMBER_MAX:
        raise wrong_words(f"{option} {value} is no number of receipts", hint)
    return value


def checkpoint(options: Options) -> int:
    signer = None
    if options.signed:
        from backplane.receipts.signatures import Signer

        key = load_settings(options).signing_key
        if key is None:
            raise wrong("--signed, and no signing key is set", "set signing_key, or BACKPLANE_SIGNING_KEY")
        signer = Signer(key)
    with open_store() as store:
        head = store.checkpoint()
    if head is None:
        raise wrong("nothing is stored yet: the chain has no head", "run an order first")
    streams.write_bytes(signer.checkpoint(head) if signer is not None else msgspec.json.encode(head) + b"\n")
    return 0


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _bounds(options: Options) -> dict[str, int]:
    """What `Store.prune` is given."""
    found: dict[str, int] = {}
    if options.keep is not None:
        found["keep"] = _number("--keep", options.keep, "0 keeps none of them whole")
    if options.older is not None:
        if options.older.strip().isdigit():  # Seconds elsewhere; days were meant here, and all would go.
            raise wrong_words(f"--older {options.older!r} has no unit", f"as {options.older.strip()}d for days")
        found["ended_before_ms"] = before_ms("--older", options.older)
    if options.size is not None:
        size = re.fullmatch(r"([0-9]{1,12})([kmgt]?)b?", options.size.strip().lower())
        if size is None:
            raise wrong_words(f"--size {options.size!r} is no number of bytes", "as 500m or 2g")
        found["bytes_max"] = int(size[1]) * _UNITS[size[2]]
    if not found:
        raise wrong_words("nothing says what is to go", "--keep N, --older SPAN or --size BYTES")
    return found


def prune(options: Options) -> int:
    """Remove the content of older receipts."""
    bounds = _bounds(options)
    if options.dry_run:
        with open_store() as store:
            count = store.count_prunable(**bounds)
        streams.write(f"{streams.count(count, 'receipt')} would be pruned; nothing was removed\n")
        return 0
    try:
        with open_store(readonly=False) as store:
            count = store.prune(**bounds)
    except StoreError as error:
        if not is_full(error):
            raise
        with open_store() as store:
            store.make_room(**bounds)
        with open_store(readonly=False) as store:
            count = store.prune(**bounds)
    streams.write(f"{streams.count(count, 'receipt')} pruned; the chain still verifies\n")
    return 0


def _faults_of(name: str, key: PublicKey | None) -> list[ReceiptFault]:
    """Return the faults of a file, an exported folder or a stored receipt."""
    is_folder = os.path.isdir(name) and not _is_stored(name)
    if not is_folder and not os.path.isfile(name):
        return _stored_faults(name, key)
    try:
        receipt = verified_bundle(Path(name)) if is_folder else _receipt_file(name, "the file")
    except BackplaneError as error:
        if error.facts.exit_code == 2:
            raise
        return [ReceiptFault(name, error.code, error.message)]
    if key is None:
        return []
    own = Path(name) / SIGNATURE if is_folder else Path(name).with_suffix(signatures.SUFFIX)
    fault = signatures.receipt_fault(signatures.read(own), key, receipt.receipt_sha256)
    return [] if fault is None else [ReceiptFault(name, None, fault)]


def _is_stored(name: str) -> bool:
    """Return True if the store has a run of this name; an exported folder may have the name, too."""
    if not is_run_id(name):
        return False
    with open_store() as store:
        return store.has(name)


def _stored_faults(name: str, key: PublicKey | None) -> list[ReceiptFault]:
    with open_store() as store:
        found = [ReceiptFault(name, finding.code, finding.fact) for finding in store.verify(name)]
        return found + [ReceiptFault(name, None, fact) for fact in _signature_faults(store, store.find(name), key)]


def _receipt_file(name: str, called: str | None = None) -> Receipt:
    return parse_receipt(streams.read_input(name, RECEIPT_BYTES_MAX), called or streams.source(name))


def audit_receipt(options: Options) -> int:
    """Print the verdicts; 0 where no claim is false, 1 where one is, 4 where nothing was judged."""
    from backplane.receipts.claims import audit

    with open_store() as store:
        found = audit(store.load(options.id))
    if options.json:
        streams.write_record(found)
        return _AUDITED[found.verdict]
    look = show.Look.here()
    if found.verdict == "not_judged":
        streams.write(f"{look.dress('yellow', 'not judged')}: {streams.one_line(found.why)}\n")
        return _AUDITED[found.verdict]
    words: tuple[Verdict, ...] = ("true", "false", "not_seen", "unwitnessed")
    sums = {it: sum(one.get(it, 0) for one in found.counts.values()) for it in words}
    word, colour = ("no claim is false", "green") if found.verdict == "no_alarm" else ("claims are false", "red")
    parts = [f"{sums[it]} {it.replace('_', ' ')}" for it in words if sums[it] or it != "not_seen"]
    streams.write(
        f"{look.dress(colour, word)}: {', '.join(parts)}; seen by {', '.join(map(streams.one_line, found.layers))}\n"
    )
    for rows, verdict, colour in ((found.false, "false", "red"), (found.not_seen, "not seen", "yellow")):
        for row in rows:
            streams.write(f"  {look.dress(colour, verdict)}  {_claim(row)}\n")
    if found.unexplained:
        streams.write(f"  {look.dress('yellow', 'no event names')}  {show.names(found.unexplained)}\n")
    if found.unnamed:
        streams.write(f"  no event names  {show.names(found.unnamed)}  (a command or a tool may have changed them)\n")
    for kind, counts in sorted(found.counts.items()):
        verdicts = ", ".join(f"{number} {verdict.replace('_', ' ')}" for verdict, number in counts.items())
        streams.write(f"  {streams.one_line(kind):<23} {verdicts}\n")
    return _AUDITED[found.verdict]


def _claim(row: FalseClaim) -> str:
    place = f" (event {row.event})" if row.event is not None else ""
    claimed, seen = streams.one_line(row.claimed, 100), streams.one_line(row.seen, 100)
    return f"{streams.one_line(row.kind)}{place}: claimed {claimed}; seen: {seen}"


_AUDITED: Final = {"no_alarm": 0, "false_claims": 1, "not_judged": 4}
"""Exit codes by verdict: whoever lets 1 stop a pipeline stops it for a false claim only."""


def diff(options: Options) -> int:
    with open_store() as store:
        left, right = (
            _receipt_file(name) if os.path.isfile(name) else store.load(name) for name in (options.left, options.right)
        )
        found = compare(left, right)
    for difference in found:
        streams.write(f"{streams.one_line(difference.pointer)}\n")
        for mark, value in (("-", difference.left), ("+", difference.right)):
            if value is not ABSENT:
                streams.write(f"  {mark} {streams.one_line(msgspec.json.encode(value).decode())}\n")
    return 1 if found else 0


def export_run(options: Options) -> int:
    if options.to == "":
        raise wrong_words("--to is empty", "name a new folder, or leave it out for ./RUN-ID")
    with open_store() as store:
        run_id = store.find(options.id).run_id
        folder = export(store, run_id, Path(run_id if options.to is None else options.to))
    streams.write(f"{streams.one_line(folder)}\n")
    return 0


def import_run(options: Options) -> int:
    with open_store(readonly=False) as store:
        row = import_bundle(store, Path(options.file))
    streams.write(f"{row.run_id}\n")
    return 0
