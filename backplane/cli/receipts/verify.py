"""`receipts verify`: check hashes, signatures and the chain of receipts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, load_settings, open_store, wrong, wrong_words
from backplane.cli.result_file import ResultFile
from backplane.receipts import signatures
from backplane.receipts.audit import Audit, AuditFinding
from backplane.receipts.bundle import bundle_faults, unsigned_row
from backplane.receipts.database import ChainCheckpoint
from backplane.receipts.store import Store
from backplane.runtime.state import left_behind

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey as PublicKey

HELP = "Check the hash of each stored receipt and the chain of all receipts. With names, check only these receipts."
EXAMPLE = """
backplane receipts verify
backplane receipts verify receipt.json
backplane receipts verify --save-checkpoint /elsewhere/chain.json
"""


def options(p: Parser) -> None:
    add.value(
        p, "names", metavar="FILE-or-RUN", nargs="*",
        help="receipt file, exported folder, run id, or a prefix of a run id (default: all stored receipts)",
    )  # fmt: skip
    add.value(p, "--checkpoint", metavar="FILE", help="report receipts that are missing since this checkpoint")
    add.value(
        p, "--save-checkpoint", metavar="FILE",
        help="write a checkpoint of the chain to this file, signed if a signing key is configured; keep it elsewhere",
    )  # fmt: skip
    signed = "require that each receipt has a signature that verifies with this public key"
    add.value(p, "--key", metavar="PUB", help=signed)
    add.config(p)
    p.only_with["--config"] = "--save-checkpoint"
    add.json(p, "what was checked and each fault as one JSON object", "cli_receipts_verify")


def run(args: Args) -> int:
    key = signatures.public_key(args.key) if args.key is not None else None
    if args.names and (args.checkpoint or args.save_checkpoint) is not None:
        fact = "a checkpoint covers all stored receipts, so single receipts cannot be named with it"
        raise wrong_words(fact, "leave out the names of receipts")
    if args.names:
        found = Audit(tuple(fault for name in args.names for fault in _faults_of(name, key)), len(args.names))
    else:
        with open_store() as store:
            head = _head(args, store) if args.save_checkpoint is not None else None
            found = store.verify_all(_read_checkpoint(args.checkpoint, key) if args.checkpoint is not None else None)
            unsigned = [one for row in store.scan() for one in unsigned_row(store, row, key)] if key is not None else ()
            found = msgspec.structs.replace(found, findings=(*found.findings, *unsigned))
            for line in left_behind(store.home, store):
                streams.note(line)
        if head is not None and not found.findings:
            ResultFile(args.save_checkpoint).write((head,))
    if args.json:
        streams.write_record(found)
    else:
        streams.write_lines(map(streams.one_line, _lines(found, args.names)), "")
    return 1 if found.findings else 0


def _head(args: Args, store: Store) -> bytes:
    """Return the head of the chain as a file to keep elsewhere. Raises ConfigError: the chain has none."""
    key, head = load_settings(args).signing_key, store.checkpoint()
    if head is None:
        raise wrong("no receipt is stored, so there is nothing to save as a checkpoint", "run an order first")
    return signatures.Signer(key).checkpoint(head) if key is not None else msgspec.json.encode(head) + b"\n"


def _lines(found: Audit, names: list[str]) -> Iterator[str]:
    for name in names or dict.fromkeys(fault.run_id for fault in found.findings):
        facts = [f"{one.code}: {one.fact}" if one.code else one.fact for one in found.findings if one.run_id == name]
        yield f"{name or 'store'}: {'; '.join(facts) or 'intact'}"
    if names:
        return
    pruned = f", {found.pruned} pruned runs only by their entries in the chain" if found.pruned else ""
    checked = streams.count(found.checked, "receipt")
    yield f"{checked} checked{pruned}, {streams.count(len(found.findings), 'fault')}"
    if found.rebuilt is not None:
        yield f"the index was rebuilt from the run folders at {found.rebuilt}"
    if not found.rollback_checked:
        yield "give --checkpoint FILE to also detect that the newest receipts are missing or the store is an older copy"


def _read_checkpoint(name: str, key: PublicKey | None) -> ChainCheckpoint:
    data = streams.read_input(name)
    try:
        return signatures.read_checkpoint(data, key)
    except ValueError as error:
        hint = "name a file that `receipts verify --save-checkpoint FILE` wrote"
        raise wrong(f"{streams.source(name)} is not a checkpoint: {error}", hint) from error


def _faults_of(name: str, key: PublicKey | None) -> list[AuditFinding]:
    """Return the faults of a file, an exported folder or, if neither has this name, a stored receipt."""
    if os.path.isdir(name) or os.path.isfile(name):
        found = list(bundle_faults(Path(name), key))
    elif os.sep in name or name.endswith(".json"):
        raise wrong(f"there is no file {name}", "name an existing file or folder, or a stored run")
    else:
        with open_store() as store:
            found = [*store.verify(name), *unsigned_row(store, store.find(name), key)]
    return [AuditFinding(one.code, name, one.fact) for one in found]
