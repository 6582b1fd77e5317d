"""Section Policy of the fault catalogue: what may be done is decided right, and fails closed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from backplane.receipts.store import Store
from backplane.sandbox import probe
from tests.all.faults import hosts, sizes
from tests.all.faults.ground import GRACE_S, LADDER_S, Ground, kill_9

STOP_S = GRACE_S + LADDER_S

# F48: fail closed -----------------------------------------------------------------------------------------------------

BROKEN = {
    "no JSON": b"{",
    "an unknown field": b'{"allow_everything": true}',
    "a bad pattern": b'{"deny_write": ["[a"]}',
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
    ended = ground.run(body)
    assert not ground.amiss(ended, code="backend_timeout", bound_s=6.0)


# F48, C19: isolation --------------------------------------------------------------------------------------------------


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


TRIAL_S = 1.0
IMPATIENT = f"""
import sys
from backplane.__main__ import main
from backplane.sandbox import probe
probe.TRIAL_S_MAX = {TRIAL_S}
sys.exit(main())
"""
"""The program with a shorter trial."""


@pytest.mark.parametrize("how", HANGING)
def test_a_bubblewrap_that_hangs_is_given_up_after_one_trial(ground: Ground, how: str) -> None:
    assert probe.TRIAL_S_MAX > TRIAL_S
    env, log = with_bwrap(ground, HANGING[how])
    ended = ground.run(hosts.GOOD, env=env, program=(sys.executable, "-P", "-c", IMPATIENT))
    assert not ground.amiss(ended, outcome="complete", accepted=2, bound_s=TRIAL_S)
    assert len(log.read_text().split()) == 1
    (layer,) = [layer for layer in ended.own["enforcement"]["layers"] if layer["name"] == "bubblewrap"]
    assert (layer["state"], "did not end within" in layer["why"]) == ("missing", True)


def test_a_bubblewrap_that_hangs_is_left_at_once_when_somebody_ends_the_run(ground: Ground) -> None:
    env, log = with_bwrap(ground, HANGING["deaf"])
    running = ground.started(hosts.GOOD, env=env)
    running.until(lambda: log.exists() and log.read_text().endswith("\n"))
    time.sleep(0.3)
    began_s = time.monotonic()
    os.kill(running.pid, signal.SIGINT)
    ended = running.end()
    assert time.monotonic() - began_s < 1.0 * sizes.share() + sizes.SLACK_S
    assert (ended.code, ended.left) == (130, [])


@pytest.mark.parametrize("isolation", ["off", "best_effort"])
def test_c19_the_receipt_of_a_killed_control_plane_says_what_held_the_host(ground: Ground, isolation: str) -> None:
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
