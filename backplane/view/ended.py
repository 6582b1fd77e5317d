"""Draws the end of a run: its summary, its patch and what the control plane decided. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

import msgspec

from backplane.contract.receipt import Receipt, reasons_of
from backplane.view.console import Look
from backplane.view.diff import Kind, kind_of, lines
from backplane.view.findings import outcome_words
from backplane.view.text import one_line, printable
from backplane.view.values import as_list, as_object

DIFF_LINES_MAX: Final = 300
"""Most lines of a diff that are shown; the patch file has all of it."""

NAMES_SHOWN: Final = 5
"""Most files named on one line of a summary."""

VALUE_CHARS_MAX: Final = 4000
"""Most characters of an answer in the shape that an order asked for; the receipt has all of it."""

_COLOURS: Final[dict[Kind, str]] = {"file": "bold", "meta": "bold", "hunk": "cyan", "added": "green", "removed": "red"}


def summary(receipt: Receipt, look: Look, patch: str = "") -> str:
    """Return the outcome of a run in a few lines.

    Args:
        patch: the line about its patch, from `patch_line`.
    """
    words = outcome_words(receipt.outcome, receipt.findings)
    is_clean = words == receipt.outcome
    colour = {"complete": "green" if is_clean else "yellow", "partial": "yellow"}.get(receipt.outcome, "red")
    added, run_id = receipt.backplane, receipt.meta.run_id
    reason = as_object(added.get("end")).get("reason")
    why = f" ({one_line(reason)})" if reason and reason != receipt.outcome else ""
    lasted = f"{receipt.meta.duration_ms / 1000:.1f} s"
    told = [
        f"{look.dress(colour, words)}{why}{'' if is_clean else ','} after {lasted}{_usage(receipt)}",
        f"run {run_id}  receipt {one_line((receipt.receipt_sha256 or '')[:16])}",
    ]
    if original := as_object(added.get("replay")):
        served = as_object(added.get("cache")).get("hit") is True
        told.append(f"{'answered from the store, by' if served else 'replay of'} run {original.get('run')}")
    if receipt.outcome != "complete":
        told.append(f"why backplane why {run_id[:8]}")
    if (output := as_object(receipt.usage_raw).get("structured_output")) is not None:
        told.append(f"value {one_line(msgspec.json.encode(output).decode(), VALUE_CHARS_MAX)}")
    held = as_object(added.get("enforcement"))
    for name, colour, label in (
        ("violations", "red", "policy violated"),
        ("attempts", "yellow", "forbidden action, which failed"),
    ):
        told += [f"{look.dress(colour, label + ':')} {one_line(row)}" for row in reasons_of(held.get(name))]
    if unnamed := as_list(as_object(added.get("claimed")).get("unexplained")):
        told.append(f"{look.dress('yellow', 'changed, but no event names it:')} {names(list(map(str, unnamed)))}")
    if unheard := as_list(added.get("unheard")):
        told.append(f"settings of the order without effect: {one_line(', '.join(map(str, unheard)))}")
    return "\n".join([*told, *filter(None, [patch])]) + "\n"


def patch_line(receipt: Receipt, path: str, mode: str | None, root: str = "DIR") -> str:
    """Return the line that names a run's patch, and the command that applies it or the reason that none is needed.

    Args:
        mode: workspace mode in the record beside the patch; None if there is no record, as on another machine.
        root: the folder to apply it to, if there is no record.
    """
    if as_object(receipt.backplane.get("lane")).get("applied"):
        step = "applied"
    elif mode == "pass_through":
        step = "made in place"
    else:
        into = f" --root {shlex.quote(root)}" if mode is None else ""
        forbidden = as_object(receipt.backplane.get("enforcement")).get("violations")
        accepted = " --accept-violations" if forbidden else ""
        step = f"backplane apply {receipt.meta.run_id[:8]}{one_line(into)}{accepted}"
    return f"patch {one_line(path)}  ({step})"


def names(paths: Sequence[str]) -> str:
    """Return one line with the first files of a list, and how many more there are."""
    more = f" and {len(paths) - NAMES_SHOWN} more" if len(paths) > NAMES_SHOWN else ""
    return one_line(", ".join(paths[:NAMES_SHOWN]), VALUE_CHARS_MAX) + more


def _usage(receipt: Receipt) -> str:
    usage = receipt.usage
    counts = ((usage.input_tokens, "in"), (usage.output_tokens, "out"))
    parts = [f"{count:,} tokens {way}" for count, way in counts if count is not None]
    if usage.estimated_cost_usd is not None:
        parts.append(f"${usage.estimated_cost_usd:.4f}")
    return "".join(f", {part}" for part in parts)


# The patch ------------------------------------------------------------------------------------------------------------


def diff_line(text: str, look: Look, kind: Kind | None = None) -> str:
    """Return a line of a patch in the colour of its kind (default: the kind that it begins like)."""
    colour = _COLOURS.get(kind or kind_of(text))
    return look.dress(colour, printable(text)) if colour else printable(text)


def diff(patch: Iterable[str], look: Look, name: str) -> Iterator[str]:
    """Yield the coloured lines of a patch, at most `DIFF_LINES_MAX`.

    Args:
        name: what to call the whole of it.
    """
    found = lines(line.rstrip("\n") for line in patch)
    for line in islice(found, DIFF_LINES_MAX):
        yield diff_line(line.text, look, line.kind) + "\n"
    if next(found, None) is not None:
        yield look.dress("dim", f"… cut after {DIFF_LINES_MAX} lines; the complete diff is in {one_line(name)}") + "\n"
