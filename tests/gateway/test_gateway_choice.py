"""Routes with a strategy: the order by price, time and both, services that rest, and what the record says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backplane.config import GatewayRouteSettings, GatewaySettings, Settings, parse
from backplane.errors import ConfigError
from backplane.gateway import choice, journal, routes
from backplane.gateway.choice import PASSED_MAX, PERIOD_MS, RequestFacts, Standing, Times, order
from backplane.gateway.journal import now, recent_ends
from backplane.gateway.record import ExchangeEnd, joined
from backplane.gateway.routes import ModelRoutes, ModelTarget
from backplane.testing import Failure, Fault, ModelServer, ProtocolName, Turn, When
from backplane.upstream.cost import Price
from backplane.upstream.endpoint import Endpoint
from backplane.upstream.failure import UpstreamFailure
from backplane.upstream.measures import CIRCUIT_FAILURES, CIRCUIT_MS, RATE_LIMITED_MS
from backplane.view.exchanges import exchange_facts
from tests.gateway.ground import backend, gateway
from tests.gateway.test_gateway import CHAT, MESSAGES, ask, said
from tests.gateway.test_gateway_record import begin, end, write

NOW = 1_790_000_000_000
ASKED = RequestFacts(size=4_000, longest=1_000, stream=True)
CHEAP = Price(input=1_000_000, output=1_000_000)
DEAR = Price(input=3_000_000, output=3_000_000)
DOWN = UpstreamFailure(code="backend_unavailable", message="down", status=503)
WRONG = UpstreamFailure(code="mapping_unsupported_capability", message="no", status=400)


def limited(retry_after_s: float | None = None) -> UpstreamFailure:
    return UpstreamFailure(code="backend_rate_limited", message="slow", status=429, retry_after_s=retry_after_s)


def service(name: str, price: Price | None = None, *times: int) -> ModelTarget:
    """A service with measured times, all of now."""
    endpoint = Endpoint(protocol=CHAT, base_url="http://127.0.0.1:1/v1")
    found = ModelTarget(backend=name, endpoint=endpoint, model="m", standing=Standing(), configured_price=price)
    for ms in times:
        found.standing.times(stream=True).add(NOW, ms)
    return found


def names(strategy: Any, *services: ModelTarget, request: RequestFacts = ASKED, at: int = NOW) -> str:
    return "".join(one.backend for one in order(strategy, services, request, at).targets)


# The order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "a", "b", "c", "expected"),
    [
        ("first_available", (DEAR, 900), (CHEAP, 100), (None,), "abc"),
        ("cost", (DEAR, 100), (CHEAP, 900), (CHEAP, 100), "bca"),
        ("cost", (None, 100), (DEAR,), (CHEAP,), "cba"),
        ("cost", (None,), (None,), (None,), "abc"),
        ("latency", (CHEAP, 900), (DEAR, 100), (DEAR, 100), "bca"),
        ("latency", (CHEAP,), (DEAR, 900), (DEAR, 100), "cba"),
        ("latency", (CHEAP,), (CHEAP,), (CHEAP,), "abc"),
        ("balanced", (DEAR, 100), (CHEAP, 300), (DEAR, 900), "bac"),  # 1111, 666, 2000
        ("balanced", (CHEAP,), (DEAR, 100), (None, 900), "bac"),  # 1333, 1111, 2000: unknown is 1000
        ("balanced", (None,), (CHEAP, 900), (None, 900), "abc"),  # all 2000: the order of the route
    ],
)
def test_services_are_ordered_by_the_rule_of_the_router(
    strategy: str, a: tuple[Any, ...], b: tuple[Any, ...], c: tuple[Any, ...], expected: str
) -> None:
    rows = zip("abc", (a, b, c), strict=True)
    assert names(strategy, *(service(name, *row) for name, row in rows)) == expected


def test_the_price_is_that_of_the_request_and_its_longest_answer() -> None:
    reader, writer = Price(input=1_000_000, output=9_000_000), Price(input=2_000_000, output=1_000_000)
    both = service("r", reader), service("w", writer)
    assert names("cost", *both, request=RequestFacts(size=400_000, longest=1_000, stream=False)) == "rw"
    assert names("cost", *both, request=RequestFacts(size=4_000, longest=None, stream=False)) == "wr"
    assert names("cost", *both, request=RequestFacts(size=4_000, longest=0, stream=False)) == "rw"


def test_a_long_input_has_the_price_of_long_inputs() -> None:
    stepped = Price(input=1, output=1, long_tokens=200_000, long=DEAR)
    both = service("s", stepped), service("c", CHEAP)
    assert names("cost", *both) == "sc"
    assert names("cost", *both, request=RequestFacts(size=4_000_000, longest=1_000, stream=True)) == "cs"


def test_times_of_streams_and_of_whole_answers_are_apart() -> None:
    a, b = service("a", None, 100), service("b", None, 900)
    for one, ms in ((a, 900), (b, 100)):
        one.standing.times(stream=False).add(NOW, ms)
    assert names("latency", a, b) == "ab"
    assert names("latency", a, b, request=RequestFacts(size=1, longest=1, stream=False)) == "ba"


# Times ----------------------------------------------------------------------------------------------------------------


def test_a_time_counts_half_as_much_a_period_later_and_a_failure_costs_time() -> None:
    found = Times()
    assert found.expected(NOW) is None
    found.add(NOW - PERIOD_MS, 300)
    found.add(NOW, 600)
    assert found.expected(NOW) == 500
    found.add(NOW, 1_000, is_complete=False)
    assert found.expected(NOW) == 1_167
    assert found.expected(NOW + 30 * PERIOD_MS) is None


def test_only_the_newest_times_count() -> None:
    found = Times()
    for ms in range(2 * choice.TIMES_MAX):
        found.add(NOW, ms)
    assert found.expected(NOW) == choice.TIMES_MAX + choice.TIMES_MAX // 2


@pytest.mark.parametrize("strategy", ["latency", "balanced"])
def test_a_service_whose_time_nobody_knows_is_first_for_one_of_many_requests(strategy: str) -> None:
    a, b = service("a", CHEAP, 100), service("b", CHEAP)
    firsts = "".join(names(strategy, a, b)[0] for _ in range(2 * PASSED_MAX + 2))
    assert firsts == ("a" * PASSED_MAX + "b") * 2
    b.standing.times(stream=True).add(NOW, 900)
    assert "b" not in [names(strategy, a, b)[0] for _ in range(2 * PASSED_MAX)]
    a.standing.times(stream=True).add(NOW + PERIOD_MS, 100)
    assert order(strategy, (a, b), ASKED, NOW + PERIOD_MS).considered[0].endswith("measured anew")  # type: ignore[arg-type]


def test_a_count_of_tokens_measures_no_service() -> None:
    a, b = service("a", CHEAP, 100), service("b", CHEAP)
    count = ASKED._replace(is_measured=False)
    assert "b" not in [names("latency", a, b, request=count)[0] for _ in range(2 * PASSED_MAX)]
    assert names("latency", a, b) == "ab"


# Rests ----------------------------------------------------------------------------------------------------------------


def test_a_service_that_failed_several_times_in_a_row_is_asked_last_for_a_while() -> None:
    a, b = service("a"), service("b")
    for _ in range(CIRCUIT_FAILURES):
        assert names("first_available", a, b) == "ab"
        a.standing.note(DOWN, NOW)
    found = order("first_available", (a, b), ASKED, NOW + 1_000)
    assert found.considered == ("b/m", "a/m: rests 59 s: failed 3 times in a row")
    assert names("first_available", a, b, at=NOW + CIRCUIT_MS) == "ab"


def test_one_more_failure_after_the_rest_doubles_it_and_an_answer_ends_it() -> None:
    a, b = service("a"), service("b")
    for _ in range(CIRCUIT_FAILURES + 9):  # Those after the third were asked before it rested.
        a.standing.note(DOWN, NOW)
    later = NOW + CIRCUIT_MS
    a.standing.note(DOWN, later)
    assert names("first_available", a, b, at=later + CIRCUIT_MS) == "ba"
    assert names("first_available", a, b, at=later + 2 * CIRCUIT_MS) == "ab"
    a.standing.note(None, later)
    assert names("first_available", a, b, at=later) == "ab"


def test_an_answer_begins_the_count_of_failures_anew() -> None:
    a, b = service("a"), service("b")
    for failure in (*[DOWN] * CIRCUIT_FAILURES, None, *[DOWN] * (CIRCUIT_FAILURES - 1)):
        a.standing.note(failure, NOW)
    assert names("first_available", a, b) == "ab"
    a.standing.note(DOWN, NOW)
    assert names("first_available", a, b) == "ba"


def test_refusals_of_a_request_are_not_the_services_failures() -> None:
    a, b = service("a"), service("b")
    for failure in (DOWN, DOWN, WRONG, DOWN, DOWN, WRONG, WRONG, WRONG):
        a.standing.note(failure, NOW)
    assert names("first_available", a, b) == "ab"


@pytest.mark.parametrize(("asked_s", "rest_ms"), [(None, RATE_LIMITED_MS), (7.5, 7_500)])
def test_a_service_over_its_limit_rests_until_its_time(asked_s: float | None, rest_ms: int) -> None:
    a, b = service("a"), service("b")
    a.standing.note(limited(asked_s), NOW)
    assert [names("first_available", a, b, at=NOW + rest_ms - ms) for ms in (1, 0)] == ["ba", "ab"]


def test_services_that_all_rest_are_asked_in_the_order_of_the_route() -> None:
    a, b = service("a", DEAR), service("b", CHEAP)
    for one in (a, b):
        one.standing.note(limited(60), NOW)
    assert names("cost", a, b) == "ab"


# Through the gateway --------------------------------------------------------------------------------------------------


def route(strategy: Any, *services: str) -> GatewayRouteSettings:
    return GatewayRouteSettings(services=services, strategy=strategy)


def test_the_cheaper_service_answers_and_the_record_says_what_was_considered() -> None:
    with ModelServer(Turn(text="no")) as dear, ModelServer(Turn(text="here")) as cheap:
        services = {
            "dear": backend(dear, CHAT, prices={"input": 3, "output": 3}),
            "cheap": backend(cheap, MESSAGES, prices={"input": 1, "output": 1}),
            "other": backend(dear, CHAT),
        }
        with gateway(services, {"m": route("cost", "other/x", "dear/x", "cheap/y")}) as gate:
            assert "here" in str(said(gate, max_tokens=1_000_000)[1])
            (found,) = gate.ends
    assert (found.backend, found.tried) == ("cheap", ())
    assert found.considered == ("cheap/y: $1.0000", "dear/x: $3.0001", "other/x: price unknown")


def test_the_quicker_service_answers_once_both_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "PASSED_MAX", 1)
    slow = Turn(text="slow", fault=Fault(first_byte_ms=250), times=None)
    with ModelServer(slow) as one, ModelServer(Turn(text="quick", times=None)) as two:
        services = {"a": backend(one, CHAT), "b": backend(two, MESSAGES)}
        with gateway(services, {"m": route("latency", "a", "b")}) as gate:
            for _ in range(4):
                assert said(gate, stream=True)[0] == 200
                assert gate.ends
            ends = gate.ends
    assert "".join(line.backend or "?" for line in ends) == "abbb"
    assert ends[0].considered == ("a/m: time unknown", "b/m: time unknown")
    assert ends[-1].considered[0].startswith("b/m: ")
    assert ends[-1].considered[1].startswith("a/m: ")


def test_a_service_over_its_limit_is_passed_over_at_the_next_request() -> None:
    busy = Turn(fault=Fault(status=429, headers={"retry-after": "60"}), times=None)
    with ModelServer(busy) as one, ModelServer(Turn(text="here", times=None)) as two:
        with gateway({"a": backend(one, CHAT), "b": backend(two, CHAT)}, {"m": ["a", "b"]}) as gate:
            for _ in range(2):
                assert "here" in str(said(gate)[1])
                assert gate.ends
            first, second = gate.ends
        assert len(one.requests) == 1
    assert (first.tried, first.considered) == (("a: backend_rate_limited",), ("a/m", "b/m"))
    assert (second.tried, second.considered[0]) == ((), "b/m")
    assert second.considered[1].startswith("a/m: rests ")
    assert second.considered[1].endswith(" s: over its limit")


def test_a_service_that_is_down_is_left_alone_after_three_requests() -> None:
    down, here = Turn(fault=Fault(status=503), times=None), Turn(text="here", times=None)
    with ModelServer(down) as one, ModelServer(here) as two:
        with gateway({"a": backend(one, CHAT), "b": backend(two, CHAT)}, {"m": ["a", "b"]}) as gate:
            for stream in (False, True, False, True):
                assert said(gate, stream=stream)[0] == 200
                assert gate.ends
            ends = gate.ends
        assert len(one.requests) == CIRCUIT_FAILURES
    assert [line.tried for line in ends] == [("a: backend_unavailable",)] * CIRCUIT_FAILURES + [()]
    assert ends[-1].considered[1].endswith(" s: failed 3 times in a row")


@pytest.mark.parametrize("front", [CHAT, MESSAGES])
def test_answers_that_break_off_are_failures_too(front: ProtocolName) -> None:
    torn = Turn(text="so far and on", fault=Fault(failure=Failure(code="overloaded_error", message="busy")), times=None)
    with (
        ModelServer(torn) as one,
        ModelServer(Turn(text="here", times=None)) as two,
        gateway({"a": backend(one, MESSAGES), "b": backend(two, CHAT)}, {"m": ["a", "b"]}) as gate,
    ):
        for _ in range(CIRCUIT_FAILURES + 1):
            said(gate, front, stream=True)
            assert gate.ends
        assert "".join(line.backend or "?" for line in gate.ends) == "aaab"


def test_a_model_over_its_limit_leaves_the_services_other_models_in_use() -> None:
    busy = Turn(fault=Fault(status=429), when=When(anywhere='"model":"big"'), times=None)
    with ModelServer([busy, Turn(text="here"), Turn(text="here")]) as one:
        with gateway({"a": backend(one, CHAT)}, {"m": ["a/big", "a/small"]}) as gate:
            assert [said(gate)[0] for _ in range(2)] == [200, 200]
        assert [request.body["model"] for request in one.requests] == ["big", "small", "small"]


def test_names_that_clients_make_up_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "STANDINGS_MAX", 3)
    found = ModelRoutes(Settings(gateway=GatewaySettings(models={"*": "openai"})), {})
    kept = [found.targets(f"m{number}")[0].standing for number in range(4)]
    assert found.targets("m3")[0].standing is kept[3]
    assert found.targets("m0")[0].standing is not kept[0]


def test_a_single_service_that_rests_is_asked_and_its_record_names_no_choice() -> None:
    busy = Turn(fault=Fault(status=429, headers={"retry-after": "60"}), times=None)
    with ModelServer(busy) as one, gateway({"a": backend(one, CHAT)}, {"m": "a"}) as gate:
        assert [said(gate)[0] for _ in range(2)] == [429, 429]
        assert [line.considered for line in gate.ends] == [(), ()]


def test_the_time_of_a_fallback_is_its_own() -> None:
    slow = Turn(fault=Fault(status=503, first_byte_ms=300))
    with (
        ModelServer(slow) as one,
        ModelServer(Turn(text="here")) as two,
        gateway({"a": backend(one, CHAT), "b": backend(two, CHAT)}, {"m": ["a", "b"]}) as gate,
    ):
        assert said(gate, stream=True)[0] == 200
        (found,) = gate.ends
    assert found.first_ms is not None
    assert 300 <= found.asked_ms <= found.first_ms


def test_show_says_why_a_service_was_chosen() -> None:
    considered = ("b/m: 12 ms", "a/m: rests 9 s: over its limit, time unknown")
    found = joined(begin(1), None, end(1, backend="b", model="m", considered=considered), is_live=False)
    assert exchange_facts(found, NOW)["chosen"] == "b/m: 12 ms; a/m: rests 9 s: over its limit, time unknown"


# The record of earlier starts -----------------------------------------------------------------------------------------


def times_of(home: Path, strategy: str = "latency") -> tuple[str, ...]:
    rows = {"m": route(strategy, "openai/x", "anthropic/y")}
    found = ModelRoutes(Settings(gateway=GatewaySettings(models=rows)), {})  # type: ignore[arg-type]
    for line in recent_ends(home):
        found.learn(line)
    return found.choose("m", ASKED).considered


def test_a_start_knows_the_times_of_earlier_exchanges(tmp_path: Path) -> None:
    lines: list[ExchangeEnd] = [
        end(1, now(), backend="openai", model="x", ms=9_000, first_ms=800),
        end(2, now(), backend="anthropic", model="y", ms=9_000, first_ms=700, asked_ms=500, tried=("openai: down",)),
        end(3, now(), backend="anthropic", model="y", ms=5),  # A whole answer.
        end(4, now(), backend="anthropic", model="y", ms=5, first_ms=1, end="left"),
        end(5, now(), backend="gone", model="y", ms=5, first_ms=1),
        end(6, "yesterday", backend="anthropic", model="y", ms=5, first_ms=1),
    ]
    write(tmp_path, *lines).close()
    assert times_of(tmp_path) == ("anthropic/y: 200 ms", "openai/x: 800 ms")


def test_a_start_reads_only_the_newest_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, end(1, now(), backend="openai", model="x", first_ms=1)).close()
    newest = write(tmp_path, begin(2), *(end(n, now(), backend="openai", model="x", first_ms=500) for n in (2, 3)))
    newest.close()
    monkeypatch.setattr(journal, "RECENT_BYTES", newest.path.stat().st_size - 10)
    assert [line.id[-1] for line in recent_ends(tmp_path)] == ["2", "3"]
    assert times_of(tmp_path)[0] == "openai/x: 500 ms"


# Settings -------------------------------------------------------------------------------------------------------------


def test_a_route_in_a_file_is_a_name_a_list_or_a_table() -> None:
    text = '[gateway.models]\na = "x"\nb = ["x", "y/z"]\nc = { services = ["x"], strategy = "cost" }\n'
    found = parse(text.encode(), source="f", folder=Path("/")).gateway.models
    assert found == {"a": "x", "b": ("x", "y/z"), "c": route("cost", "x")}
    text = '[gateway.models."gpt-*"]\nservices = ["x", "y"]\n'
    found = parse(text.encode(), source="f", folder=Path("/")).gateway.models
    assert found == {"gpt-*": route("first_available", "x", "y")}


@pytest.mark.parametrize(
    ("row", "fact"),
    [
        ('{ services = ["x"], strategy = "cheapest" }', "'cheapest' is none of 'balanced', 'cost'"),
        ('{ services = ["x"], strategies = "cost" }', "did you mean 'strategy'?"),
        ('{ strategy = "cost" }', "missing required field `services`"),
        ("{ services = [] }", "length >= 1"),
        ("[]", "length >= 1"),
        ("3", "got `integer`"),
    ],
)
def test_a_wrong_route_is_refused_with_its_fact_and_the_next_step(row: str, fact: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f'[gateway.models]\na = "x"\nm = {row}\nz = 5\n'.encode(), source="f.toml", folder=Path("/"))
    assert (caught.value.code, fact in caught.value.message) == ("config_invalid", True), caught.value.message
    assert caught.value.message.startswith("f.toml, line 3: `gateway.models.m")
    assert caught.value.hint == "see `backplane schema configuration`"


def test_a_service_of_a_route_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError) as caught, gateway({}, {"m": route("cost", "openai", "nowhere")}):
        pass
    assert (caught.value.code, "'nowhere'" in caught.value.message) == ("backend_not_found", True)


def test_lists_name_a_model_whose_route_has_a_strategy() -> None:
    with ModelServer([]) as server, gateway({"a": backend(server, CHAT)}, {"gpt-5": route("cost", "a")}) as gate:
        listed = json.loads(ask(gate, "/v1/models", None, method="GET")[2])
    assert [row["id"] for row in listed["data"]] == ["gpt-5"]
