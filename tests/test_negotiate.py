"""Requirements against manifests: the contract's rules as tables, and changes that are true and smallest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.contract.capability import (
    CAPABILITIES,
    EMULATED,
    NATIVE,
    UNSUPPORTED,
    Level,
    Manifest,
    Requirement,
    Requirements,
    Threshold,
    read_manifest,
    restricted,
)
from backplane.policy.capabilities import negotiate, refusal

DOWNWARDS: tuple[Threshold, ...] = ("native", "emulated", "any")


def wants(*required: tuple[str, Threshold]) -> Requirements:
    return Requirements(tuple(Requirement(name, threshold) for name, threshold in required))


# The worked examples of the capability matrix: manifest, requirements, satisfied, smallest change.
EXAMPLES: list[tuple[dict[str, Level], Requirements, bool, str]] = [
    (
        {"streaming": NATIVE, "tool_read": EMULATED},
        wants(("streaming", "native"), ("tool_read", "emulated")),
        True,
        "",
    ),
    ({"streaming": EMULATED}, wants(("streaming", "native")), False, "lower streaming to emulated"),
    ({"streaming": NATIVE}, wants(("streaming", "native"), ("mcp_client", "emulated")), False, "drop mcp_client"),
    ({"tool_bash": restricted("sandbox only")}, wants(("tool_bash", "emulated")), True, ""),
]


@pytest.mark.parametrize(("levels", "requirements", "satisfied", "change"), EXAMPLES)
def test_the_worked_examples(
    levels: dict[str, Level], requirements: Requirements, satisfied: bool, change: str
) -> None:
    result = negotiate(requirements, Manifest(levels))
    assert result.satisfied is satisfied
    assert result.smallest_change_text == change
    assert bool(result.unmet) is not satisfied


# Level, then who is satisfied (native, emulated, any), then the verdict.
LEVELS = [
    (NATIVE, (True, True, True), "native"),
    (EMULATED, (False, True, True), "emulated"),
    (restricted("by hand"), (False, True, True), "restricted"),
    (UNSUPPORTED, (False, False, True), "missing"),
    (None, (False, False, False), "missing"),
]


@pytest.mark.parametrize(("level", "satisfied", "verdict"), LEVELS)
def test_each_level_satisfies_its_thresholds(level: Level | None, satisfied: tuple[bool, ...], verdict: str) -> None:
    manifest = Manifest({"logprobs": level} if level else {})
    for threshold, expected in zip(DOWNWARDS, satisfied, strict=True):
        (finding,) = negotiate(wants(("logprobs", threshold)), manifest).findings
        assert finding.satisfied is expected
        assert finding.verdict == verdict
        assert finding.reason.startswith(f"logprobs: the order wants {threshold}, ")


def test_the_reason_names_what_restricts() -> None:
    (finding,) = negotiate(wants(("tool_bash", "native")), Manifest({"tool_bash": restricted("no shell")})).findings
    assert finding.reason == "tool_bash: the order wants native, but the backend has restricted (no shell)"


@pytest.mark.parametrize(
    ("name", "nearest"), [("tool_reed", "tool_read"), ("MCP-Client", "mcp_client"), ("zzzzzz", None)]
)
def test_a_name_that_the_contract_does_not_have_is_unmet_and_the_nearest_is_said(
    name: str, nearest: str | None
) -> None:
    manifest = read_manifest({name: "native"})
    (finding,) = negotiate(wants((name, "any")), manifest).findings
    assert not finding.satisfied
    assert "the contract has no such capability" in finding.reason
    assert finding.reason.endswith(f"the nearest name is {nearest}") is (nearest is not None)


def test_a_level_that_the_contract_does_not_have_satisfies_any_alone() -> None:
    manifest = read_manifest({"streaming": "turbo"})
    result = negotiate(wants(("streaming", "any"), ("streaming", "emulated")), manifest)
    assert [finding.satisfied for finding in result.findings] == [True, False]
    assert result.smallest_change_text == "lower streaming to any"


def test_the_refusal_names_every_unmet_requirement_and_the_way_out() -> None:
    result = negotiate(
        wants(("streaming", "native"), ("mcp_client", "any"), ("tool_read", "native")),
        Manifest({"streaming": EMULATED, "tool_read": NATIVE}),
    )
    error = refusal(result, "box")
    assert error.code == "capability_unsupported"
    assert error.message == (
        "backend 'box' does not satisfy the order: streaming: the order wants native, but the backend has emulated; "
        "mcp_client: the order wants any, the backend does not name it"
    )
    assert error.hint == "lower streaming to emulated; drop mcp_client, or choose another backend"


def test_what_the_receipt_keeps() -> None:
    result = negotiate(wants(("streaming", "native"), ("mcp_client", "any")), Manifest({"streaming": EMULATED}))
    assert result.to_wire() == {
        "satisfied": False,
        "findings": [
            {
                "capability": "streaming",
                "min_support": "native",
                "verdict": "emulated",
                "satisfied": False,
                "reason": "streaming: the order wants native, but the backend has emulated",
            },
            {
                "capability": "mcp_client",
                "min_support": "any",
                "verdict": "missing",
                "satisfied": False,
                "reason": "mcp_client: the order wants any, the backend does not name it",
            },
        ],
        "smallest_change": [
            {"capability": "streaming", "from": "native", "to": "emulated"},
            {"capability": "mcp_client", "from": "any", "drop": True},
        ],
    }


NAMES = st.sampled_from([*CAPABILITIES[:4], "not_a_capability"])
LEVEL = st.sampled_from([NATIVE, EMULATED, restricted("x"), UNSUPPORTED])
MANIFESTS = st.dictionaries(st.sampled_from(CAPABILITIES[:4]), LEVEL).map(Manifest)
ORDERS = st.lists(st.tuples(NAMES, st.sampled_from(DOWNWARDS)), max_size=6).map(lambda pairs: wants(*pairs))


@given(ORDERS, MANIFESTS)
def test_the_smallest_change_satisfies_and_nothing_smaller_does(order: Requirements, manifest: Manifest) -> None:
    result = negotiate(order, manifest)
    changes = {(change.capability, change.min_support): change.to for change in result.smallest_change}
    changed = []
    for requirement in order.required:
        to = changes.get((requirement.capability, requirement.min_support), requirement.min_support)
        if to is not None:
            changed.append((requirement.capability, to))
    assert negotiate(wants(*changed), manifest).satisfied
    for (name, threshold), to in changes.items():
        stop = len(DOWNWARDS) if to is None else DOWNWARDS.index(to)
        for smaller in DOWNWARDS[DOWNWARDS.index(threshold) : stop]:
            assert not negotiate(wants((name, smaller)), manifest).satisfied
    assert bool(changes) is not result.satisfied
