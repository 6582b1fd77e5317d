"""Tasks labelled by stated facts, given to the router as orders are: over 90 % have to go where the label says."""

from __future__ import annotations

from typing import Any

from backplane.contract.capability import Requirement, Requirements, read_manifest
from backplane.contract.work import RuntimeConfig, WorkOrder
from backplane.routing import BackendState, Measures, Model, Observation, choose
from backplane.routing.driver import task_of
from tests.routing_labels import BACKENDS, QUALITY, ROWS, TYPES

NOW_MS = 1_790_000_000_000
LATER_MS = NOW_MS + 60_000
STATES: dict[str, dict[str, Any]] = {
    "not_ready": {"not_ready": "its program is missing"},
    "circuit_open": {"circuit_until_ms": LATER_MS},
    "rate_limited": {"limited_until_ms": LATER_MS},
    "named_only": {"named_only": True},
}


MISSES = (("complex_workflow", "{}", "agent", "swift"),)
"""Type, what was asked, the router's choice and the label. The label overlooked that agent's reviews are among all its
runs, which are what other types are judged by: it takes 40,000 and 50,000, in parts 100 + 277, against swift's 438."""


def candidate(facts: dict[str, Any]) -> BackendState:
    prices = facts.get("prices", (None, None))
    model = Model(
        name=facts.get("model"),
        input_price=None if prices[0] is None else prices[0] * 1_000_000,
        output_price=None if prices[1] is None else prices[1] * 1_000_000,
        context_tokens=facts.get("context"),
        output_tokens=facts.get("output"),
    )
    return BackendState(
        name=facts["name"],
        group=facts["name"],
        models=(model,),
        manifest=None if facts["abilities"] is None else read_manifest(facts["abilities"]),
        running=facts.get("running", 0),
        runs_max=facts.get("runs_max", 32),
        **STATES.get(facts.get("state", ""), {}),
    )


def runs(facts: dict[str, Any]) -> list[Observation]:
    def three(type_: str | None, cost: int | None, latency: int | None) -> list[Observation]:
        one = Observation(
            backend=facts["name"], group=facts["name"], model=facts.get("model"), type=type_, began_ms=NOW_MS - 1000,
            duration_ms=latency, cost_usd_micros=cost, reason="complete",
        )  # fmt: skip
        return [one] * 3

    of_review = three("code_review", *facts["of_review"]) if "of_review" in facts else []
    return three(None, facts["cost"], facts["latency"]) + of_review


def order(type_: str, asked: dict[str, Any]) -> WorkOrder:
    said = {name: value for name, value in asked.items() if name not in ("requires", "model")}
    required = tuple(Requirement(*pair) for pair in asked.get("requires", {}).items())
    whole = WorkOrder("do it", requirements=Requirements(required), config=RuntimeConfig(model=asked.get("model")))
    return whole.with_abp("route", {"type": type_, **said})


def test_over_nine_of_ten_labelled_tasks_go_where_their_label_says() -> None:
    candidates = [candidate(facts) for facts in BACKENDS]
    measures = Measures([run for facts in BACKENDS for run in runs(facts)], NOW_MS)
    misses, count = [], dict.fromkeys(TYPES, 0)
    for asked, labels, _ in ROWS:
        for type_, label in zip(TYPES, labels, strict=True):
            task, strategy, seed = task_of(order(type_, asked))
            decision = choose(
                task, candidates, measures, strategy=strategy or "balanced", quality=QUALITY, now_ms=NOW_MS, seed=seed
            )
            found = None if decision.option is None else decision.option.candidate.name
            count[type_] += 1
            if found != label:
                misses.append((type_, str(asked), found, label))
    total = sum(count.values())
    assert total >= 200
    assert min(count.values()) >= 20
    assert 10 * len(misses) < total
    assert tuple(misses) == MISSES
