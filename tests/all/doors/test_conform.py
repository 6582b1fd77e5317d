"""The conformance checks: good hosts reach their level, and each way of being wrong is found by its rule."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
import time
from collections.abc import Collection
from functools import partial

import anyio
import pytest

from backplane import resources
from backplane.conform.rules import rules
from backplane.conform.runner import Bounds, Report, checks, conform
from backplane.conform.steps import ENDS, FAULTS, VERBS
from backplane.conform.verdict import printable
from backplane.errors import BackendError

QUICK = Bounds(hello_s=5, run_s=1.2, exit_s=0.4, grace_s=0.5, pong_s=0.5, closed_s=0.6, quiet_s=0.05, slack_s=0.2)
"""For hosts that answer at once, or never."""

CHECKS = checks()
ALL = {rule for _, _, rule in CHECKS}
PATIENT = Bounds(quiet_s=0.05)
"""For hosts that must pass, on a busy machine too."""

HOST = r"""
import json, os, signal, sys, time
NOW = "2026-01-15T12:00:00Z"
HELLO = {"t": "hello", "contract_version": "abp/v0.1", "backend": {"id": "b"}, "capabilities": {"streaming": "native"}}
RAN = []
def say(message):
    text = message if isinstance(message, str) else json.dumps(message)
    os.write(1, (text + "\n").encode())
def lenient(line):
    try:
        return json.loads(line)
    except ValueError:
        return {"t": "run", "id": "bad", "work_order": {"id": "0" * 32}}
def careful(line):
    try:
        return json.loads(line)
    except ValueError:
        return {}
def event(ref, **members):
    return {"t": "event", "ref_id": ref, "event": {"ts": NOW, "type": "assistant_message", "text": "x", **members}}
def receipt(id, order, **members):
    meta = {"run_id": id if len(id) == 36 else order, "work_order_id": order, "contract_version": "abp/v0.1",
            "started_at": NOW, "finished_at": NOW, "duration_ms": 1}
    return {"meta": meta, "backend": {"id": "b"}, "capabilities": {}, "usage_raw": {}, "usage": {}, "trace": [],
            "artifacts": [], "verification": {"harness_ok": True}, "outcome": "complete", **members}
def end(id, order, **members):
    say({"t": "final", "ref_id": id, "receipt": receipt(id, order, **members)})
def run(message):
    RAN.append(message)
    id, order = message["id"], message["work_order"]["id"]
    say(event(id))
    end(id, order)
def serve():
    for line in sys.stdin:
        message = json.loads(line) if line.strip() else {}
        if message.get("t") == "run":
            run(message)
