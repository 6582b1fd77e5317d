"""Prices and sums: unknown stays unknown, and money is counted in whole millionths."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.dialects.ir import TokenCounts
from backplane.errors import ConfigError
from backplane.upstream.cost import MICROS, Price, Spent, actual, read_price
from backplane.upstream.prices import known_models, price_of

PRICE = Price(input=3_000_000, output=15_000_000, cache_read=300_000, cache_write=3_750_000)
COUNTS = st.integers(0, 10**9)


def test_an_answer_costs_its_plain_cached_and_made_tokens() -> None:
    usage = TokenCounts(input=1_000_000, output=100_000, cache_read=500_000, cache_write=200_000)
    assert actual(PRICE, usage) == 300_000 * 3 + 500_000 * 3 // 10 + 200_000 * 375 // 100 + 100_000 * 15


def test_a_part_of_a_millionth_counts_as_a_whole_one() -> None:
    assert actual(Price(input=100_000, output=0), TokenCounts(input=1, output=0)) == 1


@pytest.mark.parametrize("usage", [None, TokenCounts(), TokenCounts(input=5), TokenCounts(output=5)])
def test_what_is_not_counted_has_no_cost(usage: TokenCounts | None) -> None:
    assert actual(PRICE, usage) is None


def test_a_model_without_a_row_has_no_cost() -> None:
    assert price_of("somebody-elses-model") is None
    assert actual(None, TokenCounts(input=5, output=5)) is None


def test_every_price_has_its_source_and_its_day() -> None:
    for model in known_models():
        price = price_of(model)
        assert price is not None
        assert "." in price.source
        assert len(price.read_on) == 10
        assert 0 < price.input < price.output


@pytest.mark.parametrize("model", ["claude-sonnet-4-5-20250929", "models/gemini-3.8-flash", "gpt-5.4-2026-03-05"])
def test_a_dated_name_costs_what_its_model_does(model: str) -> None:
    assert price_of(model) is not None


def test_a_long_request_costs_its_own_price_for_every_token() -> None:
    price = price_of("gemini-3.1-pro-preview")
    assert actual(price, TokenCounts(input=200_000, output=0)) == 400_000
    assert actual(price, TokenCounts(input=200_001, output=0)) == 800_004


@given(st.lists(st.tuples(COUNTS, COUNTS), min_size=1, max_size=8))
def test_a_run_costs_the_sum_of_its_answers(answers: list[tuple[int, int]]) -> None:
    spent = Spent()
    for sent, made in answers:
        spent = spent.plus(TokenCounts(input=sent, output=made, cache_read=0, cache_write=0), PRICE)
    usage = spent.usage()
    assert usage.input_tokens == sum(sent for sent, _ in answers)
    assert usage.output_tokens == sum(made for _, made in answers)
    assert usage.request_units == len(answers)
    assert spent.micros == sum(sent * 3 + made * 15 for sent, made in answers)
    assert usage.estimated_cost_usd == spent.micros / MICROS


def test_one_answer_without_counters_makes_the_sum_unknown_for_good() -> None:
    known = TokenCounts(input=5, output=2, cache_read=0)
    spent = Spent().plus(known, PRICE).plus(None, PRICE).plus(known, PRICE)
    assert (spent.input, spent.output, spent.cache_read, spent.micros) == (None, None, None, None)
    assert spent.usage().request_units == 3
    assert spent.usage().estimated_cost_usd is None


def test_a_counter_that_a_service_never_gives_is_unknown_and_the_others_are_not() -> None:
    spent = Spent().plus(TokenCounts(input=5, output=2), PRICE)
    assert spent.usage().cache_read_tokens is None
    assert spent.micros == 5 * 3 + 2 * 15


def test_an_answer_that_was_lost_costs_at_most_and_its_tokens_are_unknown() -> None:
    price = Price(input=MICROS, output=MICROS, source="x")
    spent = Spent().plus(TokenCounts(input=10, output=5), price).plus_lost(100)
    usage = spent.usage()
    assert (spent.micros, spent.requests, usage.input_tokens, usage.output_tokens) == (115, 1, None, None)
    assert Spent().plus_lost(100).usage().estimated_cost_usd == 100 / MICROS
    assert Spent().plus_lost(None).micros is None


def test_before_the_first_answer_nothing_is_known() -> None:
    assert Spent().usage().input_tokens is None


def test_prices_of_ones_own_are_dollars_as_numbers_or_texts() -> None:
    assert read_price({"input": 0.1, "output": "2.50"}, "prices") == Price(input=100_000, output=2_500_000)


@pytest.mark.parametrize(
    "value",
    [None, [], {}, {"input": 1}, {"input": 1, "output": 2, "batch": 1}]
    + [{"input": wrong, "output": 1} for wrong in (-1, "free", True, float("nan"), float("inf"), 10**9)],
)
def test_prices_that_are_none_are_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"options\.prices") as error:
        read_price(value, "options.prices")
    assert error.value.code == "config_invalid"
