"""Secrets that arrive in pieces: what is handed on, stored and printed never holds them."""

from __future__ import annotations

import functools
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest

import backplane
from backplane import host as sidecar
from backplane.contract import canonical
from backplane.contract.capability import NATIVE
from backplane.contract.events import AgentEvent, AssistantDelta, OutputReported, Reasoning, Warned
from backplane.contract.work import RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.host.link import serve as serve_host
from backplane.redact.cuts import SHAPE_BYTES_MAX, STREAMS_MAX, Splits
from backplane.redact.secrets import Redactor
from backplane.runtime.memory import MemoryBackend

SECRET = "correct-horse-battery-7719"
NOW = "2026-01-15T12:00:00Z"


def shown(events: list[AgentEvent]) -> tuple[str, list[AgentEvent]]:
    splits = Splits(Redactor([SECRET]))
    out, records = splits.take(events, [canonical.encode(event) for event in events])
    out = [*out, *splits.flush()]
    assert all(SECRET.encode() not in record for record in records)
    return "".join(event.text for event in out if isinstance(event, AssistantDelta)), out


def said(event: AgentEvent) -> str:
    return event.reasoning if isinstance(event, Reasoning) else str(event.ext["output"]["text"])  # type: ignore[index]


def test_a_secret_cut_between_two_deltas_is_not_shown() -> None:
    text, _ = shown([AssistantDelta(ts=NOW, text=part) for part in ("key: corr", "ect-horse-", "battery-7719 end")])
    assert text == "key: [redacted] end"


def test_a_text_that_only_begins_like_a_secret_comes_whole() -> None:
    text, _ = shown([AssistantDelta(ts=NOW, text="corr"), AssistantDelta(ts=NOW, text="ected")])
    assert text == "corrected"


def test_another_event_lets_go_what_was_held_and_keeps_the_order() -> None:
    _, out = shown([AssistantDelta(ts=NOW, text="x corr"), Warned(ts=NOW, message="stop")])
    assert [type(event).__name__ for event in out] == ["AssistantDelta", "AssistantDelta", "Warned"]
    assert "".join(event.text for event in out[:2] if isinstance(event, AssistantDelta)) == "x corr"


@pytest.mark.parametrize("size", range(1, len(SECRET) + 1))
def test_output_and_reasoning_in_pieces_of_any_size_hold_no_secret(size: int) -> None:
    parts = [f"a {SECRET} b"[at : at + size] for at in range(0, len(SECRET) + 4, size)]
    outputs: list[AgentEvent] = [
        OutputReported(ts=NOW, message=part, ext={"output": {"stream": "stdout", "text": part}}) for part in parts
    ]
    thoughts: list[AgentEvent] = [Reasoning(ts=NOW, text="", ext={"reasoning": {"text": part}}) for part in parts]
    for events in (outputs, thoughts):
        _, out = shown(events)
        assert "".join(said(event) for event in out) == "a [redacted] b"
        assert all(SECRET not in msgspec.json.encode(event).decode() for event in out)


async def _tell_in_pieces(run: sidecar.HostRun) -> sidecar.Done:
    for part in ("the key is corr", "ect-horse-batt", "ery-7719, and ", "that was corr"):
        await run.delta(part)
        await anyio.lowlevel.checkpoint()
    return sidecar.Done()


def test_a_run_hands_on_and_stores_no_piece_of_a_secret_of_its_environment(
    backplane_home: Path, tmp_path: Path
) -> None:
    host = sidecar.Host(id="teller", capabilities={"streaming": NATIVE})
    backend = MemoryBackend(id="teller", serve=functools.partial(serve_host, host, _tell_in_pieces))
    order = WorkOrder(
        "tell", workspace=WorkspaceSpec(root=str(tmp_path)), config=RuntimeConfig(env={"API_KEY": SECRET})
    )
    events: list[AgentEvent] = []
    run = backplane.run(order, backend=backend, on_event=events.append)
    text = "".join(event.text for event in events if isinstance(event, AssistantDelta))
    assert text == "the key is [redacted], and that was corr"
    assert run.receipt.backplane["counts"]["redacted"] == 1
    written = [path.read_bytes() for path in backplane_home.rglob("*") if path.is_file()]
    assert written
    assert not any(SECRET.encode() in data for data in written)


def test_streams_without_end_and_long_events_lose_no_word_and_are_not_kept() -> None:
    beside = "z" * SHAPE_BYTES_MAX
    events: list[AgentEvent] = [
        OutputReported(ts=NOW, message="x", ext={"output": {"stream": f"s{n}", "text": f"{n} corr", "beside": beside}})
        for n in range(2 * STREAMS_MAX)
    ]
    splits = Splits(Redactor([SECRET]))
    out, _ = splits.take(events, [canonical.encode(event) for event in events])
    assert sum(len(canonical.encode(kept)) for kept in splits._last.values()) < 2 * STREAMS_MAX * 200
    late = splits.flush()
    assert len(late) <= STREAMS_MAX + 1
    assert sum(said(event).count("corr") for event in [*out, *late]) == len(events)
    assert sum(event.ext["output"].get("beside") == beside for event in out) == len(events)  # type: ignore[index]
