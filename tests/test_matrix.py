"""What agents are said to do and what they do: the table of reasons is complete, and only trials are proof."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backplane.agents import rows
from backplane.agents.events import EventFactory
from backplane.config import BackendSettings, Settings
from backplane.conform import trials
from backplane.contract.capability import CAPABILITIES, Manifest
from backplane.contract.events import carried
from backplane.runtime import backends
from hosts import agent
from tests.all.vendors import matrix

ROWS = rows.rows_of(os.path.dirname(agent.__file__))
DRIVEN = [name for name in ROWS if "document" in matrix.COLUMNS.get(name, {})]


def manifest(name: str) -> dict[str, Any]:
    """What the shipped host of this name says it can."""
    return Manifest(agent.host_of(name, rows.read(ROWS, name, {})).capabilities).to_wire()


def tried(name: str) -> Iterator[str]:
    """Abilities that the trials of this agent show."""
    table = ROWS[name]
    yield from trials.SHOWN_BY
    for ability, way in trials.WAYS.items():
        if way.continues:
            shows = bool(table.get("sessions"))
        else:
            shows = way.text is not None or (way.calls or ability) in table.get("trials", {})
        if shows:
            yield ability


@pytest.mark.parametrize("name", DRIVEN)
def test_every_difference_between_document_manifest_and_trials_has_a_reason(name: str) -> None:
    assert list(matrix.gaps(name, manifest(name), set(tried(name)))) == []


@pytest.mark.parametrize("name", DRIVEN)
def test_a_reason_is_about_an_ability_that_somebody_names(name: str) -> None:
    column = matrix.COLUMNS[name]
    named = {*column["document"], *manifest(name)}
    assert {*column["reasons"], *column["untried"]} <= named
    assert named <= set(CAPABILITIES)


def test_an_ability_without_a_reason_is_a_gap() -> None:
    assert len(list(matrix.gaps("nobody", {"tool_bash": "native"}, ()))) == 1


AGENT = "#!/bin/sh\nexit 0\n"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    program = tmp_path / "agent"
    program.write_text(AGENT)
    program.chmod(0o755)
    return Settings(backends={"driven": BackendSettings(host="claude", options={"program": str(program)})})


def test_another_version_of_the_program_has_another_stamp(settings: Settings, tmp_path: Path) -> None:
    backend = backends.find("driven", settings, {})
    stamp = trials.stamp(backend, {})
    assert trials.stamp(backend, {}) == stamp
    (tmp_path / "agent").write_text(AGENT + "# newer\n")
    assert trials.stamp(backend, {}) != stamp


OF_NO_ROW = BackendSettings(host="acp", options={"program": "true"})


def test_a_host_that_drives_no_agent_cannot_be_tried() -> None:
    assert not trials.provable(backends.find("mock", Settings(), {}))
    assert not trials.provable(backends.find("acp", Settings(backends={"acp": OF_NO_ROW}), {}))


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "trials" in row])
def test_each_agent_that_is_a_backend_by_name_can_be_tried(name: str) -> None:
    assert trials.provable(backends.find(name, Settings(), {}))
    assert {"tool_read", "tool_write", "tool_bash"} <= set(tried(name))


@pytest.mark.parametrize(
    ("texts", "thoughts", "proved"),
    [((), 3, False), (("one",), 3, False), (("one", "two"), 0, True), (("one", "two"), 2, True), (("", ""), 2, False)],
)
def test_pieces_of_thoughts_are_no_proof_of_streaming(texts: tuple[str, ...], thoughts: int, proved: bool) -> None:
    make = EventFactory(lambda: "2026-01-15T12:00:00Z", "/")
    events = [*(make.thought("hm") for _ in range(thoughts)), *map(make.delta, texts)]
    seen = trials.TrialRun(events=[carried(event) for event in events])
    assert trials.WAYS["streaming"].holds(seen) is proved
    assert bool(trials.WAYS["extended_thinking"].holds(seen)) is bool(thoughts)


@pytest.mark.parametrize("claim", ["native", "emulated", "restricted", "unsupported", "-"])
@pytest.mark.parametrize("proof", ["proved", "failed", "untried"])
def test_only_a_claim_whose_trial_failed_is_false(claim: str, proof: Any) -> None:
    finding = trials.Finding(ability="tool_bash", claim=claim, proof=proof)
    assert finding.is_false is (proof == "failed" and claim in ("native", "emulated", "restricted"))


def test_an_agent_that_does_nothing_proves_nothing(settings: Settings, tmp_path: Path) -> None:
    import anyio

    told = anyio.run(trials.prove, "driven", settings, {"PATH": "/usr/bin:/bin"}, tmp_path / "home")
    assert not any(finding.proof == "proved" for finding in told.findings)
    assert "ended" in told.findings[0].why