#BEFORE
say(HELLO)
#AFTER
serve()
"""


def host(*changes: tuple[str, str]) -> list[str]:
    """A host that is good but for these changes of its text."""
    text = HOST
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return [sys.executable, "-I", "-S", "-c", text]


def check(
    command: list[str], only: Collection[str] | None = (), backend: str = "asyncio", bounds: Bounds = QUICK
) -> Report:
    started_s = time.monotonic()
    run = partial(conform, command, env={"PATH": os.environ["PATH"]}, bounds=bounds, only=only)
    report = anyio.run(run, backend=backend)
    assert time.monotonic() - started_s < 60
    return report


def failed(report: Report) -> dict[str, str]:
    return {result.name: result.seen for result in report.results if result.verdict == "fail"}


@pytest.mark.parametrize(("program", "slow"), [("node hosts/node/echo.mjs", ""), ("sh hosts/sh/echo.sh", "S4")])
def test_the_shipped_echo_hosts_conform(program: str, slow: str) -> None:
    """A shell takes half a minute to read the longest line; that rule is tried with the other host."""
    name, file = program.split()
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}: not found")
    report = check([found, str(resources.find("hosts").parent / file)], ALL - {slow}, bounds=PATIENT)
    assert failed(report) == {}
    assert report.level == "robust"
    assert report.count("pass") + report.count("skip") == len(CHECKS) or slow


def test_a_plain_host_without_extensions_reaches_behaves() -> None:
    behaves = {rule for _, level, rule in CHECKS if level == "behaves"}
    above = {rule for _, level, rule in CHECKS if level in ("robust", "complete")}
    report = check(host(), (behaves - above - {"S13", "S15"}) | {"S52"}, bounds=PATIENT)
    assert failed(report) == {}
    assert report.backend == "b"
    assert report.extensions == ()
    assert {result.seen for result in report.results if result.verdict == "skip"} >= {"cancel/1 is not announced"}


PLAIN_FAULTS: dict[str, tuple[str, str, str]] = {
    "a last line that is not ended": ("\nserve()", "\nserve()\nos.write(1, b'{\"t\":\"weather\"}')",
                                      "writes whole lines, and no blank ones"),
    "a line without end": ("say(event(id))", "say(event(id, text='x' * 17_000_000))",
                           "keeps its lines within the size limit"),
    "an extension without a number": ('"streaming": "native"}}', '"streaming": "native"}, "extensions": ["cancel"]}',
                                      "announces each extension once, as name/number"),
    "a time that goes back": ("say(event(id))", "say(event(id)); say(event(id, ts='2026-01-15T11:00:00Z'))",
                              "reports events in the order in which they happened"),
    "reasoning that speaks": ("say(event(id))", "say(event(id, ext={'reasoning': {'text': 'hm'}}))",
                              "uses the known members of ext correctly"),
    "a long preview": ("say(event(id))",
                       "say(event(id, type='command_executed', command='ls', output_preview='é' * 5000))",
                       "sends valid events"),
    "a path of its own machine": ("say(event(id))", "say(event(id, type='file_changed', path='/a', summary='s'))",
                                  "sends valid events"),
    "another manifest in the receipt": ('"capabilities": {}, "usage_raw"',
                                        '"capabilities": {"audio": "native"}, "usage_raw"',
                                        "describes itself in the receipt as in the hello"),
    "another mode in the receipt": ('"outcome": "complete", **members}',
                                    '"outcome": "complete", "mode": "passthrough"}',
                                    "describes itself in the receipt as in the hello"),
    "an event before the hello": ("#BEFORE", "say(event('x'))", "sends its hello first and in time"),
    "a hello without backend": ('"backend": {"id": "b"}, "capa', '"capa', "sends a valid hello"),
    "another major version": ('"contract_version": "abp/v0.1", "backend"', '"contract_version": "abp/v7.0", "backend"',
                              "uses a compatible version of the contract"),
    "NaN in an event": ("say(event(id))", "say(event(id, text=float('nan')))", "writes strict JSON"),
    "no end": ("    end(id, order)", "", "ends a run"),
    "a fatal": ("    end(id, order)", "    say({'t': 'fatal', 'ref_id': id, 'error': 'no key'})",
                "finishes the run after stdin has ended, and sends a receipt"),
    "a receipt without usage": ('"usage": {}, ', "", "sends a valid receipt"),
    "a foreign ref_id": ("say(event(id))", "say(event('r9'))", "repeats the run's id"),
    "a banner": ("#BEFORE", "print('npm notice')", "writes only messages to stdout"),
    "a blank line": ("say(event(id))", "print()", "writes whole lines, and no blank ones"),
    "an ask nobody announced": ("say(event(id))", "say({'t': 'ask', 'ref_id': id, 'id': 'a', 'kind': 'tool'})",
                                "sends only messages that a host may send"),
    "a second hello": ("say(event(id))", "say(HELLO)", "sends one hello, and nothing more before the run"),
    "an invented capability": ('{"streaming": "native"}', '{"telepathy": "native"}',
                               "announces only capabilities and levels of the contract"),
    "an event before the run": ("#AFTER", "say(event('x'))", "sends one hello, and nothing more before the run"),
    "an event of another type": ("say(event(id))", "say(event(id, type='usage'))", "sends valid events"),
    "a time without offset": ("say(event(id))", "say(event(id, ts='2026-01-15T12:00:00'))", "gives every event a time"),
    "an invented error code": ("say(event(id))", "say(event(id, type='error', message='m', error_code='E001'))",
                               "uses the contract's error codes"),
    "two ends": ("    end(id, order)", "    end(id, order); end(id, order)",
                 "ends once, and sends nothing after the end"),
    "a wrong order id": ('"work_order_id": order', '"work_order_id": "0" * 32',
                         "names order, run, version and times in the receipt"),
    "a wrong version in the receipt": ('"contract_version": "abp/v0.1",\n', '"contract_version": "abp/v0.2",\n',
                                       "names order, run, version and times in the receipt"),
    "an end before the start": ('"finished_at": NOW', '"finished_at": "2026-01-15T11:59:59.999Z"',
                                "names order, run, version and times in the receipt"),
    "another backend in the receipt": ('"meta": meta, "backend": {"id": "b"}', '"meta": meta, "backend": {"id": "c"}',
                                       "describes itself in the receipt as in the hello"),
    "an invented trace": ("    end(id, order)", "    end(id, order, trace=[event(id, text='y')['event']])",
                          "has a trace that is empty or equals the streamed events"),
    "a wrong hash": ("    end(id, order)", "    end(id, order, receipt_sha256='0' * 64)",
                     "has no receipt hash, or the correct one"),
    "an exit code": ("\nserve()", "\nserve()\nsys.exit(3)", "exits with code 0 when stdin has ended"),
    "a process left behind": ("\nserve()", "\nserve()\nif os.fork() == 0: os.close(1); time.sleep(60)",
                              "leaves no process behind"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLAIN_FAULTS, ids=lambda fault: fault.replace(" ", "_"))
def test_a_fault_in_a_plain_run_is_found(fault: str) -> None:
    old, new, name = PLAIN_FAULTS[fault]
    report = check(host((old, new)))
    assert name in failed(report), report
    assert report.level in ("none", "speaks")


NOTHING = ("#AFTER", "")
"""The host above is careful about nothing: bad JSON ends it with a traceback, and any order is done."""

ELSE_ANSWER = """            run(message)
        elif message.get('t') == 'answer':
            say({'t': 'fatal', 'ref_id': 'r1', 'error': 'what?'})
