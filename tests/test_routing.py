"""The router against its page: the choice, its reasons, what they say would help, and the time it takes."""

from __future__ import annotations

import copy
import random
from typing import Any

import msgspec
import pytest

from backplane.contract.capability import Requirement, read_manifest
from backplane.contract.work import WorkOrder
from backplane.errors import CapabilityError, ConfigError
from backplane.routing import (
    STRATEGIES,
    TYPES,
    BackendState,
    Measures,
    Model,
    Observation,
    TaskDescriptor,
    choose,
    driver,
)
from backplane.routing.estimates import PERIOD_MS, circuit_until, limited_until
from backplane.routing.failover import ATTEMPTS_MAX, FailoverAttempt, moves_on
from backplane.routing.router import RoutingDecision
from backplane.routing.task import PREFERENCES, RANKS, SHARES, read_route, read_strategy
from backplane.upstream.cost import Price
from backplane.upstream.measures import estimate, weight
from backplane.upstream.prices import facts_of, price_of
from tests import routing_by_the_page as page
from tests.all.faults import sizes
from tests.peers import ROOT

NOW_MS = 1_790_000_000_000
CONTRACT = (ROOT / "docs" / "guide" / "routing-rule.md").read_text()
ABILITIES = ("tool_read", "tool_write", "tool_edit", "tool_bash", "mcp_client", "streaming")
LEVELS = ("native", "emulated", "restricted", "unsupported")


# A world as plain data, and as the router has it ----------------------------------------------------------------------


