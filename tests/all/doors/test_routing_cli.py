"""`run --dry-run`, `run` without a backend, what follows a failure, and `cost`: by the command and real hosts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from backplane.config import load
from backplane.contract.receipt import Usage
from backplane.contract.work import WorkOrder
from backplane.errors import CapabilityError
from backplane.receipts.store import Store
from backplane.routing.driver import look_around, task_of
from backplane.routing.failover import READING, FailoverAttempt, first_effect, moves_on
from backplane.testing import ModelServer
from tests.in_process import in_process
from tests.receipt_writer import past_run
from tests.runs import HELLO, PRELUDE

WORKS = "hello()\nrun = take()\nput(event(run), final(run, usage={'estimated_cost_usd': 0.25}))\nend()\n"
CRASHES = "hello()\nrun = take()\nos._exit(7)\n"
WRITES = """
hello()
run = take()
open(os.path.join(run["work_order"]["workspace"]["root"], "made.txt"), "w").write("x")
os._exit(7)
"""
TELLS = """
hello()
run = take()
put({"t": "event", "ref_id": run["id"], "event": {"ts": "2026-01-15T12:00:00Z", "type": "tool_call",
     "tool_name": "%s", "tool_use_id": "1", "parent_tool_use_id": None, "input": {"command": "x", "path": "a"}}})
os._exit(7)
"""
DENIES = """
hello()
run = take()
put({"t": "fatal", "ref_id": run["id"], "error": "no such key", "error_code": "backend_auth_failed"})
end()
"""
LIMITS = DENIES.replace("backend_auth_failed", "backend_rate_limited")


pytestmark = pytest.mark.usefixtures("no_agents")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


def configure(folder: Path, more: str = "", **hosts: str) -> None:
    """Backends of a few lines each, in this order, in the folder's configuration."""
    text = more
    for name, body in hosts.items():
        path = folder.parent / f"{name}.py"
        path.write_text(PRELUDE.format(hello=json.dumps(HELLO)) + body)
        text += f'\n[backends.{name}]\ncommand = ["{sys.executable}", "-I", "-S", "{path}"]\n'
    (folder / "backplane.toml").write_text(text)


