"""Runs as Markdown for the summary of a CI step, and as a JUnit report. Pure."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from backplane.contract.receipt import RunFindings, failed_on, findings_of
from backplane.view.diff import changes
from backplane.view.figures import count, lasting, money
from backplane.view.html import text
from backplane.view.page import Shown, remarks_of, verdict
from backplane.view.text import printable
from backplane.view.why_kinds import HEALTHY


def markdown(runs: Iterable[Shown]) -> Iterator[str]:
    """Yield the runs as Markdown, in pieces."""
    for run in runs:
        picture, end = run.picture, run.picture.ended
        word, tone = verdict(run)
        mark = {"good": "✅", "warn": "⚠️", "dim": "⏳"}.get(tone, "❌")
        yield f"### {mark} {_plain(picture.task[:120] or picture.run_id)}\n\n"
        took = lasting(end.duration_ms) if end is not None and end.duration_ms is not None else "?"
        yield "| outcome | backend | took | tokens in / out | cost |\n|---|---|---|---|---|\n"
        tokens = f"{count(picture.usage.input_tokens)} / {count(picture.usage.output_tokens)}"
        cells = (word, picture.backend, took, tokens, money(picture.cost_usd_micros))
        yield f"| {' | '.join(map(_plain, cells))} |\n\n"
        yield from (f"⚠️ {_plain(line)}\n\n" for line in remarks_of(run))
        if run.diagnosis is not None and run.diagnosis.kind not in HEALTHY:
            yield f"**{_plain(run.diagnosis.verdict)}**\n\n"
            yield from (f"- {_plain(row.text)}\n" for row in run.diagnosis.evidence)
            yield "\n"
        for file in changes((run.patch or "").splitlines())[:50]:
            yield f"- {_plain(file.path)} +{file.added} −{file.removed}\n"
        yield f"\nrun {_plain(picture.run_id)}, receipt {_plain(end.sha256 if end is not None else 'none')}\n\n"


def _plain(foreign: str) -> str:
    """Return a foreign text on one line, with nothing that Markdown or HTML acts on."""
    shown = html.escape(printable(" ".join(foreign.split())), quote=False)
    return "".join(f"\\{character}" if character in "\\`*_[]|~#" else character for character in shown)


def junit(runs: Sequence[Shown]) -> Iterator[str]:
    """Yield the runs as a test report that CI systems read, in pieces.

    A run that ended incomplete is a failure, so is a complete one with a finding of its `fail_on`; a live one is
    skipped. Other findings are properties.
    """
    skipped = sum(run.state == "live" for run in runs)
    bad = sum(run.state != "live" and bool(_failure(run)) for run in runs)
    yield '<?xml version="1.0" encoding="UTF-8"?>\n'
    yield f'<testsuite name="backplane" tests="{len(runs)}" failures="{bad}" skipped="{skipped}">\n'
    for run in runs:
        picture, end = run.picture, run.picture.ended
        seconds = (end.duration_ms or 0) / 1000 if end is not None else 0
        name, backend = text(picture.task[:200] or picture.run_id), text(picture.backend)
        yield f'  <testcase classname="{backend}" name="{name}" time="{seconds:.3f}">'
        properties = "".join(_properties(run))
        yield f"<properties>{properties}</properties>" if properties else ""
        if run.state == "live":
            yield '<skipped message="running: it has not ended yet"/>'
        elif failure := _failure(run):
            evidence = run.diagnosis.evidence if run.diagnosis is not None else ()
            words = text("\n".join([*(row.text for row in evidence), *remarks_of(run)]))
            yield f'<failure message="{text(failure)}">{words}</failure>'
        lines = [f"run {picture.run_id}", *([verdict(run)[0]] if end is not None else []), *remarks_of(run)]
        yield f"<system-out>{text(chr(10).join(lines))}</system-out></testcase>\n"
    yield "</testsuite>\n"


def _failure(run: Shown) -> str:
    """Return why a run counts as failed; an empty text if it does not."""
    ended = run.picture.ended
    if ended is None or ended.outcome != "complete":
        return run.diagnosis.verdict if run.diagnosis is not None else "not complete"
    found = failed_on(ended.added)
    return f"complete, but --fail-on {','.join(found)}" if found else ""


def _properties(run: Shown) -> Iterator[str]:
    """Yield a run's findings as properties of its test case."""
    found = findings_of(run.picture.ended.added) if run.picture.ended is not None else RunFindings()
    for name, value in msgspec.structs.asdict(found).items():
        if value:
            yield f'<property name="{name.replace("_", "-")}" value="{value}"/>'
    for line in remarks_of(run):
        yield f'<property name="remark" value="{text(line)}"/>'
