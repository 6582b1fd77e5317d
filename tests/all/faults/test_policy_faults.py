"""Section Policy of the fault catalogue: what may be done is decided right, and fails closed."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from pathlib import Path

import pytest

from backplane.errors import PolicyError
from backplane.policy.globs import compile_globs
from backplane.receipts.store import Store
from backplane.sandbox.probe import TRIAL_S_MAX
from tests.all.faults import hosts, sizes
from tests.all.faults.conftest import Figure
from tests.all.faults.ground import GRACE_S, LADDER_S, Ground, kill_9
from tests.test_policy import NETWORK, OUTSIDE, PATHS, PLACES, TARGETS

STOP_S = GRACE_S + LADDER_S

# F47: names -----------------------------------------------------------------------------------------------------------

DENIED = ("secret/**", "**/*.key", "Case", "caf\u00e9", "dot.", "a/b")
ALLOWED = ("secret/ok.txt",)
"""Denied all the same: deny wins."""

# A path as a tool names it → whether writing it is denied.
ROWS: list[tuple[str, bool]] = [
    ("secret/x", True), ("./secret/x", True), ("secret//x", True), ("a/../secret/x", True), ("secret/./x", True),
    ("secret/y/../x", True), ("secret/x/", True), ("secret/ok.txt", True), ("./a/../secret/ok.txt", True),
    ("secretx/x", False), ("xsecret/x", False), ("a/secret/x", False), ("SECRET/x", False), ("secret", False),
    ("id.key", True), ("a/b/c.key", True), ("a/.key", True), ("c.key/", True), ("c.keys", False), ("key", False),
    ("Case", True), ("case", False), ("CASE", False), ("./Case", True), ("Case/", True), ("Case/.", True),
    ("caf\u00e9", True), ("cafe", False), ("dot.", True), ("dot", False), ("./dot.", True), ("dot./", True),
    ("a/b", True), ("a//b", True), ("a/./b", True), ("a/c/../b", True), ("a/b/c", False), ("a/b/..", False),
    ("", True), ("\0", True), ("a\0b", True), ("../out", True), ("/etc/passwd", True), ("a/../../out", True),
    ("plain", False), ("a b", False), ("new\nline", False), ("...", False), ("..a", False), ("~", True),
]  # fmt: skip

ASKS = """
hello(extensions=["ask/1"]); take()
PATHS = json.load(open(os.path.join(RUN["work_order"]["workspace"]["root"], "paths.json")))
for n, path in enumerate(PATHS):
    say("ask", ref_id=RUN["id"], id=str(n), kind="tool", name="write_file", input={"path": path, "content": ""},
        deadline_ms=5000, default="deny", suggestions=[])
    answer = json.loads(line())
    assert answer["t"] == "answer" and answer["id"] == str(n), answer
    event(answer["decision"])
final(); rest()
"""


def test_f47_every_name_of_a_place_is_judged_alike_through_the_front_door(ground: Ground, figure: Figure) -> None:
    (ground.work / "paths.json").write_text(json.dumps([path for path, _ in ROWS]))
    policy = ground.folder / "policy.json"
    policy.write_text(json.dumps({"deny_write": [*DENIED], "allowed_tools": []}))
    ended = ground.run(ASKS, "--policy", str(policy))
    assert not ground.amiss(ended, outcome="complete", bound_s=2.0)
    said = [event["text"] for event in ended.events if event["type"] == "assistant_message"]
    wrong = [(row, answer) for row, answer in zip(ROWS, said, strict=True) if (answer == "deny") != row[1]]
    assert wrong == []
    rows = len(ROWS) + len(PLACES) + len(PATHS) + len(OUTSIDE) + len(TARGETS) + len(NETWORK)
    figure("C16", len(wrong), what=f"wrong of {rows} rows ({len(ROWS)} through the front door)")


@pytest.mark.parametrize(
    "pattern",
    ["*a" * 20, "**/a" * 12, "{" + "a,b}{" * 29 + "a,b}", "[" * 500, "a" * 100_000, "*" * 5000],
    ids=lambda text: text[:10],
)
def test_f47_a_costly_pattern_is_matched_in_time_or_refused_at_load(pattern: str, figure: Figure) -> None:
    began = time.perf_counter()
    try:
        globs = compile_globs([pattern])
    except PolicyError:
        return
    worst_s = 0.0
    for path in ("a" * 4000, "a/" * 2000 + "b", "b" * 4000, "/".join("ab" * 500)):
        began = time.perf_counter()
        globs.matches(path)
        worst_s = max(worst_s, time.perf_counter() - began)
    figure("C16", worst_s * 1000, what="ms worst glob decision")
    assert worst_s < 0.05 + sizes.SLACK_S


# F48: fail closed -----------------------------------------------------------------------------------------------------

BROKEN = {
    "no JSON": b"{",
    "an unknown field": b'{"allow_everything": true}',
    "a key twice": b'{"deny_write": [], "deny_write": ["*"]}',
    "a wrong type": b'{"deny_write": "all"}',
    "a bad pattern": b'{"deny_write": ["[a"]}',
    "not UTF-8": b'{"deny_write": ["\xff"]}',
    "a list": b"[]",
    "nothing": b"",
}


@pytest.mark.parametrize("name", BROKEN)
def test_f48_a_broken_policy_starts_nothing(ground: Ground, name: str) -> None:
    policy, started = ground.folder / "policy.json", ground.folder / "started"
    policy.write_bytes(BROKEN[name])
    ended = ground.run(f"open({str(started)!r}, 'w')", "--policy", str(policy))
    assert (ended.error, ended.left) == ("policy_invalid", [])
    assert ended.code not in (0, 3)
    assert not started.exists()


ANSWERED = """
hello(extensions=["ask/1"]); take()
def ask(n, **more):
    say("ask", ref_id=RUN["id"], id=n, kind="tool", name="bash", input={"command": "true"}, **more)