"""
WORDLESS = """    if 'task' not in message['work_order']:
        return say({'t': 'fatal', 'ref_id': message['id'], 'error': ''})
    RAN.append(message)"""

ALIVE_FAULTS: dict[str, tuple[tuple[str, str], str]] = {
    "an id that must be something": (("say(event(id))", "assert id"), "accepts any string as a run's id"),
    "ids in lower case": (
        ('    id, order = message["id"]', '    id, order = message["id"].lower()'),
        "accepts any string as a run's id",
    ),
    "a secret told": (
        ("say(event(id))", "say(event(id, text=str(message['work_order']['config']['env'])))"),
        "does not reveal the values of config.env",
    ),
    "a root of one word": (
        ("say(event(id))", "assert ' ' not in message['work_order']['workspace']['root']"),
        "works in a folder of any name",
    ),
    "extensions that must be known": (
        ("say(event(id))", "assert 'tomorrow/9' not in message.get('extensions', ())"),
        "accepts an empty list of extensions, and unknown extensions",
    ),
    "a deaf ear for SIGINT": (("#BEFORE", "signal.signal(signal.SIGINT, signal.SIG_IGN)"), "ends at a signal"),
    "NaN taken for a number": (NOTHING, "starts no run for a line that is not strict JSON"),
    "a fatal without words": (("    RAN.append(message)", WORDLESS), "gives a reason in a fatal message"),
    "an exit code at the end of input": (
        ("\nserve()", "\nserve()\nsys.exit(0 if RAN else 4)"),
        "exits when stdin ends without a run",
    ),
    "ids that must be UUIDs": (("say(event(id))", "import uuid; uuid.UUID(id)"), "accepts any string as a run's id"),
    "members that must be known": (
        ("say(event(id))", "assert set(message) == {'t', 'id', 'work_order'}"),
        "ignores members it does not know",
    ),
    "t that must be first": (
        ("if message.get", "if line[2:3] == 't' and message.get"),
        "reads members in any order, with blanks between them",
    ),
    "a blank line that is no JSON": (
        ("json.loads(line) if line.strip() else {}", "json.loads(line)"),
        "skips blank lines and accepts CR LF",
    ),
    "an unknown message taken for an error": (
        ('message.get("t")', "{'run': 'run', None: ''}[message.get('t')]"),
        "ignores a message it does not know",
    ),
    "lines cut at U+2028": (
        ("in sys.stdin:", "in sys.stdin.readline().splitlines():"),
        "reads text in all languages, and JSON escapes",
    ),
    "a short buffer": (("in sys.stdin:", "in [os.read(0, 65536).decode()]:"), "accepts a long order"),
    "SIGTERM ignored": (("#BEFORE", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"), "ends at a signal"),
    "half a line taken for a run": (("json.loads(line) if", "lenient(line) if"), "handles lines that are not messages"),
    "a traceback at bad JSON": (NOTHING, "handles lines that are not messages"),
    "a wrong order done": (NOTHING, "answers an invalid order with a fatal message"),
    "half a character given back": (
        ("say(event(id))", "say(event(id, text=message['work_order']['task']))"),
        "sends no lone surrogate",
    ),
    "a second run forgotten": (
        ("say(event(id))", "if RAN[1:]: return"),
        "does several runs in a row, or exits cleanly after one",
    ),
}


@pytest.mark.parametrize("fault", ALIVE_FAULTS, ids=lambda fault: fault.replace(" ", "_"))
def test_a_fault_with_odd_input_or_signals_is_found(fault: str) -> None:
    change, name = ALIVE_FAULTS[fault]
    report = check(host(change), {name})
    assert name in failed(report), report


WITH_EXTENSIONS = (
    ("json.loads(line) if line.strip() else {}", "careful(line)"),
    ('"streaming": "native"}}', '"streaming": "native"}, "extensions": ["cancel/1", "ping/1", "ask/1", "many/1"]}'),
    (
        "            run(message)\n",
        "            run(message)\n        elif message.get('t') == 'ping':\n            pong(message)\n",
    ),
    ("def serve():", "def pong(message):\n    say({'t': 'pong', 'seq': message['seq']})\ndef serve():"),
)
ASK = """    if 'extensions' in message:
        ask(id)
    end(id, order)
