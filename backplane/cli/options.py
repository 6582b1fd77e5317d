"""Options that several commands have, and short ways to add one."""

from __future__ import annotations

import argparse
import time
from typing import Any

from backplane.cli.command import Parser

Group = argparse._ActionsContainer
"""A parser, or a group of its options."""


def flag(p: Group, *names: str, help: str) -> None:
    """Add an option without a value."""
    p.add_argument(*names, action="store_true", help=help)


def value(p: Group, *names: str, help: str, **keywords: Any) -> None:
    """Add an option with a value, or a word; `metavar` is its placeholder."""
    p.add_argument(*names, help=help, **keywords)


def many(p: Group, *names: str, metavar: str, help: str) -> None:
    """Add an option that may be given several times."""
    p.add_argument(*names, metavar=metavar, action="append", default=[], help=f"{help} (repeatable)")


def json(p: Group, what: str, *schemas: str) -> None:
    """Add `--json`; its help names the schemas of what it prints."""
    flag(p, "--json", help=f"print {what} (schema: {', '.join(schemas)})")


def seconds(text: str) -> float:
    """Return the seconds of `90`, `1.5`, `90s`, `5m`, `2h` or `1d`. Raises ValueError for other text."""
    from backplane.view.figures import span_s

    span = span_s(text)
    return float(text) if span is None else float(span)


def ago(text: str) -> int:
    """Return the time a span before now, in milliseconds since 1970; a number without unit is no span."""
    from backplane.view.figures import span_s

    span = None if text.strip().isdigit() else span_s(text)
    if span is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a span of time such as 90s, 5m, 2h, 3d or 1w")
    return time.time_ns() // 1_000_000 - span * 1000


def number(text: str) -> int:
    """Return a count that SQLite can take. Raises ValueError for other text."""
    if not 0 <= (found := int(text)) < 1 << 63:
        raise ValueError
    return found


seconds.__name__ = "time"  # argparse says: invalid time value.

# What a command is about ----------------------------------------------------------------------------------------------


def run_id(p: Group, *, optional: bool = False) -> None:
    """Add the word RUN; an optional one is `last` by default."""
    default: dict[str, Any] = {"nargs": "?", "default": "last"} if optional else {}
    value(p, "run", metavar="RUN", help="run id or a prefix of it, `last`, or `last~2` (two runs earlier)", **default)


def session_id(p: Group) -> None:
    value(p, "id", metavar="ID", help="session id or a prefix of it, or `last`")


def since(p: Group) -> None:
    within = "count only runs that began within this time, such as 90s, 5m, 2h, 3d or 1w"
    value(p, "--since", metavar="SPAN", type=ago, help=within)


def config(p: Group) -> None:
    value(
        p,
        "--config",
        metavar="FILE",
        help="configuration file (default: ./backplane.toml, else the one in your home folder)",
    )


def answer(p: Group) -> None:
    """Add the words and options of an answer to an approval or a question."""
    one = "id of the question or a prefix of it; required if several questions are open"
    value(p, "ask", metavar="ASK", nargs="?", default="", help=one)
    value(p, "decision", metavar="allow|deny", choices=("allow", "deny"), help="allow or deny the call")
    value(p, "--text", metavar="WORDS", help="answer a question with this text")
    reason(p)


def reason(p: Group) -> None:
    value(p, "--reason", metavar="WHY", default="", help="store this reason in the receipt")


def task_or_order(p: Parser) -> None:
    """Add the two ways to say what to do."""
    p.usage = f"{p.prog} [options] (TASK | --order FILE)"
    value(p, "task", metavar="TASK", nargs="?", help="task for the agent, in words; - reads it from stdin")
    value(p, "--order", metavar="FILE", help="read a work order as JSON (- for stdin); other options override it")


def model(p: Group) -> None:
    value(p, "-m", "--model", metavar="MODEL", help="use this model (default: the backend's choice)")


def root(p: Group) -> None:
    value(p, "-C", "--root", metavar="DIR", help="work on this folder (default: the current one)")


def in_place(p: Group) -> None:
    flag(p, "--in-place", help="work in the folder itself (default: in a copy of it)")


def files(p: Group) -> None:
    many(p, "--include", metavar="GLOB", help="copy only these files for the agent")
    many(p, "--exclude", metavar="GLOB", help="leave these files out of the copy")
    many(p, "--context", metavar="FILE", help="point the agent to this file as context for the task")


def on_ask(p: Group) -> None:
    """Add who answers the approvals of a conversation."""
    how = "answer requests for approval in this way (default: prompt on a terminal, else deny)"
    value(p, "--on-ask", choices=("deny", "allow", "prompt"), help=how)


def bounds(p: Group) -> None:
    """Add what the agent needs, may do and may spend."""
    level = "refuse a backend without this capability; LEVEL is native, emulated (default) or any"
    many(p, "--require", metavar="CAP[=LEVEL]", help=level)
    value(p, "--policy", metavar="FILE", help="JSON policy file, or a built-in policy: default, strict or ci")
    many(p, "--allow-tool", metavar="TOOL", help="allow only this tool and the tools in allowed_tools of the policy")
    many(p, "--deny-tool", metavar="TOOL", help="forbid this tool, in addition to the policy's rules")
    sandbox = "require, try or skip the sandbox around the agent (default: best_effort)"
    value(p, "--isolation", choices=("required", "best_effort", "off"), help=sandbox)
    findings = "exit with 3 if a complete run has one of: denied, false-claims, violations; `none` turns this off"
    many(p, "--fail-on", metavar="WORDS", help=findings)
    value(p, "--max-turns", metavar="N", type=int, help="end the run after this many turns of the model")
    cost = "end the run when it has cost this many US dollars; the backend must report its costs"
    value(p, "--max-budget-usd", metavar="USD", type=float, help=cost)
    limit = "wait this long for limits of the model's service, such as 6h (default: do not wait)"
    value(p, "--wait-for-limit", metavar="SPAN", type=seconds, help=limit)
    flag(p, "--lenient", help="accept an order with unknown members")
    many(p, "--param", metavar="KEY=JSON", help="set a member of config.vendor in the order, such as abp.route.seed=7")


def queue(p: Group, *, content: bool = False) -> None:
    """Add where a queue is."""
    url = "the queue's database: sqlite:///FILE or postgresql://… (default: a file in the state folder)"
    value(p, "--engine", metavar="URL", help=url)
    if content:
        place = "folder or URL of the files that submitters and workers share (default: beside the SQLite file)"
        value(p, "--content", metavar="PLACE", help=place)


def order_id(p: Group) -> None:
    value(p, "order", metavar="ORDER", help="order id that `queue submit` printed, or a prefix of it")


def priority(p: Group) -> None:
    first = "run orders with a lower number first; an order without a number runs before all others"
    value(p, "--priority", metavar="N", type=int, help=first)
