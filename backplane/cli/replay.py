"""`replay`: stored runs under another policy, before that policy is deployed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from backplane.cli import streams
from backplane.cli.parser import Options, Parser, add_json

if TYPE_CHECKING:
    from backplane.cli.show import Look
    from backplane.policy.backtest import Judged
    from backplane.receipts.backtest import Rejudged
    from backplane.receipts.rows import ReceiptRow
    from backplane.receipts.store import Store

EXAMPLE = """
backplane replay --policy strict last
backplane replay --policy new.json --all
"""


def parser(name: str) -> Parser:
    """The options of `replay`."""
    about = "Judge stored runs by another policy and list each decision that would differ; nothing is started."
    made = Parser(f"backplane {name}", about, EXAMPLE, _replay)
    made.add_argument("runs", metavar="RUN", nargs="*", help="run id or its beginning, `last`, or `last~2`")
    made.add_argument("--policy", metavar="NEW", help="the policy to try: a file, or a shipped one")
    made.add_argument("--all", action="store_true", help="every stored run")
    add_json(made, "one JSON object a run and line", "cli_replay")
    return made


def _replay(options: Options) -> int:
    """0 where nothing would differ, 1 where something would or a run could not be judged."""
    import msgspec

    from backplane.cli.runs import open_store
    from backplane.cli.show import Look
    from backplane.errors import ConfigError
    from backplane.receipts.backtest import Rejudge
    from backplane.runtime.orders import read_policy

    if options.policy is None:
        fact = "no policy to try is named"
        raise ConfigError("config_invalid", fact, hint="--policy NEW: a file, or default, strict or ci")
    if bool(options.runs) == options.all:
        raise ConfigError("config_invalid", "name a RUN or more, or --all", hint="backplane replay --help")
    profile = read_policy(options.policy)
    look = Look.here()
    runs = decisions = differing = unjudged = 0
    with open_store() as store:
        rejudge = Rejudge(store, profile, _files)
        for row in _rows(store, options):
            found = rejudge.run(row)
            runs += 1
            decisions += found.decisions
            differing += len(found.differing)
            unjudged += found.unjudged is not None
            if options.json:
                streams.write_json(msgspec.json.encode(found) + b"\n")
            else:
                _tell(found, look)
    if not options.json:
        rest = f", {streams.count(unjudged, 'run')} not wholly judged" if unjudged else ""
        counted = f"{streams.count(runs, 'run')}, {streams.count(decisions, 'decision')}"
        streams.write(f"{counted}, {differing} would differ{rest}\n")
    return 1 if differing or unjudged else 0


def _rows(store: Store, options: Options) -> Iterator[ReceiptRow]:
    """The named runs, each once; names are looked up before anything is judged."""
    if options.all:
        return store.scan()
    return iter({row.run_id: row for row in map(store.find, options.runs)}.values())


def _files(diff: str) -> Iterable[str]:
    from backplane.view.diff import changes

    return (change.path for change in changes(diff.splitlines()))


def _tell(found: Rejudged, look: Look) -> None:
    if found.differing or found.unjudged is not None:
        streams.write(f"{found.run_id}\n")
    for it in found.differing:
        place = f"event {it.event}" if it.event is not None else "patch"
        answered = f"  (then answered: {streams.one_line(it.answered)} by {streams.one_line(it.by)})"
        told = answered if it.answered is not None else ""
        change = f"{it.before.allowed} → {look.dress(_colour(it.after), it.after.allowed)}"
        streams.write(f"  {place}: {streams.one_line(it.subject, 120)}: {change}{told}\n")
        streams.write(f"    {look.dress('dim', streams.one_line(it.after.reason))}\n")
    if found.unjudged is not None:
        streams.write(f"  {look.dress('yellow', 'not judged: ')}{streams.one_line(found.unjudged)}\n")


def _colour(judged: Judged) -> str:
    return {"allow": "green", "deny": "red"}.get(judged.allowed, "yellow")