def world(draw: random.Random, backends: int = 40, runs: int = 160) -> page.World:
    """Backends with models, manifests, loads and pauses, and a history of runs on them."""
    models = [None, "m1", "m2", "m3", "m4"]
    made: list[dict[str, Any]] = []
    for number in range(backends):
        group = f"g{draw.randrange(backends // 2)}" if draw.random() < 0.4 else f"b{number}"
        names = [None] if draw.random() < 0.3 else draw.sample(models[1:], draw.randint(1, 3))
        made.append(
            {
                "name": f"b{number}",
                "group": group,
                "named_only": draw.random() < 0.03,
                "ready": draw.random() > 0.1,
                "manifest": None
                if draw.random() < 0.1
                else {name: draw.choices(LEVELS, (8, 3, 2, 1))[0] for name in ABILITIES if draw.random() < 0.9},
                "running": draw.choice((0, 0, 0, 1, 2, 5)),
                "runs_max": draw.choice((1, 2, 4, 10, 32)),
                "began_last_minute": draw.choice((0, 0, 1, 3)),
                "runs_per_minute": draw.choice((None, None, None, 2)),
                "circuit_until_ms": draw.choice((0, 0, 0, NOW_MS, NOW_MS + 1)),
                "limited_until_ms": draw.choice((0, 0, 0, NOW_MS, NOW_MS + 1)),
                "models": [
                    {
                        "name": name,
                        "prices": draw.choice(
                            (None, (draw.randrange(9) * 500_000, draw.randrange(9) * 2_000_000), (1, 1))
                        ),
                        "context_tokens": draw.choice((None, 100_000, 1_000_000)),
                        "output_tokens": draw.choice((None, 8_000, 64_000)),
                    }
                    for name in names
                ],
            }
        )
    history = []
    for _ in range(runs):
        backend = draw.choice(made)
        complete = draw.random() < 0.8
        history.append(
            {
                "backend": backend["name"],
                "group": backend["group"],
                "model": draw.choice(backend["models"])["name"],
                "type": draw.choice((None, *TYPES)),
                "began_ms": NOW_MS - draw.choice((-1, 0, 1, PERIOD_MS, 25 * PERIOD_MS, draw.randrange(9 * PERIOD_MS))),
                "duration": draw.choice((None, 0, 1000, 1000, draw.randrange(600_000))),
                "cost": draw.choice((None, 0, 5000, 5000, draw.randrange(2_000_000))),
                "complete": complete,
                "reason": "complete" if complete else draw.choice(("failed", "refused", "cancelled", "host_exit")),
            }
        )
    quality = [f"b{draw.randrange(backends)}" + draw.choice(("", "", "/m1", "/m2")) for _ in range(backends // 2)]
    tried = {f"b{draw.randrange(backends)}"} if draw.random() < 0.3 else set()
    seed = draw.randrange(5)
    return {"now_ms": NOW_MS, "seed": seed, "tried": tried, "quality": quality, "backends": made, "runs": history}


def task(draw: random.Random) -> dict[str, Any]:
    """An order; every member takes every kind of value."""
    preference = draw.choice(tuple(PREFERENCES))
    return {
        "type": draw.choice(tuple(TYPES)),
        "capabilities": [
            (name, draw.choice(("native", "emulated", "any")))
            for name in (*ABILITIES, "logprobs")
            if draw.random() < 0.05
        ],
        "preference": preference,
        "model": draw.choice(("m1", "m2", "m3")) if preference == "specific" else None,
        "max_cost_usd_micros": draw.choice((None, None, 0, 50_000, 500_000)),
        "max_latency_ms": draw.choice((None, None, 0, 1000, 300_000)),
        "allow_unknown": draw.random() < 0.5,
        "priority": draw.choice(tuple(RANKS)),
        "input_tokens": draw.choice((None, 0, 5_000, 150_000)),
        "output_tokens": draw.choice((None, 0, 2_000, 20_000)),
    }


def measures_of(data: page.World) -> Measures:
    names = {"duration": "duration_ms", "cost": "cost_usd_micros"}
    runs = [{names.get(name, name): value for name, value in run.items()} for run in data["runs"]]
    return Measures((Observation(**run) for run in runs), data["now_ms"])


def candidate_of(data: dict[str, Any]) -> BackendState:
    values = {name: value for name, value in data.items() if name not in ("ready", "manifest", "models")}
    wire = {"restricted": {"restricted": {"reason": "so"}}}
    manifest = data["manifest"]
    return BackendState(
        **values,
        not_ready="" if data["ready"] else "its program is missing",
        manifest=None
        if manifest is None
        else read_manifest({name: wire.get(level, level) for name, level in manifest.items()}),
        models=tuple(
            Model(
                name=one["name"],
                price=None if one["prices"] is None else Price(input=one["prices"][0], output=one["prices"][1]),
                context_tokens=one["context_tokens"],
                output_tokens=one["output_tokens"],
            )
            for one in data["models"]
        ),
    )


def task_of(data: dict[str, Any]) -> TaskDescriptor:
    required = tuple(Requirement(*pair) for pair in data["capabilities"])
    return TaskDescriptor(**{**data, "capabilities": required})


def decided(data: page.World, order: dict[str, Any], strategy: Any, **more: Any) -> RoutingDecision:
    given = more or {"measures": measures_of(data), "candidates": [candidate_of(one) for one in data["backends"]]}
    return choose(
        task_of(order),
        strategy=strategy,
        quality=data["quality"],
        tried=frozenset(data["tried"]),
        now_ms=data["now_ms"],
        seed=data["seed"],
        **given,
    )


# The choice -----------------------------------------------------------------------------------------------------------


def compare_with_the_page(orders: int, seed: int, orders_a_world: int = 20) -> dict[str, int]:
    """Compare choice and obstacles for all strategies, in worlds of any size; gives how often each obstacle was met."""
    draw = random.Random(seed)
    met: dict[str, int] = {"chosen": 0, "none": 0}
    for number in range(orders):
        if number % orders_a_world == 0:
            data = world(draw, backends=draw.randint(2, 40))
            given = {"measures": measures_of(data), "candidates": [candidate_of(one) for one in data["backends"]]}
        data["seed"], order = draw.randrange(5), task(draw)
        wanted, obstacles = page.choices(data, order)
        for strategy in STRATEGIES:
            found = decided(data, order, strategy, **given)
            name = found.option.name if found.option is not None else None
            assert name == wanted[strategy], (number, strategy, order)
            told = {option.name: [one.kind for one in option.obstacles] for option in found.options}
            assert told == obstacles, (number, strategy, order)
            met["none" if name is None else "chosen"] += 1
        for kinds in obstacles.values():
            for kind in kinds:
                met[kind] = met.get(kind, 0) + 1
    return met


@pytest.mark.timeout(600)
def test_the_choice_is_that_of_the_page_for_every_strategy() -> None:
    orders = sizes.of(300, 5000)
    met = compare_with_the_page(orders, seed=1)
    assert met["chosen"] + met["none"] == orders * len(STRATEGIES)
    assert met["chosen"] > 600
    assert met["none"] > 20
    assert len(met) == 2 + 16, "every obstacle of the page was met"


def remove(kind: str, subject: str, data: page.World, order: dict[str, Any], backend: Any, model: Any) -> None:
    """Change the world or the order as an obstacle says."""
    cost = page.cost_of(data, order, backend, model)
    latency = page.measured(data, backend["group"], model["name"], order["type"], "duration")
    if kind == "capability":
        backend["manifest"][subject] = "native"
    removed: dict[str, tuple[Any, str, Any]] = {
        "named_only": (backend, "named_only", False),
        "not_ready": (backend, "ready", True),
        "tried": (data, "tried", set()),
        "circuit_open": (backend, "circuit_until_ms", data["now_ms"]),
        "full": (backend, "running", 0),
        "manifest_unknown": (backend, "manifest", dict.fromkeys((*ABILITIES, "logprobs"), "native")),
        "model": (model, "name", order["model"]),
        "context": (model, "context_tokens", (order["input_tokens"] or 0) + (order["output_tokens"] or 0)),
        "output": (model, "output_tokens", order["output_tokens"]),
        "quality": (data, "quality", [*data["quality"], backend["name"]]),
        "cost_unknown": (order, "allow_unknown", True),
        "latency_unknown": (order, "allow_unknown", True),
        "cost": (order, "max_cost_usd_micros", cost[1] if cost else None),
        "latency": (order, "max_latency_ms", latency),
    }
    if kind == "rate_limited":
        backend["limited_until_ms"] = data["now_ms"]
        backend["began_last_minute"] = 0
    elif kind != "capability":
        place, name, value = removed[kind]
        place[name] = value


def test_what_is_named_as_in_the_way_is_all_that_is_in_the_way() -> None:
    draw = random.Random(3)
    checked = 0
    for _ in range(40):
        data, order = world(draw, backends=12, runs=40), task(draw)
        refused = [option for option in decided(data, order, "balanced").options if option.obstacles]
        for option in draw.sample(refused, min(4, len(refused))):
            changed, wish = copy.deepcopy(data), copy.deepcopy(order)
            backend = next(one for one in changed["backends"] if one["name"] == option.backend)
            model = next(one for one in backend["models"] if one["name"] == option.model)
            if any(one.kind == "model" for one in option.obstacles):
                # With its own name also its measures are other ones: the same runs, under the new name.
                for run in changed["runs"]:
                    if (run["group"], run["model"]) == (backend["group"], wish["model"]):
                        run["group"] = "elsewhere"
                    elif (run["group"], run["model"]) == (backend["group"], model["name"]):
                        run["model"] = wish["model"]
                backend["models"] = [model]
            for one in option.obstacles:
                assert one.change
                remove(one.kind, one.subject, changed, wish, backend, model)
            again = decided(changed, wish, "balanced")
            now = next(
                other for other in again.options if (other.backend, other.model) == (backend["name"], model["name"])
            )
            assert now.obstacles == (), (option.obstacles, now.obstacles)
            for left_in in option.obstacles:  # Each single one matters: with it the option stays refused.
                half, half_wish = copy.deepcopy(data), copy.deepcopy(order)
                its = next(one for one in half["backends"] if one["name"] == option.backend)
                its_model = next(one for one in its["models"] if one["name"] == option.model)
                for one in option.obstacles:
                    if one != left_in and one.kind not in ("model", left_in.kind):
                        remove(one.kind, one.subject, half, half_wish, its, its_model)
                stays = decided(half, half_wish, "balanced").options
                mine = next(other for other in stays if other.name == option.name)
                unknown = {"cost_unknown", "latency_unknown"}
                if not unknown <= {one.kind for one in option.obstacles}:  # One word of the order removes both.
                    assert left_in.kind in {one.kind for one in mine.obstacles}
            checked += 1
    assert checked > 100


def test_a_decision_is_the_same_however_often_it_is_made() -> None:
    draw = random.Random(5)
    data, order = world(draw), task(draw)
    assert decided(data, order, "balanced") == decided(data, order, "balanced")


# Single rules ---------------------------------------------------------------------------------------------------------


def backend(name: str, **changes: Any) -> BackendState:
    return BackendState(name=name, **{"group": name, **changes})


def run(name: str, **changes: Any) -> Observation:
    values: dict[str, Any] = {"backend": name, "group": name, "model": None, "began_ms": NOW_MS - 1000, **changes}
    return Observation(**values)


def pick(*candidates: BackendState, runs: Any = (), strategy: Any = "balanced", **wish: Any) -> RoutingDecision:
    given = {name: wish.pop(name) for name in ("quality", "seed", "tried") if name in wish}
    return choose(TaskDescriptor(**wish), candidates, Measures(runs, NOW_MS), strategy=strategy, now_ms=NOW_MS, **given)


def name_of(decision: RoutingDecision) -> str | None:
    return None if decision.option is None else decision.option.name


def test_the_cheapest_the_fastest_and_the_first_are_three_backends() -> None:
    runs = [
        run("first", cost_usd_micros=900, duration_ms=900),
        run("cheap", cost_usd_micros=100, duration_ms=1000),
        run("fast", cost_usd_micros=1000, duration_ms=100),
    ]
    backends = [backend("first"), backend("cheap"), backend("fast")]
    chosen = {strategy: name_of(pick(*backends, runs=runs, strategy=strategy)) for strategy in STRATEGIES}
    assert chosen == {"first_available": "first", "cost": "cheap", "latency": "fast", "balanced": "cheap"}
    assert name_of(pick(*backends, runs=runs, preference="speed", strategy="cost")) == "fast"
    assert name_of(pick(*backends, runs=runs, preference="cost", strategy="latency")) == "cheap"


def test_an_unknown_cost_is_the_last_choice_and_never_zero() -> None:
    known = [run("dear", cost_usd_micros=5_000_000)]
    assert name_of(pick(backend("unknown"), backend("dear"), runs=known, strategy="cost")) == "dear"


def test_a_backend_that_fails_costs_what_it_takes_to_get_a_complete_run() -> None:
    failed = [run("cheap", cost_usd_micros=100, complete=False, reason="failed") for _ in range(9)]
    runs = [*failed, run("cheap", cost_usd_micros=100), run("sure", cost_usd_micros=900)]
    assert name_of(pick(backend("cheap"), backend("sure"), runs=runs, strategy="cost")) == "sure"


def test_a_week_halves_what_a_run_counts() -> None:
    assert [weight(NOW_MS - age, NOW_MS, PERIOD_MS) for age in (0, PERIOD_MS - 1, PERIOD_MS, 20 * PERIOD_MS, -1)] == [
        1 << 20,
        1 << 20,
        1 << 19,
        0,
        0,
    ]
    old, new = run("b", cost_usd_micros=300, began_ms=NOW_MS - PERIOD_MS), run("b", cost_usd_micros=0)
    found = Measures([old, new], NOW_MS).cost("b", None, "custom")
    assert found is not None
    assert found.value == 100


def test_confidence_grows_with_runs_and_falls_with_their_spread() -> None:
    def confidence(*values: int) -> int:
        found = estimate([(1, value, True) for value in values])
        assert found is not None
        return found.confidence

    assert confidence(100) == 0
    assert confidence(100, 100) == 1000
    assert confidence(90, 110) == 929
    assert confidence(90, 110) < confidence(90, 110, 90, 110)
    assert confidence(0, 1000) == 292


def test_runs_of_the_same_type_count_alone_from_three_on() -> None:
    others = [run("b", cost_usd_micros=1000) for _ in range(3)]
    reviews = [run("b", cost_usd_micros=100, type="code_review") for _ in range(3)]
    two = Measures([*others, *reviews[:2]], NOW_MS).cost("b", None, "code_review")
    three = Measures([*others, *reviews], NOW_MS).cost("b", None, "code_review")
    assert two is not None
    assert three is not None
    assert (two.value, three.value) == (640, 100)


def test_quality_is_the_order_of_the_configuration_and_else_unknown() -> None:
    backends = [backend("a"), backend("b", models=(Model(name="x"), Model(name="y")))]
    assert name_of(pick(*backends, quality=("b/y", "a"), preference="quality")) == "b/y"
    unknown = pick(*backends, preference="quality")
    assert unknown.option is None
    with pytest.raises(CapabilityError, match="no backend can take this order") as refused:
        unknown.chosen()
    assert refused.value.code == "capability_unsupported"
    assert refused.value.evidence is not None
    assert "b/y: quality" in refused.value.evidence


def test_the_least_loaded_instance_comes_first_and_a_seed_spreads_the_rest() -> None:
    def instances(*running: int) -> list[BackendState]:
        return [backend(f"i{n}", group="g", running=load, runs_max=10) for n, load in enumerate(running)]

    assert name_of(pick(*instances(3, 1, 2))) == "i1"
    assert {name_of(pick(*instances(0, 0, 0), seed=seed)) for seed in range(20)} == {"i0", "i1", "i2"}


def test_low_priority_leaves_places_and_high_takes_the_last() -> None:
    busy = backend("b", running=9, runs_max=10)
    assert [name_of(pick(busy, priority=priority)) for priority in RANKS] == [None, None, "b", "b"]
    assert name_of(pick(backend("b", runs_max=1), priority="low")) == "b"


def test_a_custom_strategy_gets_the_eligible_options_alone() -> None:
    seen: list[str] = []

    def last(_: TaskDescriptor, options: Any) -> int:
        seen.extend(option.name for option in options)
        return len(options) - 1

    backends = [backend("a"), backend("shell", named_only=True), backend("b")]
    assert name_of(pick(*backends, strategy=last)) == "b"
    assert seen == ["a", "b"]
    nothing = pick(*backends, strategy=lambda task, options: None)
    with pytest.raises(CapabilityError, match="the custom strategy took no backend"):
        nothing.chosen()
    for wrong in (2, -1, True, "a"):
        with pytest.raises(ConfigError, match="custom strategy returned"):
            pick(*backends, strategy=lambda task, options, wrong=wrong: wrong)


def test_three_failures_in_a_row_open_a_circuit_that_opens_longer_each_time() -> None:
    def failures(count: int, code: str = "backend_crashed") -> list[Observation]:
        return [run("b", began_ms=NOW_MS - n, complete=False, reason="failed", code=code) for n in range(count)]

    waits = [circuit_until(failures(count)) for count in (2, 3, 4, 9)]
    assert waits == [0, NOW_MS + 60_000, NOW_MS + 120_000, NOW_MS + 900_000]
    assert circuit_until(failures(3, "backend_auth_failed")) == 0
    assert circuit_until([*failures(3), run("b", began_ms=NOW_MS + 1)]) == 0
    cancelled = run("b", began_ms=NOW_MS + 1, complete=False, reason="cancelled")
    assert circuit_until([*failures(3), cancelled]) == NOW_MS + 60_000


def test_a_rate_limit_closes_a_backend_for_what_its_service_asked_for() -> None:
    limited = run("b", duration_ms=500, complete=False, reason="failed", code="backend_rate_limited")
    assert limited_until([limited]) == limited.began_ms + 500 + 30_000
    asked = msgspec.structs.replace(limited, retry_after_ms=120_000)
    assert limited_until([limited, asked]) == limited.began_ms + 500 + 120_000
    assert limited_until([run("b")]) == 0


@pytest.mark.parametrize(
    "wrong",
    [{"model": "m"}, {"preference": "specific"}, {"max_cost_usd_micros": -1}, {"input_tokens": -5}],
)
def test_a_task_that_contradicts_itself_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"model|below zero"):
        TaskDescriptor(**wrong)


def test_an_unknown_strategy_is_refused_with_those_there_are() -> None:
    assert read_strategy("cost") == "cost"
    with pytest.raises(ConfigError, match=r"no such strategy: 'cheapest' is none of .*'balanced'"):
        read_strategy("cheapest")


# The page ------------------------------------------------------------------------------------------------------------


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    part = CONTRACT.partition(f"# {heading}\n")[2].partition("\n#")[0]
    table = [line.strip("| ").split("|") for line in part.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line] for line in table]


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    types = {
        name.strip("`"): (
            [] if needs == "nothing" else needs.replace("`", "").split(", "),
            int(sent.replace(",", "")),
            int(made.replace(",", "")),
        )
        for name, needs, sent, made in rows("Types")
    }
    assert types == {
        name: ([one.capability for one in facts.requires], facts.input_tokens, facts.output_tokens)
        for name, facts in TYPES.items()
    }
    assert [row[0].strip("`") for row in rows("Preferences")] == list(PREFERENCES)
    priorities = {row[0].strip("`"): (int(row[1]), int(row[2])) for row in rows("Priorities")}
    assert priorities == {name: (RANKS[name], SHARES[name]) for name in RANKS}
    assert (len(types), len(PREFERENCES), len(priorities)) == (7, 5, 4)


