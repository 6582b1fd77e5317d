"""Runs as Markdown for the summary of a CI step, and as a JUnit report. Pure."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

from backplane.contract.receipt import failed_on
from backplane.view.diff import changes
from backplane.view.html import text
from backplane.view.page import Shown, facts_of, remarks_of, took_of, verdict
from backplane.view.text import printable
from backplane.view.why_kinds import HEALTHY


def markdown(runs: Iterable[Shown]) -> Iterator[str]:
    """Yield the runs as Markdown, in pieces."""
    for run in runs:
        picture, end = run.picture, run.picture.ended
        word, tone = verdict(run)
        mark = {"good": "✅", "warn": "⚠️", "dim": "⏳"}.get(tone, "❌")
        yield f"### {mark} {_plain(picture.task[:120] or picture.run_id)}\n\n"
        facts = facts_of(picture, took_of(run))
        yield "| outcome | backend | took | tokens | cost |\n|---|---|---|---|---|\n"
        cells = (word, picture.backend, *(facts[name] for name in ("took", "tokens", "cost")))
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
    skipped. The output of a test case has the outcome, the findings and the remarks of its run.
    """
    failures = [_failure(run) if run.state != "live" else "" for run in runs]
    skipped = sum(run.state == "live" for run in runs)
    counts = f'tests="{len(runs)}" failures="{sum(map(bool, failures))}" skipped="{skipped}"'
    yield f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuite name="backplane" {counts}>\n'
    for run, failure in zip(runs, failures, strict=True):
        picture, end = run.picture, run.picture.ended
        seconds = (end.duration_ms or 0) / 1000 if end is not None else 0
        name, backend = text(picture.task[:200] or picture.run_id), text(picture.backend)
        yield f'  <testcase classname="{backend}" name="{name}" time="{seconds:.3f}">'
        if run.state == "live":
            yield '<skipped message="running: it has not ended yet"/>'
        elif failure:
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
