"""`receipts`: the store from the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from backplane.cli import streams
from backplane.cli.parser import Options, Parser, add_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey as PublicKey

    from backplane.contract.receipt import Receipt
    from backplane.receipts.rows import ChainCheckpoint, Listed, ReceiptRow
    from backplane.receipts.store import Store

ROWS_SHOWN = 50
"""Rows of a list without --limit: a screen or two."""

NUMBER_MAX = (1 << 63) - 1
"""SQLite counts no further."""

CHECKPOINT_BYTES_MAX = 64 * 1024
"""A checkpoint is one short line, a signed one a kilobyte."""

EXAMPLE = """
backplane receipts list
backplane receipts show 3f2a
backplane receipts verify receipt.json
"""


def parser(name: str) -> Parser:
    """The options of `receipts` and its own commands."""
    made = Parser(f"backplane {name}", "Work with the receipts that are stored here.", EXAMPLE)
    made.set_defaults(call=_list, limit=ROWS_SHOWN, json=False)
    commands = made.add_subparsers(dest="what", metavar="WHAT", parser_class=Parser)

    def add(what: str, about: str, example: str, call: Callable[[Options], int]) -> Parser:
        sentence = about[0].upper() + about[1:] + "."
        part: Parser = commands.add_parser(what, help=about, about=sentence, example=example)
        part.set_defaults(call=call)
        return part

    part = add("list", "list receipts, newest first", "backplane receipts list --limit 5", _list)
    part.add_argument("--limit", type=int, default=ROWS_SHOWN, metavar="N", help=f"at most so many ({ROWS_SHOWN})")
    add_json(part, "one JSON object a receipt and line", "cli_receipts_list")
    part = add("show", "show one receipt", "backplane receipts show 3f2a --json", _show)
    part.add_argument("id", metavar="ID", help="run id or its beginning; `last`")
    add_json(part, "the whole receipt in canonical bytes", "receipt_written")
    part = add(
        "verify",
        "check hashes, of everything stored if nothing is named",
        "backplane receipts verify 3f2a\nbackplane receipts verify receipt.json",
        _verify,
    )
    part.add_argument("names", nargs="*", metavar="FILE-or-ID", help="a receipt's file; run id or its beginning")
    part.add_argument("--checkpoint", metavar="FILE", help="kept from earlier: shows a cut tail, too")
    part.add_argument("--key", metavar="PUB", help="what has no signature by this public key is a fault, too")
    about = (
        "hold what the host claimed against what was seen; exit code 1 where a claim is false, 4 where none was judged"
    )
    part = add("audit", about, "backplane receipts audit 3f2a", _audit)
    part.add_argument("id", metavar="RUN", help="run id or its beginning; `last`")
    add_json(part, "the verdicts as one JSON object", "cli_receipts_audit")
    part = add(
        "diff", "compare two receipts; exit code 1 where they differ", "backplane receipts diff 3f2a 91bc", _diff
    )
    part.add_argument("left", metavar="A", help="run id or file")
    part.add_argument("right", metavar="B", help="run id or file")
    part = add("export", "write receipt, patch and journal as one folder", "backplane receipts export 3f2a", _export)
    part.add_argument("id", metavar="ID", help="run id or its beginning; `last`")
    part.add_argument("--to", metavar="DIR", help="a new folder (./RUN-ID)")
    part = add(
        "import", "keep a receipt from elsewhere, once it verifies", "backplane receipts import ./3f2a1b0c-…", _import
    )
    part.add_argument("file", metavar="FILE", help="a folder of `export`, or a receipt alone")
    part = add(
        "checkpoint",
        "print the head of the chain, to be kept elsewhere for `verify --checkpoint`",
        "backplane receipts checkpoint > /elsewhere/checkpoint.json",
        _checkpoint,
    )
    part.add_argument("--signed", action="store_true", help="in an envelope signed with `signing_key` of the settings")
    part = add(
        "prune",
        "remove the content of older receipts; their places in the chain stay and still verify",
        "backplane receipts prune --keep 1000\nbackplane receipts prune --older 90d --size 2g",
        prune,
    )
    add_prune(part)
    return made


@contextmanager
def _store(*, readonly: bool) -> Iterator[Store]:
    import os

    from backplane import config
    from backplane.receipts.store import Store

    home = config.home_path(os.environ) if readonly else config.home(os.environ)
    with Store.open(home, readonly=readonly) as store:
        yield store


def _say_left_behind(store: Store) -> None:
    """On stderr: it is no receipt and no fault of one."""
    from backplane.runtime.state import left_behind

    for line in left_behind(store.home, store):
        streams.complain(streams.one_line(line) + "\n")


def _list(options: Options) -> int:
    import msgspec

    limit = _number("--limit", options.limit, "0 lists none of them")
    with _store(readonly=True) as store:
        rows = list(store.listed(limit))
        _say_left_behind(store)
    if options.json:
        for row in rows:
            streams.write_bytes(msgspec.json.encode(row) + b"\n")
    else:
        streams.write_lines(map(_row, rows), "no receipts")
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


def _show(options: Options) -> int:
    from backplane.cli import show
    from backplane.receipts.journal import backend_name
    from backplane.receipts.pieces import canonical_chunks

    with _store(readonly=True) as store:
        row = store.find(options.id)
        receipt, patch = store.load(row.run_id), store.patch(row)
        if options.json:
            for chunk in canonical_chunks(receipt):
                streams.write_bytes(chunk)
            streams.write("\n")
            return 0
        look = show.Look.here()
        for event in receipt.trace:
            streams.write(look.event(_typed(event)))
        name = backend_name(store.folder(row.run_id))
        streams.write(look.end_line() + f"backend {_backend(receipt.backend.id, name)}\n")
        streams.write(show.summary(receipt, look, patch))
    return 0


def _typed(event: Any) -> Any:
    from backplane.contract.events import carried

    return carried(event)


def _verify(options: Options) -> int:
    import os

    from backplane.receipts import signatures

    key = signatures.public_key(options.key) if options.key is not None else None
    if not options.names:
        return _verify_all(options.checkpoint, key)
    if options.checkpoint is not None:
        raise _wrong("--checkpoint is about everything stored", "name no receipt with it")
    faults = 0
    for name in options.names:
        found = _file_faults(name, key) if os.path.isfile(name) else _stored_faults(name, key)
        faults += len(found)
        streams.write(f"{streams.one_line(name)}: {'; '.join(map(streams.one_line, found)) or 'intact'}\n")
    return 1 if faults else 0


def _verify_all(checkpoint: str | None, key: PublicKey | None) -> int:
    with _store(readonly=True) as store:
        audit = store.verify_all(_read_checkpoint(checkpoint, key) if checkpoint is not None else None)
        signed = store.scan() if key is not None else ()
        unsigned = [(row.run_id, fault) for row in signed for fault in _signature_faults(store, row, key)]
        _say_left_behind(store)
    for run_id, fact in unsigned:
        streams.write(f"{streams.one_line(run_id)}: {streams.one_line(fact)}\n")
    for finding in audit.findings:
        run_id, fact = streams.one_line(finding.run_id or "store"), streams.one_line(finding.fact)
        streams.write(f"{run_id}: {finding.code}: {fact}\n")
    pruned = f", {audit.pruned} pruned ones by their place in the chain" if audit.pruned else ""
    checked, faults = (
        streams.count(audit.checked, "receipt"),
        streams.count(len(audit.findings) + len(unsigned), "fault"),
    )
    streams.write(f"{checked} checked{pruned}, {faults}\n")
    if not audit.rollback_checked:
        streams.write("without --checkpoint FILE a cut tail or an older copy of the store cannot be seen\n")
    return 1 if audit.findings or unsigned else 0


def _signature_faults(store: Store, row: ReceiptRow, key: PublicKey | None) -> list[str]:
    from backplane.receipts import signatures

    if key is None:
        return []
    fault = signatures.receipt_fault(signatures.read(signatures.path_of(store.home, row.run_id)), key, row.sha256)
    return [] if fault is None else [fault]


def _read_checkpoint(name: str, key: PublicKey | None) -> ChainCheckpoint:
    from backplane.receipts.signatures import read_checkpoint

    data = streams.read_input(name, CHECKPOINT_BYTES_MAX)
    try:
        return read_checkpoint(data, key)
    except ValueError as error:
        raise _wrong(f"{streams.source(name)} is no checkpoint: {error}", "`receipts checkpoint` prints one") from error


def _wrong(fact: str, hint: str) -> Exception:
    from backplane.errors import ConfigError

    return ConfigError("config_invalid", fact, hint=hint)


def _number(option: str, value: int, hint: str) -> int:
    if not 0 <= value <= NUMBER_MAX:
        raise _wrong(f"{option} {value} is no number of receipts", hint)
    return value


def _checkpoint(options: Options) -> int:
    import os

    import msgspec

    from backplane import config

    signer = None
    if options.signed:
        from backplane.receipts.signatures import Signer

        key = config.load(None, dict(os.environ), streams.folder()).signing_key
        if key is None:
            raise _wrong("--signed, and no signing key is set", "set signing_key, or BACKPLANE_SIGNING_KEY")
        signer = Signer(key)
    with _store(readonly=True) as store:
        head = store.checkpoint()
    if head is None:
        raise _wrong("nothing is stored yet: the chain has no head", "run an order first")
    streams.write_bytes(signer.checkpoint(head) if signer is not None else msgspec.json.encode(head) + b"\n")
    return 0


def add_prune(part: Parser) -> None:
    """Add the options that say what of the older runs goes."""
    part.add_argument("--keep", type=int, metavar="N", help="leave the newest so many whole")
    part.add_argument("--older", metavar="SPAN", help="remove what ended longer ago, as 90d")
    part.add_argument("--size", metavar="BYTES", help="leave files of so many bytes together, as 500m or 2g")


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _bounds(options: Options) -> dict[str, int]:
    """What `Store.prune` is given."""
    import re
    import time

    from backplane.view.figures import span_s

    found: dict[str, int] = {}
    if options.keep is not None:
        found["keep"] = _number("--keep", options.keep, "0 keeps none of them whole")
    if options.older is not None:
        span = span_s(options.older)
        if span is None:
            raise _wrong(f"--older {options.older!r} is no span of time", "as 12h, 30d or 8w")
        found["ended_before_ms"] = time.time_ns() // 1_000_000 - span * 1000
    if options.size is not None:
        size = re.fullmatch(r"([0-9]{1,12})([kmgt]?)b?", options.size.strip().lower())
        if size is None:
            raise _wrong(f"--size {options.size!r} is no number of bytes", "as 500m or 2g")
        found["bytes_max"] = int(size[1]) * _UNITS[size[2]]
    if not found:
        raise _wrong("nothing says what is to go", "--keep N, --older SPAN or --size BYTES")
    return found


def prune(options: Options) -> int:
    """Remove the content of older receipts."""
    from backplane.errors import StoreError
    from backplane.receipts.database import is_full

    bounds = _bounds(options)
    try:
        with _store(readonly=False) as store:
            count = store.prune(**bounds)
    except StoreError as error:
        if not is_full(error):
            raise
        with _store(readonly=True) as store:
            store.make_room(**bounds)
        with _store(readonly=False) as store:
            count = store.prune(**bounds)
    streams.write(f"{streams.count(count, 'receipt')} pruned; the chain still verifies\n")
    return 0


def _file_faults(name: str, key: PublicKey | None) -> list[str]:
    from pathlib import Path

    from backplane.errors import BackplaneError
    from backplane.receipts import signatures

    try:
        receipt = _receipt_file(name, "the file")
    except BackplaneError as error:
        if error.facts.exit_code == 2:
            raise
        return [str(error)]
    if key is None:
        return []
    beside = signatures.read(Path(name).with_suffix(signatures.SUFFIX))
    fault = signatures.receipt_fault(beside, key, receipt.receipt_sha256)
    return [] if fault is None else [fault]


def _stored_faults(name: str, key: PublicKey | None) -> list[str]:
    with _store(readonly=True) as store:
        found = [f"{finding.code}: {finding.fact}" for finding in store.verify(name)]
        return found + _signature_faults(store, store.find(name), key)


def _receipt_file(name: str, called: str | None = None) -> Receipt:
    from backplane.receipts.bundle import RECEIPT_BYTES_MAX, parse_receipt

    return parse_receipt(streams.read_input(name, RECEIPT_BYTES_MAX), called or streams.source(name))


def _audit(options: Options) -> int:
    """Print the verdicts; 0 where no claim is false, 1 where one is, 4 where nothing was judged."""
    import msgspec

    from backplane.cli import show
    from backplane.receipts.claims import audit

    with _store(readonly=True) as store:
        found = audit(store.load(options.id))
    if options.json:
        streams.write_json(msgspec.json.encode(found) + b"\n")
        return _AUDITED[found.verdict]
    look = show.Look.here()
    if found.verdict == "not_judged":
        streams.write(f"{look.dress('yellow', 'not judged')}: {streams.one_line(found.why)}\n")
        return _AUDITED[found.verdict]
    sums = {word: sum(one.get(word, 0) for one in found.counts.values()) for word in ("true", "false", "unwitnessed")}
    word, colour = ("no claim is false", "green") if found.verdict == "no_alarm" else ("claims are false", "red")
    told = f"{sums['true']} true, {sums['false']} false, {sums['unwitnessed']} unwitnessed"
    streams.write(f"{look.dress(colour, word)}: {told}; seen by {', '.join(map(streams.one_line, found.layers))}\n")
    for false in found.false:
        place = f" (event {false.event})" if false.event is not None else ""
        streams.write(
            f"  {look.dress('red', 'false')}  {streams.one_line(false.kind)}{place}: "
            f"claimed {streams.one_line(false.claimed, 100)}; seen: {streams.one_line(false.seen, 100)}\n"
        )
    for kind, counts in sorted(found.counts.items()):
        verdicts = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
        streams.write(f"  {streams.one_line(kind):<24}{verdicts}\n")
    return _AUDITED[found.verdict]


_AUDITED: Final = {"no_alarm": 0, "false_claims": 1, "not_judged": 4}
"""Exit codes by verdict: whoever lets 1 stop a pipeline stops it for a false claim only."""


def _diff(options: Options) -> int:
    import os

    import msgspec

    from backplane.receipts.comparison import ABSENT, compare

    with _store(readonly=True) as store:
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


def _export(options: Options) -> int:
    from pathlib import Path

    from backplane.errors import ConfigError
    from backplane.receipts.bundle import export

    if options.to == "":
        raise ConfigError("config_invalid", "--to is empty", hint="name a new folder, or leave it out for ./RUN-ID")
    with _store(readonly=True) as store:
        run_id = store.find(options.id).run_id
        folder = export(store, run_id, Path(run_id if options.to is None else options.to))
    streams.write(f"{streams.one_line(folder)}\n")
    return 0


def _import(options: Options) -> int:
    from pathlib import Path

    from backplane.receipts.bundle import import_bundle

    with _store(readonly=False) as store:
        row = import_bundle(store, Path(options.file))
    streams.write(f"{row.run_id}\n")
    return 0