# What an order wishes -------------------------------------------------------------------------------------------------


def test_what_an_order_says_of_its_routing_is_read_strictly() -> None:
    order = WorkOrder("x").with_abp("route", {"type": "code_review", "priority": "high", "seed": 3})
    task = driver.task_of(order)
    assert (task.type, task.priority, task.strategy, task.seed) == ("code_review", "high", None, 3)
    wrongs: list[tuple[Any, str, str]] = [
        ({"tpye": "x"}, "(did you mean 'type'?) - at `$.tpye`", "see docs"),
        ({"priority": "hihg"}, "(did you mean 'high'?) - at `$.priority`", "see docs"),
        ({"strategy": "cots"}, "(did you mean 'cost'?) - at `$.strategy`", "see docs"),
        ({"priority": "high", "seed": "x"}, "- at `$.seed`", "see docs"),
        ({"max_latency_ms": -1}, "`max_latency_ms` is below zero", "see docs"),
        ({"preference": "specific"}, "`model` goes with", "see docs"),
        ({"model": "m"}, "model has another place", "set config.model"),
        ([], "object", "see docs"),
    ]
    for wrong, fact, hint in wrongs:
        with pytest.raises(ConfigError, match=r"config\.vendor\.abp\.route") as refused:
            read_route(wrong)
        assert fact in refused.value.message
        assert str(refused.value.hint).startswith(hint)


# What follows when it fails -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempts", "changes", "goes_on"),
    [
        (1, {}, True),
        (ATTEMPTS_MAX - 1, {}, True),
        (ATTEMPTS_MAX, {}, False),
        (1, {"code": "config_invalid"}, False),
        (1, {"limit": "budget"}, False),
        (1, {"effect": "file_changed a"}, False),
    ],
)
def test_an_order_goes_on_elsewhere_before_an_effect_and_three_times_at_most(
    attempts: int, changes: dict[str, str], goes_on: bool
) -> None:
    given: dict[str, Any] = {"backend": "b", "run_id": "r", "code": "backend_unavailable", **changes}
    failed = FailoverAttempt(**given)
    assert moves_on(attempts, failed) == goes_on


def test_a_model_has_the_price_and_the_window_of_its_own_vendor() -> None:
    known = facts_of("claude-sonnet-5-5")
    assert (known.price, known.context_tokens) == (price_of("claude-sonnet-5-5-20261001"), 1_000_000)
    assert known.price is not None
    assert facts_of("a-model-of-nobody").price is None
