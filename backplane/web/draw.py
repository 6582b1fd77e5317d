"""Draws the parts that only the desk has: items of the lists, exchanges, questions, buttons of a run. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

from backplane.contract.receipt import findings_of
from backplane.errors import BackplaneError
from backplane.gateway.record import RecordedExchange
from backplane.receipts.memory import Remembered
from backplane.view.asked import decided
from backplane.view.diff import kind_of
from backplane.view.exchanges import diagnose_exchange, exchange_facts, exchange_standing, figures_of, models_of
from backplane.view.figures import ago, count, counted, elapsed, lasting, milliseconds, money, standing
from backplane.view.html import Html, join, tag, text
from backplane.view.page import NOTHING, Shown
from backplane.view.picture import Picture, ShownQuestion
from backplane.view.text import one_line

NO_RUNS: Final = {
    False: '<li class="none">No runs yet. Start one: <code>backplane run "fix the failing test"</code></li>',
    True: '<li class="none">No run matches the filter.</li>',
}
NO_EXCHANGES: Final = {
    False: '<li class="none">No exchanges yet. Start the gateway: <code>backplane gateway</code></li>',
    True: '<li class="none">No exchange matches the filter.</li>',
}
TASK_CHARS_MAX: Final = 300


OUTPUT: Final = Html("<output></output>")
"""Place in a form for the result of its action, or the error."""


def item(run: Remembered, now_ms: int) -> Html:
    """Draw one run as an item of the list."""
    word, tone = standing(run.state, run.outcome, run.reason, waits=run.waits)
    began_ms = milliseconds(run.started_at)
    age_ms = now_ms - began_ms if began_ms is not None else None
    lasts = elapsed(age_ms // 1000) if run.state == "live" and age_ms is not None else "?"
    tokens = (run.input_tokens or 0) + (run.output_tokens or 0)
    facts = (
        one_line(run.backend) or "?",
        ago(age_ms) if run.state != "live" and age_ms is not None else "",
        lasting(run.duration_ms) if run.duration_ms is not None else lasts,
        f"{count(tokens)} tokens" if tokens else "",
        money(run.cost_usd_micros) if run.cost_usd_micros is not None else "",
        counted(run.files, "file") if run.files is not None else "",
    )
    task = one_line(run.task, TASK_CHARS_MAX) if run.task is not None else "(task unknown)"
    inner = (
        tag("b", text(word), class_=tone),
        tag("span", text(task), class_="task"),
        tag("span", *(tag("span", text(fact)) for fact in facts if fact), class_="dim meta"),
        tag("span", text(one_line(run.cause)), class_=f"{tone} more") if run.cause else NOTHING,
    )
    return tag("li", tag("a", *inner, href=f"/run/{run.run_id}", id=f"run-{run.run_id}"))


def exchange_item(one: RecordedExchange, now_ms: int) -> Html:
    """Draw one exchange of the gateway as an item of the list."""
    word, tone = exchange_standing(one)
    facts = exchange_facts(one, now_ms)
    began_ms = milliseconds(one.began_at)
    shown = (
        facts["client"],
        ago(now_ms - began_ms) if began_ms is not None else "",
        facts["took"],
        figures_of(one),
        money(one.cost_usd_micros) if one.cost_usd_micros is not None else "",
    )
    inner = (
        tag("b", text(word), class_=tone),
        tag("span", text(models_of(one)), class_="task"),
        tag("span", *(tag("span", text(fact)) for fact in shown if fact), class_="dim meta"),
        tag("span", text(facts["error"]), class_=f"{tone} more") if facts["error"] else NOTHING,
    )
    return tag("li", tag("a", *inner, href=f"/gateway/{one.id}", id=f"exchange-{one.id}"))


def exchange(one: RecordedExchange, now_ms: int) -> Html:
    """Draw one exchange of the gateway: why it stands so, its facts, and its losses."""
    word, tone = exchange_standing(one)
    found, facts = diagnose_exchange(one, now_ms), {"id": one.id, **exchange_facts(one, now_ms)}
    status = f", HTTP {one.status}" if one.status is not None else ""
    facts["losses"] = f"{one.losses}; the first are below" if one.losses > len(one.lost) else str(one.losses or "")
    pairs = [join(tag("dt", text(name)), tag("dd", text(words))) for name, words in facts.items() if words]
    lost = [tag("li", tag("code", text(one_line(row)))) for row in one.lost]
    steps = [tag("li", text(step)) for step in found.next]
    return join(
        tag("h1", text(models_of(one))),
        tag("p", tag("b", text(word), class_=tone), text(f"{status}: {found.verdict}")),
        tag("ul", *steps) if steps else NOTHING,
        tag("dl", *pairs, class_="listed"),
        join(tag("h2", text("What the service could not get")), tag("ul", *lost)) if lost else NOTHING,
    )


def question(ask: ShownQuestion, read_only: bool) -> Html:
    """Draw an open question: everything that the answer decides, and the buttons."""
    words = str(ask.body.get("question") or "")
    whole = [*([words] if words and words not in ask.message else []), *decided(ask.body)]
    is_diff = any(one.startswith(("--- ", "@@ ", "diff --git ")) for one in whole)
    body = [tag("span", text(one), class_=kind_of(one) if is_diff else None) for one in whole]
    is_text = ask.kind == "input"
    answers = (
        Html(f'<input type="hidden" name="ask" value="{text(ask.id)}">'),
        Html(f'<input type="hidden" name="number" value="{ask.number}">'),
        tag("label", text("Answer" if is_text else "Reason (optional)"), Html('<input name="words">')),
        NOTHING if is_text else check_box("always", "always in this run"),
        button("Answer" if is_text else "Allow", "decision", "allow", key="a"),
        button("Deny", "decision", "deny", key="d"),
        OUTPUT,
    )
    return tag(
        "section",
        tag("h2", text(one_line(ask.message))),
        tag("pre", *body, class_="diff", tabindex="0") if body else NOTHING,
        NOTHING if read_only else tag("form", *answers, data_act="answer"),
        class_="ask",
        data_ask=str(ask.number),
        aria_label="open question",
    )


def failure(error: BackplaneError) -> Html:
    """Draw the error because of which a run cannot be shown."""
    return tag("p", text(f"{error.code}: {error.message}"), class_="bad")


def check_box(name: str, label: str) -> Html:
    """Return a check box with its label."""
    box = Html(f'<input type="checkbox" name="{name}" value="true">')
    return tag("label", box, text(label), class_="check")


def button(label: str, name: str = "", value: str = "", key: str = "") -> Html:
    """Return a button of a form; `key` is its keyboard shortcut."""
    hint = tag("kbd", text(key)) if key else NOTHING
    return tag("button", text(label), hint, name=name or None, value=value or None, data_key=key or None)


def acts(run: Shown, checkpoints: Sequence[str], *, read_only: bool) -> Html:
    """Draw the buttons of a run: cancel, apply, rewind, save the report, copy the command."""
    drawn = []
    if run.state == "live" and not read_only:
        drawn.append(tag("form", button("Cancel the run"), OUTPUT, data_act="cancel"))
    if run.patch and not read_only:
        boxes = [check_box("merge", "merge changed files")]
        boxes += [check_box("accept_violations", "accept violations")] if findings_of(run.added).violations else []
        drawn.append(tag("form", button("Apply"), button("Check", "check", "true"), *boxes, OUTPUT, data_act="apply"))
        names = [tag("option", text(name)) for name in ("start", *checkpoints)]
        to = tag("label", text("to"), tag("select", *names, name="to"), class_="check")
        drawn.append(tag("form", button("Rewind"), to, OUTPUT, data_act="rewind"))
    drawn.append(tag("button", text("Save report"), type="button", data_report=""))
    if run.picture.task:
        drawn.append(tag("button", text("Copy command"), type="button", data_copy=again(run.picture)))
    return join(*drawn)


def again(picture: Picture) -> str:
    """Return the command line that runs the same task again."""
    options = {"-b": picture.backend, "--root": picture.root, "--model": picture.model or ""}
    words = [word for name, value in options.items() if value for word in (name, value)]
    return shlex.join(["backplane", "run", *words, "--", picture.task])
