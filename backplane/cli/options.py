"""Rows of options: what makes one, and those that several commands have. Imports nothing, as `--help` reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

Row = tuple[tuple[str, ...], dict[str, Any]]
"""Names and keywords of one `add_argument`."""
Late = Callable[[], Row]
"""Makes a row whose words are another room's, which is loaded for it."""


class Rows:
    """Rows that belong together.

    Attributes:
        title: their heading in the help; None for options of which at most one may be given.
    """

    def __init__(self, title: str | None, *rows: Row | Rows) -> None:
        self.title, self.rows = title, rows


def flag(*words: str) -> Row:
    """Return the row of an option without a value: its names and its help."""
    *names, about = words
    return tuple(names), {"action": "store_true", "help": about}


def value(*words: str, **keywords: Any) -> Row:
    """Return the row of an option with a value, or of a word: its names, its placeholder and its help."""
    *names, metavar, about = words
    return tuple(names), {"metavar": metavar, "help": about, **keywords}


def choice(name: str, *words: str, **keywords: Any) -> Row:
    """Return the row of an option with one of these values: its name, the values and its help."""
    *choices, about = words
    return (name,), {"choices": tuple(choices), "help": about, **keywords}


def many(*words: str) -> Row:
    """Return the row of an option that may be given several times: its names, its placeholder and its help."""
    return value(*words, action="append", default=[])


def json(what: str, *schemas: str) -> Row:
    """Return the row of `--json`; its help names the schemas of what is printed then."""
    return flag("--json", f"{what}; schema: {', '.join(schemas)}")


def seconds(text: str) -> float:
    """Seconds as `90`, `1.5`, `90s`, `5m`, `2h` or `1d`. Raises ValueError for what is none."""
    from backplane.view.figures import span_s

    span = span_s(text)
    return float(text) if span is None else float(span)


seconds.__name__ = "time"  # argparse says: invalid time value.

# Rows of several commands ---------------------------------------------------------------------------------------------

CONFIG = value("--config", "FILE", "configuration instead of ./backplane.toml or the user's")
PLAIN = flag("--plain", "only lines, none painted over, as for a screen reader (or set ACCESSIBLE)")
TASK = value("task", "TASK", "what to do, in words")
TASK_OR_ORDER = (
    value("task", "TASK", "what to do, in words", nargs="?"),
    value("--order", "FILE", "work order as JSON instead of TASK; - for stdin; options go over it"),
)
RUN = value("run", "RUN", "run id or its beginning, or `last`")
STORED = value("run", "RUN", "run id or its beginning")
_ANY: Final = "id of a run, or of an order for its newest run, or its beginning; `last`, or `last~2`"
FOUND = value("run", "RUN", f"{_ANY} (last)", nargs="?", default="last")
RECEIPT = value("id", "ID", "run id or its beginning; `last`")
SESSION = value("id", "ID", "session id or its beginning, or `last`")
ORDER = value("order", "ORDER", "the order's id, as `submit` printed it, or its beginning")
ASK: Final = value(
    "ask", "ASK", "the question's id or its beginning (default: the only open one)", nargs="?", default=""
)
DECISION = value("decision", "allow|deny", "what you decide", choices=("allow", "deny"))
TEXT = value("--text", "WORDS", "the answer to a question in words")
KEPT_REASON = value("--reason", "WHY", "kept in the receipt", default="")
SINCE = value("--since", "SPAN", "only runs begun since then, as 90s, 5m, 2h, 3d, 1w")
MODEL = value("--model", "M", "the model it should use")
REQUIRE = many("--require", "CAP[=LEVEL]", "an ability it must have: native, emulated (if no level is given) or any")
ENGINE = value("--engine", "URL", "sqlite:///FILE or postgresql://… (a file in the state folder of this user)")
CONTENT = value("--content", "PLACE", "folder or URL that submitters and workers share (beside the SQLite file)")
PRIORITY = value("--priority", "N", "1 goes first; without one before all that have one", type=int)
ROOT = value("--root", "DIR", "folder to work on (.)")
FILES = (
    many("--include", "GLOB", "only these files, in the copy"),
    many("--exclude", "GLOB", "not these files, in the copy"),
    many("--context", "FILE", "a file it should look at"),
)
POLICY = value("--policy", "FILE", "policy as JSON, or `default`, `strict` or `ci`, which are shipped")
RIGHTS = (
    POLICY,
    many("--allow-tool", "T", "only these tools"),
    many("--deny-tool", "T", "not these tools, beside the rules that count already"),
    flag("--lenient", "take a stranger's order though some of its members are unknown"),
    many(
        "--fail-on",
        "WORDS",
        "exit code 3 for a complete run with one of these findings: denied,false-claims,violations; "
        "or `none` (all three with the policy `ci`, else none)",
    ),
    choice("--isolation", "required", "best_effort", "off", "keep it inside its workspace (best_effort)"),
)
PARAM = many("--param", "KEY=JSON", "a vendor's setting; a.b=1 nests")
LIMITS = (
    value("--max-turns", "N", "turns of the model", type=int),
    value("--max-budget-usd", "X", "money, as far as the backend counts it", type=float),
)
WISHES = (
    value("--type", "T", "simple_query, code_generation, file_editing, shell_execution, code_review, "
          "complex_workflow or custom (custom)"),
    value("--prefer", "P", "speed, quality, cost or balanced (balanced)"),
    value("--priority", "P", "low, normal, high or critical (normal)"),
    value("--strategy", "S", "first_available, cost, latency or balanced (as configured)"),
    value("--max-cost-usd", "X", "most that the run is to cost, by earlier runs or prices", type=float),
    value("--max-latency", "S", "longest that it is to last, by earlier runs, as 90s or 5m", type=seconds),
    flag("--allow-unknown", "a cost or latency that nobody knows satisfies these two"),
    choice("--after-effect", "stop", "hand_over", "where it fails after it changed something (stop)"),
    value("--seed", "N", "spreads orders over equal instances (0)", type=int),
)  # fmt: skip
"""What an order asks of the router; `route.wishes` reads them."""
