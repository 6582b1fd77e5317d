"""Every command and every option, in one table: parser, help, completion and hints are made of it.

It loads no command, so that help costs nothing. `parser` makes argparse's parser of a row of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from backplane.cli import options
from backplane.cli.options import Late, Row, Rows, choice, flag, json, many, seconds, value


class CommandRow:
    """One command, or one command of a command.

    Attributes:
        line: for a list of commands.
        call: file and function here that do it, as `runs:why`; empty where one of its own commands has to be named.
        rows: its options and words.
        parts: its own commands.
        about: the help's first lines; made of `line` where none is given.
        belongs: option → the one that alone makes it mean something.
        defaults: of what is no option here and read all the same.
        inherits: what stands before its word holds here, too.
    """

    def __init__(
        self, line: str, call: str, example: str | Callable[[], str], *rows: Row | Rows | Late, about: str = "",
        parts: dict[str, CommandRow] | None = None, belongs: dict[str, str] | None = None,
        defaults: dict[str, Any] | None = None, inherits: bool = False,
    ) -> None:  # fmt: skip
        self.line, self.call, self.example, self.rows = line, call, example, rows
        self.about = about or f"{line[0].upper()}{line[1:]}."
        self.parts, self.belongs, self.defaults = parts or {}, belongs or {}, defaults or {}
        self.inherits = inherits


# One command each -----------------------------------------------------------------------------------------------------

RUN_EXAMPLE: Final = """
backplane run "make test" --backend shell --root ~/project
backplane run --order order.json --sidecar 'node my-host.mjs' --json > events.jsonl
"""
_RUN_ROWS = (
    *options.TASK_OR_ORDER,
    options.CONFIG,
    Rows(
        "who does it",
        Rows(
            None,
            value("-b", "--backend", "NAME", "a backend (see `backplane backends`), or `replay:RUN`"),
            value("--sidecar", "COMMAND", "any program that speaks the protocol"),
        ),
        flag("--pure", "the same order on the same tree may be served from the store"),
        flag("--with-patch", "with the backend `replay:RUN`: its patch, too"),
        options.MODEL,
        options.REQUIRE,
    ),
    Rows("where no backend is named, the router chooses one (`backplane route`)", *options.WISHES),
    Rows(
        "the conversation",
        flag("--keep", "keep it; its id is shown"),
        value("--resume", "ID", "go on with a kept one; `last` is this backend's last"),
        value("--fork", "ID", "go on with a copy of it"),
        value("--schema", "FILE", "JSON Schema that the answer has to satisfy; - for stdin"),
        many("--mcp", "NAME=COMMAND", "an MCP server for it; NAME=URL for a far one"),
    ),
    Rows(
        "the workspace",
        options.ROOT,
        choice("--mode", "staged", "pass_through", "in a copy, or in place (staged)"),
        choice(
            "--lane", "patch_first", "workspace_first",
            "leave the result as a patch, or apply it when complete (patch_first)",
        ),
        *options.FILES,
        many("--image", "FILE", "a picture it is shown: PNG, JPEG, GIF or WebP"),
        flag("--checkpoints", "keep its state before each tool that may write"),
    ),
    Rows(
        "what it may do",
        *options.RIGHTS,
        value("--on-ask", "HOW", "its questions: deny, allow, prompt (on a terminal), wait (for `backplane "
              "answer` or `watch`), stdin (`answer` lines, with --json), or a command that reads one as JSON and "
              "prints its decision; deny where there is no terminal"),
        many("--pre-tool", "CMD", "a hook: asked before each tool, may deny or change"),
        many("--post-tool", "CMD", "a hook: asked after each tool, may hide or change"),
        options.PARAM,
        many("--env", "K[=V]", "a variable for it; K alone takes ours"),
        value("--env-file", "FILE", "variables for it, K=V a line"),
    ),
    Rows(
        "limits",
        *options.LIMITS,
        value("--timeout", "TIME", "for the whole run, as 90, 90s, 5m, 2h (none)", type=seconds),
        value("--idle-timeout", "TIME", "without a sign of life (300s)", type=seconds),
        value("--hello-timeout", "TIME", "until its hello (10s)", type=seconds),
    ),
    Rows(
        "output",
        many("--tag", "TAG", "find it again by it: a word, or KEY=VALUE"),
        flag("--hash-task", "keep the order with a hash of its task; events may repeat its text, those of `shell` "
             "always do"),
        Rows(
            None,
            flag("-v", "--verbose", "say on stderr where it runs and what was decided"),
            flag("-q", "--quiet", "print the answer alone"),
        ),
        options.PLAIN,
        json("the protocol's own messages, one a line", "envelope_event", "envelope_final", "envelope_fatal"),
        flag("--dry-run", "show the order and who would get it; start nothing"),
        value("--run-id-file", "FILE", "write the run's id there as it begins"),
        value("--receipt", "FILE", "write the receipt there, too; - for stdout"),
        value("--patch", "FILE", "write the patch there, too; - for stdout"),
        value("--sign-key", "FILE", "sign the receipt with this Ed25519 key"),
    ),
)  # fmt: skip

_COMPARE: Final = """
backplane compare "fix the failing test" -b one -b other --check "make test" --repeat 5
backplane compare "fix the failing test" -b mine/large -b mine/small
"""
_ROUTE: Final = """
backplane route "review the last commit" --type code_review
backplane route "fix the parser" --type file_editing --prefer cost --explain
"""
_RUNS: Final = """
backplane runs
backplane runs --failed --since 2d --text "parser"
backplane runs show last
"""
_REPORT: Final = """
backplane report last > run.html
backplane report 3f2a1b0c 9c41d2e7 > both.html
backplane report last --summary >> "$GITHUB_STEP_SUMMARY"
"""
_COMPLETION: Final = """
backplane completion bash > ~/.local/share/bash-completion/completions/backplane
backplane completion zsh > "${fpath[1]}/_backplane"
backplane completion fish > ~/.config/fish/completions/backplane.fish
"""
_RUNS_ROWS = (
    flag("--failed", "only runs that ended and are not complete"),
    flag("--live", "only runs that are at work, those that wait for an answer first"),
    options.SINCE,
    value("--backend", "NAME", "only runs on this backend"),
    value("--folder", "DIR", "only runs in this folder or below it"),
    value("--tag", "TAG", "only runs with this tag, as ticket=42; `ticket` is any of that key"),
    value("--text", "WORDS", "only runs whose task, tags or events have all these words"),
    value("--limit", "N", "at most so many (30)", type=int),
    json("one JSON object a run and line", "cli_runs"),
)
_RUNS_DEFAULTS: Final = {
    **dict.fromkeys(("failed", "live", "json"), False),
    **dict.fromkeys(("since", "backend", "folder", "text", "tag")),
    "limit": 30,
}
_PRUNE_ROWS = (
    value("--keep", "N", "leave the newest so many whole", type=int),
    value("--older", "SPAN", "remove what ended longer ago, with its unit, as 12h or 90d"),
    value("--size", "BYTES", "leave files of so many bytes together, as 500m or 2g"),
    flag("--dry-run", "say how many would go; remove nothing"),
)
RUNS_PARTS: Final = {
    "list": CommandRow(
        "list runs, live ones first, then the newest", "runs:list_runs", "backplane runs list", *_RUNS_ROWS,
        inherits=True,
    ),
    "show": CommandRow(
        "show one run: task, state, cause, cost, files", "runs:show_run", "backplane runs show last", options.FOUND,
        json("the run as one JSON object", "cli_runs"),
    ),
    "prune": CommandRow(
        "remove what is kept of older runs; their receipts' places in the chain stay", "receipts:prune",
        "backplane runs prune --older 90d", *_PRUNE_ROWS,
    ),
}  # fmt: skip

RECEIPTS_PARTS: Final = {
    "list": CommandRow(
        "list receipts, newest first", "receipts:list_receipts", "backplane receipts list --limit 5",
        value("--limit", "N", "at most so many (50)", type=int, default=50),
        json("one JSON object a receipt and line", "cli_receipts_list"),
    ),
    "show": CommandRow(
        "show one receipt", "receipts:show_receipt", "backplane receipts show 3f2a --json", options.RECEIPT,
        json("the whole receipt in canonical bytes", "receipt_written"),
    ),
    "verify": CommandRow(
        "check hashes, of everything stored if nothing is named", "receipts:verify",
        "backplane receipts verify 3f2a\nbackplane receipts verify receipt.json",
        value("names", "FILE-or-ID", "a receipt's file, an exported folder, a run id or its beginning", nargs="*"),
        value("--checkpoint", "FILE", "kept from earlier: shows a cut tail, too"),
        value("--key", "PUB", "what has no signature by this public key is a fault, too"),
        json("what was checked and each fault as one JSON object", "cli_receipts_verify"),
    ),
    "audit": CommandRow(
        "hold what the host claimed against what was seen; exit code 1 where a claim is false, 4 where none was judged",
        "receipts:audit_receipt", "backplane receipts audit 3f2a",
        value("id", "RUN", "run id or its beginning; `last`"),
        json("the verdicts as one JSON object", "cli_receipts_audit"),
    ),
    "diff": CommandRow(
        "compare two receipts; exit code 1 where they differ", "receipts:diff", "backplane receipts diff 3f2a 91bc",
        value("left", "A", "run id or file"),
        value("right", "B", "run id or file"),
    ),
    "export": CommandRow(
        "write receipt, patch and journal as one folder", "receipts:export_run", "backplane receipts export 3f2a",
        options.RECEIPT,
        value("--to", "DIR", "a new folder (./RUN-ID)"),
    ),
    "import": CommandRow(
        "keep a receipt from elsewhere, once it verifies", "receipts:import_run",
        "backplane receipts import ./3f2a1b0c-…",
        value("file", "FILE", "a folder of `export`, or a receipt alone"),
    ),
    "checkpoint": CommandRow(
        "print the head of the chain, to be kept elsewhere for `verify --checkpoint`", "receipts:checkpoint",
        "backplane receipts checkpoint > /elsewhere/checkpoint.json",
        flag("--signed", "in an envelope signed with `signing_key` of the settings"),
        options.CONFIG, belongs={"--config": "--signed"},
    ),
    "prune": CommandRow(
        "remove the content of older receipts; their places in the chain stay and still verify", "receipts:prune",
        "backplane receipts prune --keep 1000\nbackplane receipts prune --older 90d --size 2g", *_PRUNE_ROWS,
    ),
}  # fmt: skip

GO_ON: Final = "Go on with the work where it was left."
"""Said to the successor where nothing else is."""
_TURN_ROWS = (
    choice("--on-ask", "deny", "allow", "prompt", "its questions; deny without a terminal"),
    value("--policy", "FILE", "one that tightens the session's: JSON, or a shipped one's name"),
    options.CONFIG,
)
SESSIONS_PARTS: Final = {
    "list": CommandRow(
        "list sessions, the last used first", "sessions:list_sessions", "backplane sessions list",
        json("one JSON object a session and line", "session"),
    ),
    "show": CommandRow(
        "show what was said in a session", "sessions:show_session", "backplane sessions show last",
        value("id", "ID", "session id or its beginning, or `last` (last)", nargs="?", default="last"),
        json("the session as one JSON object", "session"),
    ),
    "resume": CommandRow(
        "go on with a session", "sessions:resume", 'backplane sessions resume last "go on"', options.SESSION,
        value("words", "WORDS", "what to say: one turn; without it, as `chat --resume`", nargs="?"),
        many("--image", "FILE", "a picture, shown with the words"), *_TURN_ROWS,
    ),
    "fork": CommandRow(
        "copy a session, and print the copy's id", "sessions:fork", "backplane sessions fork last --at 4",
        options.SESSION,
        value("--at", "N", "only its first N messages", type=int), options.CONFIG,
    ),
    "export": CommandRow(
        "write a session's file", "sessions:export_session",
        "backplane sessions export last session.json\nbackplane sessions export last --to VENDOR --into-store",
        options.SESSION,
        value("file", "FILE", "a new file; - for stdout (-)", nargs="?", default="-"),
        value("--to", "VENDOR", "in the form that this one's program goes on with"),
        flag("--into-store", "put it where that program looks for it; print its id"),
        belongs={"--into-store": "--to"},
    ),
    "import": CommandRow(
        "take a session in, and print its new id", "sessions:import_session",
        "backplane sessions import session.json\nbackplane sessions import --from VENDOR last --backend mine",
        value("file", "FILE", "a file that `export` wrote; with --from a path, an id, or `last`"),
        value("--from", "VENDOR", "one that its program kept", dest="vendor"),
        value("--backend", "NAME", "go on with this one (the file's; the vendor's)"), options.CONFIG,
    ),
    "handover": CommandRow(
        "go on with another backend", "sessions:hand_over", "backplane sessions handover last --to mine",
        options.SESSION,
        value("words", "WORDS", f"what to say ({GO_ON})", nargs="?", default=GO_ON),
        value("--to", "NAME", "the backend that goes on", required=True),
        value("--model", "M", "its model (its own choice)"), *_TURN_ROWS,
    ),
}  # fmt: skip

_QUEUED = (options.ORDER, options.ENGINE)
QUEUE_PARTS: Final = {
    "list": CommandRow(
        "list orders, the newest first", "queue:list_orders", "backplane queue list --label gpu", options.ENGINE,
        value("--limit", "N", "the newest N (50)", type=int, default=50),
        value("--label", "L", "only orders with this one"), json("one JSON object an order and line", "cli_queue_list"),
    ),
    "show": CommandRow(
        "say where an order is; a done one's receipt and patch are kept here, verified", "queue:show_order",
        "backplane queue show ORDER", *_QUEUED, options.CONTENT, json("all of it as one JSON object", "cli_queue_show"),
    ),
    "cancel": CommandRow(
        "end an order; it has a receipt all the same", "queue:cancel_order", "backplane queue cancel ORDER", *_QUEUED,
        options.KEPT_REASON,
    ),
    "answer": CommandRow(
        "answer what an order asks that was submitted with --asks", "queue:answer_order",
        "backplane queue answer ORDER allow", *_QUEUED,
        options.ASK, options.DECISION, options.KEPT_REASON,
        options.TEXT,
    ),
    "events": CommandRow(
        "print the events of an order", "queue:print_events", "backplane queue events ORDER --follow", *_QUEUED,
        options.CONTENT,
        flag("--follow", "wait for more until the end; `watch` shows it meanwhile"),
        value("--after", "CURSOR", "only those after this one", type=int, default=0),
        belongs={"--content": "--follow"},
    ),
    "status": CommandRow(
        "count orders, and name the workers", "queue:count_orders", "backplane queue status", options.ENGINE,
        value("--label", "L", "only orders and workers with this one"),
        json("the counts and workers as one JSON object", "cli_queue_status"),
    ),
    "limit": CommandRow(
        "show or set limits; `off` takes one away", "queue:set_limits",
        "backplane queue limit --label gpu --concurrency 4 --rate 10/60 --budget-usd 50", options.ENGINE,
        value("--label", "L", "whose orders (default)", default="default"),
        value("--concurrency", "N", "orders at once, over all workers of the label"),
        value("--rate", "N/S", "orders begun at most in so many seconds"),
        value("--budget-usd", "X", "what the whole queue may cost, all labels, from its beginning"),
        json("what holds then as one JSON object", "cli_queue_limit"),
    ),
    "prune": CommandRow(
        "remove all but the newest ended orders", "queue:prune_orders", "backplane queue prune --keep 1000",
        options.ENGINE,
        value("--keep", "N", "the newest ended orders (1000)", type=int, default=1000),
    ),
}  # fmt: skip


def _protocol() -> Row:
    from backplane.upstream.presets import PROTOCOLS

    return value("--protocol", "P", f"what it speaks: {', '.join(PROTOCOLS)}")


def _from() -> Row:
    from backplane.dialects import DIALECTS

    names = f"one of {', '.join(DIALECTS)}; augment: its requests"
    return value("--from", "DIALECT", names, dest="source", required=True)


def _translate_example() -> str:
    from backplane.dialects import DIALECTS

    first, second, *_ = DIALECTS
    return f"backplane translate --from {first} --to {second} --kind request request.json"


# All of them ----------------------------------------------------------------------------------------------------------

GROUPS: Final[dict[str, dict[str, CommandRow]]] = {
    "begin": {
        "init": CommandRow(
            "write a first backplane.toml here, from what is ready on this machine", "init:init",
            "backplane init\nbackplane init --backend shell --policy ci --yes",
            value("--backend", "NAME", "taken without a question (see `backplane backends`)"),
            choice("--policy", "default", "strict", "ci", "taken without a question"),
            flag("-y", "--yes", "ask nothing: the first that is ready, and `default`"),
            about="Write a first backplane.toml here: which backend takes orders that name none, and under which "
            "policy.",
        ),
        "demo": CommandRow(
            "run an order from a bug to its fix and receipt, without a key or a network", "demo:demo", "backplane demo",
            flag("--keep", "leave the sample's folder for a look around"),
            about="Run an order on a small sample with a bug: staged, fixed, tested, sealed, verified, applied.",
        ),
        "doctor": CommandRow(
            "say what this machine and configuration can do", "doctor:doctor", "backplane doctor",
            Rows(
                None,
                flag("--probe", "also try each model service (some tokens each) and MCP server"),
                value("--url", "URL", "only try this base address of a model service"),
            ),
            _protocol,
            value("--key-env", "NAME", "the variable that holds the key"),
            value("--model", "M", "the model to ask; else the first that is listed"),
            options.CONFIG,
            json("one JSON object a finding and line", "cli_doctor"),
            about="Say what this machine and configuration can do and what is missing.",
            belongs=dict.fromkeys(("--protocol", "--key-env", "--model"), "--url"),
        ),
        "backends": CommandRow(
            "list the backends, ready or why not", "backends:show_backends",
            "backplane backends\nbackplane backends --probe mine\nbackplane backends --matrix",
            value("names", "NAME", "these alone; without one all", nargs="*"),
            Rows(
                None,
                flag("--probe", "let each agent show its abilities to a scripted model"),
                flag("--matrix", "abilities as documented, as said, and as shown"),
            ),
            options.CONFIG,
            json("one JSON object a backend and line", "cli_backends", "cli_backends_probe", "cli_backends_matrix"),
            about="List the backends: ready, or why not and how to mend it; or try what an agent can do.",
        ),
    },
    "run work": {
        "run": CommandRow(
            "run one work order, from start to receipt", "run:run", RUN_EXAMPLE, *_RUN_ROWS,
        ),
        "route": CommandRow(
            "say which backend an order would get, and why", "route:route", _ROUTE, options.TASK,
            flag("--explain", "say of every other backend why not, and what would help"),
            value("--model", "M", "the one model that will do"), options.REQUIRE, *options.WISHES, options.CONFIG,
            json("the decision as one JSON object", "cli_route"),
            about="Say which backend an order would get, and why; nothing is started.",
        ),
        "compare": CommandRow(
            "run one order on several backends from the same tree", "compare:compare_backends", _COMPARE, options.TASK,
            many("-b", "--backend", "NAME[/MODEL]", "a backend, two at least"),
            value("--check", "CMD", "run in a copy with each patch; exit code 0 passes"),
            value("--repeat", "N", "rounds (1); three are the least for a verdict", type=int, default=1),
            value("--root", "DIR", "folder to work on (.)", default="."),
            value("--timeout", "TIME", "for one run, as 90s or 5m (none)", type=seconds), options.CONFIG,
            json("the comparison as one JSON object", "cli_compare"),
            about="Run one order on several backends from the same tree; nothing is applied. Exit code 1 where no run "
            "succeeded.",
        ),
        "apply": CommandRow(
            "apply a run's patch to the original workspace", "apply:apply",
            "backplane apply 3f2a --check\nbackplane apply 3f2a\nbackplane apply last --root ~/project", options.STORED,
            value("--root", "DIR", "into this folder (the one that the run was made for)"),
            value("--at", "NAME", "as it was at a checkpoint, by name or id (the end)"),
            flag("--check", "only say whether it would apply"),
            flag("--accept-violations", "although the run did not keep its policy"),
            flag("--merge", "merge where the files have changed since"),
            about="Apply a run's patch to the original workspace: all of it or nothing.",
        ),
        "checkpoints": CommandRow(
            "list the states of a run's workspace that were kept", "checkpoints:list_checkpoints",
            "backplane checkpoints 3f2a", json("one JSON object a checkpoint and line", "cli_checkpoints"),
            options.STORED,
            about="List the checkpoints of a run that has ended.",
        ),
        "rewind": CommandRow(
            "take a workspace from a run's result back to one of these", "checkpoints:rewind",
            "backplane rewind 3f2a before-the-tests\nbackplane rewind 3f2a start --check",
            flag("--check", "only say whether it would work"), options.STORED,
            value("name", "NAME", "a checkpoint's name or id, or start"),
            about="Take the workspace that has a run's result back to one of its checkpoints: all of it or nothing.",
        ),
    },
    "converse": {
        "chat": CommandRow(
            "hold a conversation in the terminal", "chat:chat",
            "backplane chat --backend sonnet\nbackplane chat --resume last",
            value("--backend", "NAME", "a backend (see `backplane backends`)"),
            value("--resume", "ID", "go on with a session; `last` is the one that was used last"), options.MODEL,
            many("--image", "FILE", "a picture, shown with your first words"),
            value("--system", "TEXT", "instructions for the whole conversation"), options.ROOT,
            choice("--mode", "staged", "pass_through", "in a copy, or in place (staged; or as before)"),
            value("--policy", "FILE", "JSON, or `default`, `strict` or `ci`; with --resume it only tightens"),
            value("--max-turns", "N", "turns of the model in one turn of yours", type=int),
            choice("--on-ask", "deny", "allow", "prompt", "its questions (prompt; deny without a terminal)"),
            options.CONFIG,
        ),
        "sessions": CommandRow(
            "find conversations again, go on, fork, hand over to another backend", "sessions:list_sessions",
            'backplane sessions list\nbackplane sessions resume last "and now the tests"\n'
            "backplane sessions handover last --to mine",
            about="Find conversations again, and go on with them.", parts=SESSIONS_PARTS, defaults={"json": False},
        ),
    },
    "see and steer runs": {
        "runs": CommandRow(
            "find runs again, live and ended ones: task, state, cause, cost", "runs:list_runs", _RUNS, *_RUNS_ROWS,
            about="Find runs again, live and ended ones.", parts=RUNS_PARTS, defaults=_RUNS_DEFAULTS,
        ),
        "watch": CommandRow(
            "follow a run from any terminal, answer what it asks; leaving ends nothing", "watch:watch",
            "backplane watch\nbackplane watch 3f2a1b0c",
            value("run", "RUN", "id of a run or an order, or its beginning; `last` (last)", nargs="?",
                  default="last"),
            options.PLAIN,
            about="Follow a run as its own terminal shows it, and answer what it asks. Ctrl-C leaves, and ends "
            "nothing.",
        ),
        "why": CommandRow(
            "say what a run waits for, or why it failed, and the next step", "runs:explain",
            "backplane why last\nbackplane why 3f2a1b0c", options.FOUND,
            value("--engine", "URL", "the queue of an order that has no run here"),
            json("the diagnosis as one JSON object", "cli_why"),
            about="Say what a run waits for, or why it ended as it did: the evidence, and the next step.",
        ),
        "answer": CommandRow(
            "answer what a live run asks, from any terminal", "doors:answer", "backplane answer last allow",
            options.RUN,
            options.ASK, options.DECISION,
            value("--reason", "WHY", "told to the agent, kept in the receipt", default=""), options.TEXT,
            flag("--always", "the same for this tool until the run ends"),
            about="Answer what a live run asks, from any terminal; `why RUN` and `watch RUN` show what it is.",
        ),
        "cancel": CommandRow(
            "end a live run in order, with its receipt", "doors:cancel",
            "backplane cancel last --reason 'wrong branch'", options.RUN, options.KEPT_REASON,
            about="End a live run in order: its host is stopped, what it did is kept, its receipt is sealed.",
        ),
        "report": CommandRow(
            "write a run as one HTML page, as Markdown or as a test report", "report:write_report", _REPORT,
            value("runs", "RUN", "run ids or their beginnings, `last`, or `last~2`", nargs="+"),
            Rows(
                None,
                flag("--summary", "Markdown instead, for the summary of a CI step"),
                flag("--junit", "a JUnit test report instead; an incomplete end is a failure"),
            ),
            flag("--full", "draw every row, for paper; a long run's page opens slowly"),
            value("--omit", "WHAT", "of a page for others: outputs, prompts, paths (folders of absolute paths; names "
                  "in the workspace stay), with commas between", default=""),
            about="Write a run, or two side by side, as one HTML file that needs nothing beside it.",
        ),
        "web": CommandRow(
            "show runs in a browser: followed, answered, cancelled, started", "web:serve_web",
            "backplane web\nbackplane web --read-only --port 8765",
            value("--port", "N", "on 127.0.0.1 (any that is free)", type=int, default=0),
            flag("--read-only", "nothing can be answered, cancelled or started there"),
            flag("--open", "open it in the browser, with a code that serves once"), options.CONFIG,
            about="Show runs in a browser of this machine: live ones as they go on, their questions answered there, "
            "new ones started in the folders of `[web] roots`. Ctrl-C ends it, and the runs that it started.",
        ),
        "cost": CommandRow(
            "say what runs have cost, by provider, model, day, session or folder", "cost:cost",
            "backplane cost --by provider\nbackplane cost --by day --since 7d",
            choice("--by", "provider", "model", "day", "session", "folder", "what is summed up (provider)",
                   default="provider"),
            options.SINCE, json("one JSON object a sum and line, the last of all runs", "cli_cost"),
            about="Say what runs have cost, as far as that is known.",
        ),
    },
    "the record": {
        "receipts": CommandRow(
            "list, show, verify, compare and move receipts", "receipts:list_receipts",
            "backplane receipts list\nbackplane receipts show 3f2a\nbackplane receipts verify receipt.json",
            about="Work with the receipts that are stored here.", parts=RECEIPTS_PARTS,
            defaults={"limit": 50, "json": False},
        ),
        "replay": CommandRow(
            "judge stored runs by another policy: each decision that would differ", "replay:replay",
            "backplane replay --policy strict last\nbackplane replay --policy new.json --all",
            value("runs", "RUN", "run id or its beginning, `last`, or `last~2`", nargs="*"),
            value("--policy", "NEW", "the policy to try: a file, or a shipped one"),
            flag("--all", "every stored run"), json("one JSON object a run and line", "cli_replay"),
            about="Judge stored runs by another policy and list each decision that would differ; nothing is started.",
        ),
    },
    "many machines": {
        "submit": CommandRow(
            "put a work order into a queue, for a worker on any machine", "queue:submit",
            'backplane submit "make test" --backend shell --root ~/project\n'
            "backplane submit --order order.json --engine postgresql://me@db/work --content /mnt/content",
            *options.TASK_OR_ORDER, options.CONFIG, options.ENGINE, options.CONTENT,
            Rows(
                "the queue",
                value("--label", "L", "which workers may take it (default)", default="default"), options.PRIORITY,
                choice("--on-lost-worker", "rerun", "fail", "when its worker dies: once more, or a failed receipt"),
                flag("--asks", "what the policy leaves open waits for `queue answer`"),
                flag("--wait", "wait for its end and keep its receipt"),
                value("--jsonl", "FILE", "many orders, one a line as JSON; - for stdin"),
                flag("--with-ignored", "take files along that git ignores"),
                many("--secret", "NAME", "a variable that the worker gives the agent"),
            ),
            Rows("who does it", value("-b", "--backend", "NAME", "a backend of the worker's"), options.MODEL,
                 options.REQUIRE),
            Rows("the workspace", value("--root", "DIR", "folder whose copy travels (.)"), *options.FILES),
            Rows("what it may do", *options.RIGHTS, options.PARAM),
            Rows("limits", *options.LIMITS),
            about="Put a work order into a queue; its id is printed, and a worker on any machine runs it.",
            # What `order.build` reads of a `run`, and has no meaning in a queue.
            defaults={**dict.fromkeys(("mode", "lane", "env_file")), "env": [], "image": [],
                      "checkpoints": False, "pure": False},
        ),
        "worker": CommandRow(
            "take orders of a queue and run them here", "queue:work", "backplane worker --slots 4 --label gpu",
            value("--slots", "N", "orders at once (1)", type=int, default=1),
            value("--label", "L", "which orders to take (default)", default="default"),
            options.CONFIG, options.ENGINE, options.CONTENT,
            value("--lease", "TIME", "without a sign, after which a worker is dead (20s)", type=seconds),
            value("--poll", "TIME", "between two looks for orders (1s)", type=seconds),
            about="Take orders of a queue and run them here, until a signal: then no more are taken, and those that "
            "run are waited for; a second signal leaves them to the other workers.",
        ),
        "queue": CommandRow(
            "look into a queue: list, show, cancel, events, status", "",
            "backplane queue events ORDER --follow\nbackplane queue show ORDER && backplane why last\n"
            "backplane queue limit --label gpu --concurrency 4 --rate 10/60 --budget-usd 50",
            about="Look into a queue, or end one of its orders.", parts=QUEUE_PARTS,
        ),
    },
    "for programs": {
        "serve": CommandRow(
            "be a host: runs for programs in any language, on stdin and stdout", "serve:serve",
            "backplane serve < orders.jsonl\nssh build-machine backplane serve\n"
            "backplane serve --engine postgresql://me@db/work --content /mnt/content",
            options.CONFIG,
            Rows(
                "a queue in place of this machine",
                value("--engine", "URL", "hand each run to a queue: sqlite:///FILE or postgresql://…"),
                value("--content", "PLACE", "folder or URL that all machines share (beside the SQLite file)"),
                value("--label", "L", "which workers may take its orders (default)", default="default"),
                options.PRIORITY,
            ),
            about="Speak the sidecar protocol on stdin and stdout: each `run` that comes in is a run of this control "
            "plane. contracts/sidecar.md is the protocol, contracts/clients/ has clients.",
            belongs=dict.fromkeys(("--content", "--label", "--priority"), "--engine"),
        ),
        "mcp": CommandRow(
            "be an MCP server: run, receipts and validate for agents", "mcp:serve", "backplane mcp --root ~/project",
            options.CONFIG,
            value("--root", "DIR", "the folder in which runs may work (.)"),
            about="Be a server of the Model Context Protocol on stdin and stdout, with the tools run, receipts and "
            "validate. An agent starts it by this command.",
        ),
        "validate": CommandRow(
            "check work orders, receipts, policies and other files", "checks:validate_files",
            "backplane validate order.json backplane.toml",
            value("files", "FILE", "- for stdin", nargs="+"),
            about="Check files: work order, receipt, event, envelope, transcript (.jsonl), policy or configuration, "
            "recognised by content. Every fault with its JSON pointer.",
        ),
        "schema": CommandRow(
            "print a JSON Schema", "checks:print_schema", "backplane schema work_order",
            value("name", "NAME", "of one; without it all names are listed", nargs="?"),
            about="Print a JSON Schema, or the names there are.",
        ),
        "translate": CommandRow(
            "say one vendor's request, response or stream in another's dialect", "translate:translate_input",
            _translate_example, _from,
            value("--to", "DIALECT", "of the same; augment: its streams", dest="target", required=True),
            choice("--kind", "request", "response", "stream", "of FILE (request)", default="request"),
            value("--asked", "FILE", "the augment request that a stream answers: its flags are kept"),
            value("--losses", "FILE", "write the losses there, one JSON object a line; schema: "
                  "cli_translate_loss"),
            flag("--all", "every loss a line; else those of the form are grouped"),
            flag("--strict", "exit code 1 when anything but the form is lost"),
            value("file", "FILE", "- or nothing for stdin", nargs="?", default="-"),
            about="Translate a request, a response or a stream from one vendor's dialect to another's. Losses go to "
            "stderr: lines for people on a terminal, else one JSON object a line.",
        ),
        "conform": CommandRow(
            "check any program that claims to be a host", "checks:conform_host",
            "backplane conform -- node my-host.mjs",
            json("one JSON object with everything", "cli_conform"),
            flag("--failed", "print only the failed checks"),
            value("command", "COMMAND", "after --: the program and its arguments", nargs="+"),
            about="Check any program that claims to be a host; exit code 1 when it does not behave.",
        ),
    },
    "about": {
        "explain": CommandRow(
            "explain an error code", "explain:explain", "backplane explain backend_crashed",
            value("code", "CODE", "as an error's first line names it", nargs="?"),
            about="Explain an error code, or list all of them.",
        ),
        "completion": CommandRow(
            "print what completes commands and options in your shell", "completion:print_completion", _COMPLETION,
            choice("shell", "bash", "zsh", "fish", "your shell"),
            choice("--names", "runs", "backends", "sessions", "print these names instead of the script"),
            about="Print the completion of a shell; put it where the shell looks, as below.",
        ),
        "version": CommandRow(
            "print the version", "version:version", "backplane version --json",
            json("version, contract and Python as one JSON object", "cli_version"),
        ),
    },
}  # fmt: skip
"""Heading of the help → its commands. The order is the help's."""

COMMANDS: Final = {name: command for group in GROUPS.values() for name, command in group.items()}