"""


@pytest.mark.parametrize(("how", "decision"), [("deny", "deny"), ("allow", "allow")])
def test_f48_an_open_ask_is_answered_as_the_caller_said(ground: Ground, how: str, decision: str) -> None:
    policy = ground.folder / "policy.json"
    policy.write_text('{"require_approval_for": ["bash"]}')
    body = ANSWERED + "ask('1')\nevent(json.loads(line())['decision']); final(); rest()"
    ended = ground.run(body, "--policy", str(policy), "--on-ask", how)
    assert not ground.amiss(ended, outcome="complete")
    assert decision in [event.get("text") for event in ended.events]


def test_f48_the_same_ask_twice_at_once_and_asks_after_the_end_change_nothing(ground: Ground) -> None:
    body = ANSWERED + (
        "ask('1'); ask('1'); ask('2', ref_id2='x')\n"
        "answers = {json.loads(line())['id'] for _ in range(2)}\nfinal(); ask('3'); ask('4'); rest()"
    )
    ended = ground.run(body)
    assert not ground.amiss(ended, outcome="complete")


def test_f48_a_flood_of_asks_is_answered_and_bounded(ground: Ground) -> None:
    body = ANSWERED + (
        "import threading\n"
        "def reader():\n    while os.read(0, 65536):\n        pass\n"
        "threading.Thread(target=reader, daemon=True).start()\n"
        "for n in range(3000):\n    ask(str(n))\nfinal(); time.sleep(0.2)"
    )
    ended = ground.run(body)
    assert not ground.amiss(ended, outcome="complete", bound_s=8.0)


def test_f48_a_host_that_asks_and_never_reads_is_stuck_and_ended(ground: Ground) -> None:
    body = ANSWERED + "for n in range(100000):\n    ask(str(n))\nfinal(); rest()"
    ended = ground.run(body, env={"BACKPLANE_WRITE_S": "0.5"})
    assert not ground.amiss(ended, code="backend_timeout", bound_s=6.0)


# F48, C19: isolation --------------------------------------------------------------------------------------------------


def hidden(ground: Ground, *names: str) -> str:
    """A PATH with everything but these programs."""
    folder = ground.folder / "path"
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            link = folder / program.name
            if program.name not in names and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


@pytest.mark.needs("bwrap")
def test_f48_isolation_required_without_bubblewrap_starts_nothing(ground: Ground, figure: Figure) -> None:
    started = ground.work / "started"
    path = hidden(ground, "bwrap")
    body = f"open({str(started)!r}, 'w'); " + hosts.GOOD
    ended = ground.run(body, "--isolation", "required", env={"PATH": path})
    assert not ground.amiss(ended, code="capability_unsupported", exit_code=4, accepted=0)
    assert b"bubblewrap" in ended.stderr
    assert not started.exists()
    figure("C19", 1, what="required refuses without bubblewrap")


@pytest.mark.needs("bwrap")
def test_c19_hiding_bubblewrap_changes_the_label(ground: Ground, figure: Figure) -> None:
    seen = ground.run(hosts.GOOD).own["enforcement"]
    path = hidden(ground, "bwrap")
    without = ground.run(hosts.GOOD, env={"PATH": path})
    assert not ground.amiss(without, outcome="complete", accepted=2)
    assert "bubblewrap" in json.dumps(seen["kinds"])
    assert '"bubblewrap"' not in json.dumps([kind.get("by") for kind in without.own["enforcement"]["kinds"].values()])
    figure("C19", 1, what="label flips without bubblewrap")


HANGING = {
    "waits": "echo $$ >> {log}; exec sleep 60",
    "deaf": "trap '' TERM INT HUP; echo $$ >> {log}; sleep 60; sleep 60",
    "stops itself": "echo $$ >> {log}; kill -STOP $$",
    "talks for ever": "echo $$ >> {log}; exec cat /dev/zero >&2",
}


def with_bwrap(ground: Ground, script: str) -> tuple[dict[str, str], Path]:
    """The environment with another bubblewrap, and the file that it may note its process in."""
    folder, log = ground.folder / "bin", ground.folder / "started"
    folder.mkdir()
    (folder / "bwrap").write_text(f"#!/bin/sh\n{script.format(log=log)}\n")
    (folder / "bwrap").chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}, log


@pytest.mark.parametrize("how", HANGING)
def test_a_bubblewrap_that_hangs_is_given_up_after_one_trial(ground: Ground, how: str) -> None:
    env, log = with_bwrap(ground, HANGING[how])
    ended = ground.run(hosts.GOOD, env=env)
    assert not ground.amiss(ended, outcome="complete", accepted=2, bound_s=TRIAL_S_MAX)
    assert len(log.read_text().split()) == 1
    (layer,) = [layer for layer in ended.own["enforcement"]["layers"] if layer["name"] == "bubblewrap"]
    assert (layer["state"], "did not end within" in layer["why"]) == ("missing", True)


@pytest.mark.parametrize("how", HANGING)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_bubblewrap_that_hangs_is_left_at_once_when_somebody_ends_the_run(
    ground: Ground, how: str, number: int
) -> None:
    env, log = with_bwrap(ground, HANGING[how])
    running = ground.started(hosts.GOOD, env=env)
    running.until(lambda: log.exists() and log.read_text().endswith("\n"))
    time.sleep(0.3)
    began_s = time.monotonic()
    os.kill(running.pid, number)
    ended = running.end()
    assert time.monotonic() - began_s < 1.0 * sizes.share() + sizes.SLACK_S
    assert (ended.code, ended.left) == (128 + number, [])


def test_a_bubblewrap_without_a_version_is_none(ground: Ground) -> None:
    env, _ = with_bwrap(ground, "head -c 100000 /dev/urandom")
    ended = ground.run(hosts.GOOD, env=env)
    assert not ground.amiss(ended, outcome="complete", accepted=2)
    (layer,) = [layer for layer in ended.own["enforcement"]["layers"] if layer["name"] == "bubblewrap"]
    assert (layer["state"], layer["why"]) == ("missing", "it does not say its version")


@pytest.mark.parametrize("isolation", ["off", "best_effort"])
def test_c19_the_receipt_of_a_killed_control_plane_says_what_held_the_host(
    ground: Ground, isolation: str, figure: Figure
) -> None:
    words = ("--isolation", isolation, "--policy", "strict")
    held = ground.run(hosts.GOOD, *words).own["enforcement"]
    running = ground.started("hello(); take(); event('at work'); time.sleep(60)", *words)
    running.said(b"at work")
    kill_9(running)
    running.end()
    assert not ground.amiss(ground.run(hosts.GOOD), outcome="complete", accepted=2)
    _, cut, _ = ground.rows()
    with Store.open(ground.home, readonly=True) as store:
        said = store.load(cut.run_id).backplane["enforcement"]
    by_os = [row for row in held["rules"] if row["layer"] == "os"]
    assert {name: said[name] for name in ("isolation", "layers", "kinds")} == {
        name: held[name] for name in ("isolation", "layers", "kinds")
    }
    assert [row for row in said["rules"] if row["layer"] is not None] == by_os
    assert len(said["rules"]) == len(held["rules"])
    figure("C19", 1, what=f"label of a run that was killed, {isolation}")


@pytest.mark.needs("bwrap")
def test_f42_a_contained_host_cannot_write_outside_of_its_workspace(ground: Ground) -> None:
    outside = ground.folder / "work-evil"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    body = f"""
