"""Denied calls, false claims, errors and unheld rules of an ended run, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backplane.contract.receipt import RunFindings, failed_on, findings_of
from backplane.view.figures import counted
from backplane.view.text import one_line
from backplane.view.values import as_object


def outcome_words(outcome: str, found: RunFindings) -> str:
    """Name an outcome with what speaks against it, as `complete, 2 calls denied`."""
    numbers = (
        (found.denied, "call denied", "calls denied"),
        (found.false_claims, "false claim", "false claims"),
        (found.violations, "violation", "violations"),
        (found.errors if outcome == "complete" else 0, "error reported", "errors reported"),
    )
    return ", ".join([outcome, *(f"{count} {one if count == 1 else many}" for count, one, many in numbers if count)])


def fail_on_words(added: Mapping[str, Any]) -> str:
    """Name the findings for which a complete run ends with exit code 3; an empty text where there is none."""
    named = failed_on(added)
    counts = {name: getattr(findings_of(added), name) for word in named if (name := word.replace("-", "_"))}
    words = outcome_words("", RunFindings(**counts)).removeprefix(", ")
    return f"{words} (--fail-on {','.join(named)})" if named else ""


def remarks(run_id: str, outcome: str, added: Mapping[str, Any]) -> list[str]:
    """Return a line for each: unheld rules, false claims, errors before a complete end, ignored files, exit code 3.

    Args:
        added: `usage_raw.backplane` of the run's receipt.
    """
    found, lines = findings_of(added), [str(as_object(added.get("enforcement")).get("shortfall") or "")]
    if found.false_claims:
        counts = as_object(as_object(added.get("claimed")).get("counts"))
        kinds = ", ".join(kind for kind, row in counts.items() if as_object(row).get("false"))
        claims = counted(found.false_claims, "false claim")
        lines.append(f"{claims} of the agent ({kinds}): backplane receipts audit {run_id[:8]}")
    if found.errors and outcome == "complete":
        last, errors = as_object(added.get("errors")).get("last"), "an error" if found.errors == 1 else "errors"
        lines.append(f"the agent reported {errors} but ended as complete; the last error: {last}")
    patch = as_object(added.get("patch"))
    if (ignored := patch.get("ignored")) and patch.get("bytes"):
        lines.append(f"{counted(ignored, 'ignored file')} changed; the patch does not contain ignored files")
    if outcome == "complete" and (words := fail_on_words(added)):
        lines.append(f"exit code 3: {words}")
    return [one_line(line) for line in lines if line]
