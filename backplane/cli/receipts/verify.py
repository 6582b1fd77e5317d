"""`receipts verify`: check hashes, signatures and the chain of receipts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, load_settings, open_store, wrong, wrong_words
from backplane.cli.receipts import read_file
from backplane.cli.result_file import ResultFile
from backplane.errors import BackplaneError
from backplane.receipts import signatures
from backplane.receipts.bundle import SIGNATURE, verified_bundle
from backplane.receipts.database import ChainCheckpoint, ReceiptRow
from backplane.receipts.recovery import is_run_id
from backplane.receipts.signatures import read_checkpoint
from backplane.receipts.store import Store
from backplane.runtime.state import left_behind

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey as PublicKey

HELP = "Check hashes and the chain of receipts: of all that are stored, or of those that are named."
EXAMPLE = """
backplane receipts verify
backplane receipts verify receipt.json
backplane receipts verify --save-checkpoint /elsewhere/chain.json
"""

CHECKPOINT_BYTES_MAX = 64 * 1024
"""A checkpoint is one short line, a signed one a kilobyte."""


def options(p: Parser) -> None:
    add.value(
        p, "names", metavar="FILE-or-RUN", nargs="*",
        help="file of a receipt, exported folder, run id or its beginning (default: all that are stored)",
    )  # fmt: skip
    add.value(p, "--checkpoint", metavar="FILE", help="compare with this checkpoint; finds missing receipts at the end")
    add.value(
        p, "--save-checkpoint", metavar="FILE",
        help="write the head of the chain to this file, signed if a signing key is configured; keep it elsewhere",
    )  # fmt: skip
    add.value(p, "--key", metavar="PUB", help="require a signature that this public key verifies")
    add.config(p)
    p.only_with["--config"] = "--save-checkpoint"
    add.json(p, "what was checked and each fault as one JSON object", "cli_receipts_verify")


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


def run(args: Args) -> int:
    head = _checkpoint(args) if args.save_checkpoint is not None else None
    key = signatures.public_key(args.key) if args.key is not None else None
    if args.names and (args.checkpoint or args.save_checkpoint) is not None:
        raise wrong_words("a checkpoint covers all stored receipts", "leave out the names of receipts")
    found = _verify_named(args.names, key) if args.names else _verify_all(args.checkpoint, key)
    if args.json:
        streams.write_record(found)
    else:
        _show_verified(found, args.names)
    if head is not None and not found.faults:
        ResultFile(args.save_checkpoint).write((head,))
    return 1 if found.faults else 0


def _checkpoint(args: Args) -> bytes:
    """Return the head of the chain as a file to keep elsewhere. Raises ConfigError: the chain has none."""
    key = load_settings(args).signing_key
    with open_store() as store:
        head = store.checkpoint()
    if head is None:
        raise wrong("no receipt is stored, so the chain has no head", "run an order first")
    return signatures.Signer(key).checkpoint(head) if key is not None else msgspec.json.encode(head) + b"\n"


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
        for line in left_behind(store.home, store):
            streams.note(line)
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
        raise wrong(
            f"{streams.source(name)} is not a checkpoint: {error}",
            "name a file that `receipts verify --save-checkpoint FILE` wrote",
        ) from error


def _faults_of(name: str, key: PublicKey | None) -> list[ReceiptFault]:
    """Return the faults of a file, an exported folder or a stored receipt."""
    is_folder = os.path.isdir(name) and not _is_stored(name)
    if not is_folder and not os.path.isfile(name):
        return _stored_faults(name, key)
    try:
        receipt = verified_bundle(Path(name)) if is_folder else read_file(name, "the file")
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