def cli(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return in_process(*words, cwd=folder)


def ran(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """A run that the router is asked for, and what its receipt adds."""
    done = cli(folder, "run", "do it", "--receipt", str(folder.parent / "receipt.json"), *words)
    receipt = json.loads((folder.parent / "receipt.json").read_text())
    return done, receipt["usage_raw"]["backplane"]


def stored(home: Path, backend: str, *, cost: float | None = None, **changes: Any) -> str:
    """A run as its control plane leaves it; gives its id."""
    with Store.open(home) as store:
        return past_run(store, backend=backend, **{"usage": Usage(estimated_cost_usd=cost), **changes}).run_id


# route ----------------------------------------------------------------------------------------------------------------


def test_a_choice_is_shown_with_its_reasons_and_nothing_is_started(folder: Path, backplane_home: Path) -> None:
    configure(folder, first="raise SystemExit(9)", second=WORKS)
    stored(backplane_home, "first", cost=0.5)
    stored(backplane_home, "second", cost=0.01)
    done = cli(folder, "run", "--dry-run", "do it", "--prefer", "cost")
    assert (done.returncode, done.stdout.split()[1]) == (0, "second,")
    assert "named_only" in cli(folder, "run", "--dry-run", "do it", "--prefer", "cost", "-v").stdout
    with Store.open(backplane_home, readonly=True) as store:
        assert len(store.rows()) == 2


def test_a_choice_as_json_has_everyone_who_was_considered(folder: Path, backplane_home: Path) -> None:
    configure(folder, first=WORKS)
    stored(backplane_home, "first", cost=0.5)
    done = cli(folder, "run", "--dry-run", "do it", "--param", "abp.route.max_cost_usd_micros=100000", "--json")
    assert done.returncode == 4
    found = json.loads(done.stdout)["route"]
    assert found["chosen"] is None
    assert found["task"]["max_cost_usd_micros"] == 100_000
    mine = next(one for one in found["considered"] if one["backend"] == "first")
    assert [one["kind"] for one in mine["why_not"]] == ["cost"]
    assert mine["cost_usd_micros"]["value"] == 500_000
    assert cli(folder, "run", "--dry-run", "do it", "--param", "abp.route.max_cost_usd_micros=500000").returncode == 0


def test_an_ability_counts_once_its_hello_was_heard(folder: Path, backplane_home: Path) -> None:
    configure(folder, mine=WORKS)
    before = cli(folder, "run", "--dry-run", "do it", "--require", "streaming")
    assert before.returncode == 4
    assert "manifest_unknown: " in before.stdout
    assert cli(folder, "run", "do it", "--backend", "mine").returncode == 0
    assert cli(folder, "run", "--dry-run", "do it", "--require", "streaming").stdout.startswith("backend   mine,")
    refused = cli(folder, "run", "--dry-run", "do it", "--require", "logprobs")
    assert "capability: logprobs" in refused.stdout


def test_models_prices_and_groups_come_from_the_configuration(folder: Path, backplane_home: Path) -> None:
    more = """
[routing]
quality = ["mine/large", "mine"]
[routing.models.large]
prices = { input = 10, output = "50" }
context_tokens = 1000
[routing.models.small]
prices = { input = 0.1, output = 0.5 }
"""
    configure(folder, more, mine=WORKS)
    with (folder / "backplane.toml").open("a") as file:
        file.write('models = ["large", "small"]\n')
    cheap = json.loads(cli(folder, "run", "--dry-run", "do it", "--prefer", "cost", "--json").stdout)["route"]["chosen"]
    assert (cheap["model"], cheap["cost_usd_micros"]["value"]) == ("small", 6_000)
    assert cheap["cost_usd_micros"]["basis"] == "assumed"
    assert cheap["price"] == {"name": "configuration", "read_on": ""}
    assert cli(folder, "run", "--dry-run", "do it", "--prefer", "quality").stdout.startswith("backend   mine/large,")
    assert cli(folder, "run", "--dry-run", "do it", "--model", "small").stdout.startswith("backend   mine/small,")
    _, added = ran(folder, "--prefer", "cost")
    assert added["route"]["chosen"]["model"] == "small"
    with Store.open(backplane_home, readonly=True) as store:
        head = (store.folder(store.rows()[0].run_id) / "head.jsonl").read_text()
    assert json.loads(head.splitlines()[0])["order"]["config"]["model"] == "small"


@pytest.mark.parametrize(
    "words",
    [
        ("--param", "abp.route.type=poem"),
        ("--param", "abp.route.max_cost_usd_micros=-1"),
        ("--prefer", "cost", "--model", "m"),
    ],
)
def test_a_wish_that_is_none_is_refused(folder: Path, words: tuple[str, ...]) -> None:
    configure(folder, mine=WORKS)
    assert cli(folder, "run", "--dry-run", "do it", *words).returncode == 2


# run ------------------------------------------------------------------------------------------------------------------


def test_a_run_without_a_backend_asks_the_router_and_its_receipt_tells_the_choice(
    folder: Path, backplane_home: Path
) -> None:
    configure(folder, mine=WORKS)
    done, added = ran(folder, "--param", "abp.route.type=simple_query")
    assert done.returncode == 0, done.stderr
    route = added["route"]
    assert route["chosen"]["backend"] == "mine"
    assert route["task"]["type"] == "simple_query"
    assert {one["backend"] for one in route["considered"]} >= {"mine", "shell", "mock", "claude"}
    assert "tried" not in route
    again = json.loads(cli(folder, "run", "--dry-run", "x", "--json").stdout)["route"]["chosen"]
    assert again["cost_usd_micros"]["value"] == 250_000, "what was measured decides the next time"


@pytest.mark.parametrize("words", [("--backend", "mine", "--prefer", "cost"), ("--resume", "abc")])
def test_a_wish_beside_a_named_backend_and_a_conversation_without_one_are_refused(
    folder: Path, words: tuple[str, ...]
) -> None:
    configure(folder, mine=WORKS)
    assert cli(folder, "run", "do it", *words).returncode == 2


# What follows a failure -----------------------------------------------------------------------------------------------


def test_a_failure_before_any_effect_goes_on_and_the_receipt_says_who_was_tried(folder: Path) -> None:
    configure(folder, '[routing]\nstrategy = "first_available"\n', first=CRASHES, limited=LIMITS, third=WORKS)
    done, added = ran(folder, "--json")
    assert done.returncode == 0, done.stderr
    assert added["route"]["chosen"]["backend"] == "third"
    tried = added["route"]["tried"]
    assert [(one["backend"], one["code"]) for one in tried] == [
        ("first", "backend_crashed"),
        ("limited", "backend_rate_limited"),
    ]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["t"] for line in lines if line["t"] != "event"] == ["final"]
    listed = [json.loads(line) for line in cli(folder, "runs", "--json").stdout.splitlines()]
    assert [one["run_id"] for one in tried] == [listed[2]["run_id"], listed[1]["run_id"]]


@pytest.mark.parametrize(
    ("body", "why"),
    [(WRITES, "its patch"), (TELLS % "bash", "its call"), (DENIES, "its code")],
)
def test_what_was_done_or_cannot_be_mended_ends_the_order(folder: Path, body: str, why: str) -> None:
    configure(folder, '[routing]\nstrategy = "first_available"\n', first=body, second=WORKS)
    done, added = ran(folder)
    assert done.returncode == 1, why
    assert added["route"]["chosen"]["backend"] == "first"


def test_a_tool_that_only_reads_is_no_effect(folder: Path) -> None:
    configure(folder, '[routing]\nstrategy = "first_available"\n', first=TELLS % "Read", second=WORKS)
    done, added = ran(folder)
    assert (done.returncode, added["route"]["chosen"]["backend"]) == (0, "second")


def test_an_order_ends_where_every_backend_has_failed(folder: Path) -> None:
    configure(folder, **{f"b{number}": CRASHES for number in range(4)})
    done, added = ran(folder)
    assert done.returncode == 1
    assert [one["backend"] for one in added["route"]["tried"]] == ["b0", "b1"], "three attempts are the most"


def test_a_backend_that_failed_thrice_is_left_alone_for_a_while(folder: Path, backplane_home: Path) -> None:
    configure(folder, bad=WORKS)
    crashed = {"backplane": {"end": {"reason": "host_exit", "code": "backend_crashed"}}}
    for _ in range(3):
        stored(backplane_home, "bad", outcome="failed", usage_raw=crashed)
    done = cli(folder, "run", "--dry-run", "do it", "-v")
    assert done.returncode == 4
    assert "circuit_open: it failed several times in a row" in done.stdout
    settings = load(None, {}, folder)
    now_ms = time.time_ns() // 1_000_000
    world = look_around(settings, {}, backplane_home, now_ms=now_ms + 62_000)
    assert world.choose(task_of(WorkOrder("x"))).chosen().name == "bad"
    with pytest.raises(CapabilityError):
        look_around(settings, {}, backplane_home, now_ms=now_ms).choose(task_of(WorkOrder("x"))).chosen()


def test_the_rule_for_going_on_is_the_page() -> None:
    def attempt(**changes: Any) -> FailoverAttempt:
        return FailoverAttempt(**{"backend": "b", "run_id": "r", "code": "backend_crashed", **changes})

    assert [moves_on(number, attempt()) for number in (1, 2, 3)] == [True, True, False]
    assert not moves_on(1, attempt(effect="file_changed a"))
    assert not moves_on(1, attempt(code="internal"))
    assert not moves_on(1, attempt(code=None))
    assert frozenset({"read_file", "list_files", "glob", "grep"}) == READING
    assert first_effect((), patch_bytes=0, applied=False) is None
    assert first_effect((), patch_bytes=7, applied=False) == "files differ (7 bytes of patch)"


# cost -----------------------------------------------------------------------------------------------------------------


def test_costs_are_summed_up_and_the_unknown_is_never_nothing(folder: Path, backplane_home: Path) -> None:
    stored(backplane_home, "a", cost=0.5, model="m1", root="/w/1")
    stored(backplane_home, "a", cost=None, model="m1", root="/w/2", ago_ms=2 * 86_400_000)
    stored(backplane_home, "b", cost=0.25, model="m2", root="/w/1")
    stored(backplane_home, "c", cost=None)
    refused = {"backplane": {"end": {"reason": "refused", "code": "policy_denied"}}}
    stored(backplane_home, "c", outcome="failed", usage_raw=refused)
    found = [json.loads(line) for line in cli(folder, "cost", "--json").stdout.splitlines()]
    assert [(one["key"], one["cost_usd_micros"], one["known_usd_micros"], one["unknown"]) for one in found] == [
        ("a", None, 500_000, 1),
        ("b", 250_000, 250_000, 0),
        ("c", None, None, 1),
        (None, None, 750_000, 2),
    ]
    by = {word: [line.split()[0] for line in cli(folder, "cost", "--by", word).stdout.splitlines()[:-1]]
          for word in ("model", "folder", "session")}  # fmt: skip
    assert by == {"model": ["m1", "m2", "(not"], "folder": ["/w/1", "/w", "/w/2"], "session": ["(not"]}
    assert len(cli(folder, "cost", "--by", "day").stdout.splitlines()) == 3


def test_known_tokens_are_shown_although_one_run_reported_none(folder: Path, backplane_home: Path) -> None:
    for used in (Usage(input_tokens=1_000, output_tokens=50), Usage(), Usage(input_tokens=200)):
        stored(backplane_home, "a", usage=used)
    stored(backplane_home, "b")
    (first, *_) = (json.loads(line) for line in cli(folder, "cost", "--json").stdout.splitlines())
    assert (first["input_tokens"], first["known_input_tokens"], first["known_output_tokens"]) == (None, 1_200, 50)


@pytest.mark.parametrize(
    ("told", "default", "counts"),
    [
        ("dear-model", "cheap-model", False),
        ("dear-model-2026-01-15", "dear-model", True),
        ("gpt-5-mini", "gpt-5", False),
        (None, "cheap-model", True),
    ],
)
def test_a_run_counts_for_the_model_of_its_receipt(
    folder: Path, backplane_home: Path, told: str | None, default: str, counts: bool
) -> None:
    configure(folder, mine=WORKS)
    with (folder / "backplane.toml").open("a") as file:
        file.write(f'models = ["{default}"]\n')
    stored(backplane_home, "mine", cost=0.9, usage_raw={} if told is None else {"model": told})
    world = look_around(load(None, {}, folder), {}, backplane_home)
    (option,) = [one for one in world.choose(task_of(WorkOrder("x"))).options if one.backend == "mine"]
    assert (option.cost is not None and option.cost.basis == "measured") is counts


# Prices and pauses ----------------------------------------------------------------------------------------------------


def test_the_pause_that_a_service_asks_for_is_in_the_receipt_and_closes_its_backend(
    folder: Path, backplane_home: Path
) -> None:
    fault = {"fault": {"status": 429, "headers": {"retry-after": "600"}}}
    with ModelServer([fault] * 8) as server:
        (folder / "backplane.toml").write_text(
            '[backends.mine]\nhost = "api"\noptions = { protocol = "openai_compatible", model = "m", '
            f'base_url = "{server.base_url("openai_compatible")}" }}\n'
        )
        done, added = ran(folder)
    assert done.returncode == 1
    assert added["end"]["code"] == "backend_rate_limited"
    assert added["retry_after_ms"] == 600_000
    assert "rate_limited: its service wants no request before" in cli(folder, "run", "--dry-run", "-v", "x").stdout


def test_a_run_without_a_session_of_ours_is_summed_up_by_the_agents_own(folder: Path, backplane_home: Path) -> None:
    chosen = {"route": {"chosen": {"backend": "b", "model": "chosen"}}}
    stored(backplane_home, "b", usage_raw={"backplane": {"session": {"id": "theirs"}} | chosen})
    ours = {"session": {"id": "theirs"}, "parent": {"session": "ours"}}
    stored(backplane_home, "b", usage_raw={"model": "said", "backplane": ours | chosen})
    stored(backplane_home, "b", model="asked", usage_raw={"model": 7, "backplane": {"parent": "x"}})
    for by, keys in (("session", {"theirs", "ours", None}), ("model", {"chosen", "said", "asked"})):
        found = [json.loads(line) for line in cli(folder, "cost", "--by", by, "--json").stdout.splitlines()]
        assert {one["key"] for one in found[:-1]} == keys


def test_runs_that_are_told_again_cost_nothing_and_what_is_unknown_stays_so(folder: Path, backplane_home: Path) -> None:
    configure(folder, works=WORKS)
    for _ in range(2):
        assert cli(folder, "run", "do it", "--backend", "works", "--param", "abp.pure=true").returncode == 0
    assert cli(folder, "run", "again", "--backend", "replay:last").returncode == 0
    # Of a copy, or cut off by a kill, only one of both is there: the receipt's word, or the head's.
    stored(backplane_home, "copied", usage_raw={"backplane": {"replay": {"run": "x", "with_patch": False}}})
    stored(backplane_home, "replay:x", usage_raw={"backplane": {"end": {"reason": "interrupted"}}})
    for by in ("provider", "session"):
        done = cli(folder, "cost", "--by", by, "--json")
        *found, total = [json.loads(line) for line in done.stdout.splitlines()]
        assert (total["runs"], total["unknown"], total["cost_usd_micros"]) == (1, 0, 250_000)
        assert len(found) == 1
    stored(backplane_home, "other", usage_raw={"backplane": {"end": {"reason": "interrupted"}}})
    assert json.loads(cli(folder, "cost", "--json").stdout.splitlines()[-1])["unknown"] == 1