def ask(id, **m):
    say({'t': 'ask', 'ref_id': id, 'id': 'a1', 'kind': 'tool', 'name': 'x', 'input': {}, **m})
"""
EXTENSION_RULES = {"S34", "S51", "S52", "S53", "S54", "S55", "S56", "S57", "S59"}


def test_announced_extensions_are_tried() -> None:
    report = check(host(*WITH_EXTENSIONS), EXTENSION_RULES, bounds=PATIENT)
    assert failed(report) == {}
    assert report.count("skip") == 0, {r.seen for r in report.results}
    assert report.extensions == ("cancel/1", "ping/1", "ask/1", "many/1")


SLEEP = "if 'cancel/1' in message.get('extensions', ()): time.sleep(60)"
ELSE = "            run(message)\n        elif message.get('t') == 'cancel':\n            "

EXTENSION_FAULTS: dict[str, tuple[tuple[str, str], str]] = {
    "a rounded number": (("message['seq']}", "float(message['seq'])}"), "answers pings before a run"),
    "no pong": (("    say({'t': 'pong'", "    return\n    say({'t': 'pong'"), "answers a ping during a run"),
    "an answer to a late cancel": (
        ("            run(message)\n", ELSE + "say({'t': 'fatal', 'ref_id': 'r1', 'error': 'too late'})\n"),
        "ignores a cancel that comes late"),
    "death by a foreign cancel": (
        ("            run(message)\n", ELSE + "1 / 0\n"), "ignores a cancel for a run it does not know"),
    "a cancel not heard": (("say(event(id))", SLEEP), "ends a cancelled run within the grace period"),
    "an end of input not heard": (("say(event(id))", SLEEP), "cancels its run when the control plane is gone"),
    "an ask about nothing": (
        ("    end(id, order)\n", ASK.replace("'name': 'x', ", "")), "sends valid asks, and continues after a denial"),
    "an end for each bad line": (
        ("        return {}\n", "        return say({'t': 'fatal', 'ref_id': 'r1', 'error': ''}) or {}\n"),
                                 "ends no run because of a bad line"),
    "events of another run": (("say(event(id))", "say(event(RAN[0]['id']))"), "keeps many runs apart"),
    "a word about a late answer": (("            run(message)\n", ELSE_ANSWER),
                                   "ignores answers to unknown asks, and late answers"),
    "a run lost among many": (("say(event(id))", "if id == 'r3': return"), "runs several orders at once"),
}  # fmt: skip


@pytest.mark.parametrize("fault", EXTENSION_FAULTS, ids=lambda fault: fault.replace(" ", "_"))
def test_a_fault_in_an_announced_extension_is_found(fault: str) -> None:
    change, name = EXTENSION_FAULTS[fault]
    report = check(host(*WITH_EXTENSIONS, change), {name})
    assert name in failed(report), report


def test_a_denied_ask_is_counted() -> None:
    report = check(host(*WITH_EXTENSIONS, ("    end(id, order)\n", ASK)), {"S55"}, bounds=PATIENT)
    assert "1 valid asks, then final" in {result.seen for result in report.results}


@pytest.mark.parametrize("program", ["import time; time.sleep(60)", "while True: print('y')"])
def test_a_program_that_is_no_host_is_done_within_its_bounds(program: str) -> None:
    bounds = Bounds(hello_s=0.7, run_s=0.7, exit_s=0.2, quiet_s=0.05, slack_s=0.1)
    started_s = time.monotonic()
    report = check([sys.executable, "-I", "-S", "-c", program], None, bounds=bounds)
    assert report.level == "none"
    assert (report.count("pass"), report.count("fail")) == (0, 1)
    assert ("no messages, the first: 'y'" in failed(report)["sends its hello first and in time"]) == ("'y'" in program)
    assert time.monotonic() - started_s < 30
    assert report.count("pass") + report.count("fail") + report.count("skip") == len(CHECKS)


def test_a_program_that_cannot_be_started_is_an_error_of_the_caller() -> None:
    with pytest.raises(BackendError) as caught:
        check(["/nonexistent/host"])
    assert caught.value.code == "sidecar_spawn_failed"


def test_a_failed_check_shows_the_lines_that_failed_with_control_characters_escaped() -> None:
    report = check(host(("#BEFORE", "print('\\x1b[31mred')")))
    (result,) = [result for result in report.results if result.name == "writes only messages to stdout"]
    assert result.lines == ("\\x1b[31mred",)
    assert printable(b"\xff\x00" + b"x" * 5000).startswith("\\xff\\x00xxx")
    assert len(printable(b"x" * 5000)) == 300


def test_failures_that_follow_from_a_banner_are_marked() -> None:
    own = {name for name, seen in failed(check(host(), ("S19", "S25"))).items()}
    report = check(host(("#BEFORE", "import time; print('Welcome', flush=True)")), ("S19", "S25"))
    marked = {result.name: result.follows for result in report.results if result.verdict == "fail"}
    assert {name for name, follows in marked.items() if follows is None} - own == {"writes only messages to stdout"}
    assert set(marked.values()) == {None, "writes only messages to stdout"}


def test_what_a_crashed_host_wrote_to_stderr_is_shown() -> None:
    report = check(host(("def run(message):", "def run(message):\n    raise ValueError('no such thing')")))
    said = [line for result in report.results if result.verdict == "fail" for line in result.lines]
    assert any(line.startswith("stderr: ") and "Error: " in line for line in said)


def test_every_rule_stands_on_the_protocol_page_and_has_steps_that_there_are() -> None:
    page = (resources.find("contracts") / "sidecar.md").read_text()
    for rule in rules():
        for step in (*rule.steps, *(step for case in rule.cases for step in case.get("steps", [case]))):
            (verb,) = VERBS.keys() & step.keys()
            known = {"what", verb, *inspect.signature(VERBS[verb]).parameters}
            known |= set(FAULTS) if verb == "never" else set(ENDS) if verb in ("end", "final", "fatal") else set()
            assert set(step) <= known, (rule.name, step)
        assert rule.follows in (None, *(name for name, _, _ in CHECKS))
    assert len({name for name, _, _ in CHECKS}) == len(CHECKS)
    assert {rule for _, _, rule in CHECKS} <= set(re.findall(r"\*\*(S\d+)\*\*", page))