hello(); take(); os.chdir(RUN["work_order"]["workspace"]["root"]); open("inside", "w").write("x")
for path in ({str(outside / "new")!r}, {str(outside / "kept")!r}, {str(ground.work / "a.txt")!r}, "/etc/was-here"):
    try:
        open(path, "w").write("spoilt"); event("wrote " + path)
    except OSError as error:
        event(type(error).__name__)
final(); rest()
"""
    ended = ground.run(body, "--isolation", "required")
    assert not ground.amiss(ended, outcome="complete", accepted=4, bound_s=1.0)
    assert not [event["text"] for event in ended.events if event["text"].startswith("wrote /tmp")]
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"kept": "kept"}
    assert (ground.work / "a.txt").read_text() == "one\n"
    assert not Path("/etc/was-here").exists()
    assert ended.own["enforcement"]["kinds"]["files"]["state"] in ("enforced", "partial")


@pytest.mark.needs("bwrap")
def test_c20_full_containment_costs_little(ground: Ground, figure: Figure) -> None:
    def took_s(isolation: str) -> tuple[float, float]:
        began_s = time.monotonic()
        ended = ground.run("hello(); take(); event(str(time.monotonic())); final(); rest()", "--isolation", isolation)
        (taken_s,) = [float(event["text"]) for event in ended.events if event["type"] == "assistant_message"]
        return taken_s - began_s, ended.wall_s

    # By turns, as the machine's speed changes from minute to minute.
    pairs = [(took_s("off"), took_s("required")) for _ in range(sizes.of(8, 40))]
    start_s, whole_s = (statistics.median(on[part] - off[part] for off, on in pairs) for part in (0, 1))
    figure("C20", start_s * 1000, what=f"ms until a host has its order, median of {len(pairs)} pairs")
    figure("C20", whole_s * 1000, what=f"ms for the whole command, median of {len(pairs)} pairs")
    assert max(start_s, whole_s) < 0.025 + sizes.SLACK_S
