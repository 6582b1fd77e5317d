"""How people read the gateway's record: lists, one exchange, its cause, and the page."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from backplane.cli import main
from backplane.gateway.journal import FOLDER, ExchangeJournal, recorded
from backplane.gateway.record import ExchangeBegin, ExchangeEnd, ExchangeFirst, RecordedExchange
from backplane.schemas.build import build
from backplane.testing import Failure, Fault, ModelServer, ScriptUsage, Turn
from tests.gateway.ground import Gate, backend, gateway
from tests.gateway.test_gateway import CHAT, MESSAGES, PRICES, ask, said
from tests.scripted import question

Said = Callable[..., str]
REFUSED = Fault(failure=Failure(code="invalid_request_error", message="no such thing", status=400))
ID = "00000000-0000-4000-8000-{:012d}"


@pytest.fixture
def told(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """Run a command about a gateway's home; return what it printed."""

    def run(home: Path, *words: str, code: int = 0) -> str:
        monkeypatch.setenv("BACKPLANE_HOME", str(home))
        capfd.readouterr()
        assert main(list(words)) == code
        return capfd.readouterr().out

    return run


def write(home: Path, *lines: ExchangeBegin | ExchangeFirst | ExchangeEnd) -> ExchangeJournal:
    """Write the record of one start, which goes on until it is closed."""
    journal = ExchangeJournal(home)
    for line in lines:
        journal.write(line)
    return journal


def begin(number: int, at: str = "2026-11-28T10:00:00.000Z", **more: Any) -> ExchangeBegin:
    found = {"client": "ci", "front": "chat", "model": "m", "stream": True, **more}
    return ExchangeBegin(id=ID.format(number), at=at, **found)


def end(number: int, at: str = "2026-11-28T10:00:05.000Z", **more: Any) -> ExchangeEnd:
    return ExchangeEnd(**{"id": ID.format(number), "at": at, "client": "ci", "end": "complete", "ms": 5000, **more})


def first(number: int) -> ExchangeFirst:
    return ExchangeFirst(id=ID.format(number), at="2026-11-28T10:00:01.000Z", ms=320, backend="a", model="big")


@contextmanager
def answered(*turns: Turn) -> Iterator[Gate]:
    with (
        ModelServer(list(turns)) as server,
        gateway({"a": backend(server, MESSAGES, prices=PRICES)}, {"m": "a/other"}) as gate,
    ):
        yield gate


def test_runs_lists_exchanges_with_models_tokens_cost_and_cause(told: Said) -> None:
    usage = ScriptUsage(input=1000, output=500)
    with answered(Turn(text="hi", usage=usage), Turn(fault=REFUSED)) as gate:
        said(gate, logit_bias={"5": 1})
        said(gate)
        assert len(gate.ends) == 2
        refused, complete = told(gate.home, "runs", "--gateway").splitlines()
        rows = [json.loads(line) for line in told(gate.home, "runs", "--gateway", "--json").splitlines()]
        failed = told(gate.home, "runs", "--gateway", "--failed", "--text", "THING m").splitlines()
        assert told(gate.home, "runs", "--json") == ""
        assert told(gate.home, "runs") == ""
        told(gate.home, "runs", "--gateway", "--tag", "x", code=2)
    assert all(word in complete for word in ("complete", "m → a/other", "1000 in, 500 out", "loss", "$0.0020"))
    assert "no such thing" in refused
    assert failed == [refused]
    for row in rows:
        jsonschema.validate(row, build("cli_exchanges"))
    assert [(row["end"], row["cost_usd_micros"]) for row in rows] == [("failed", None), ("complete", 2000)]


def test_one_exchange_is_shown_with_its_losses_and_explained(told: Said) -> None:
    with answered(Turn(text="hi"), Turn(fault=REFUSED)) as gate:
        said(gate, stream=True, logit_bias={"5": 1})
        said(gate)
        complete, refused = gate.ends
        shown, why = told(gate.home, "show", complete.id[:8]), told(gate.home, "why", complete.id)
        one = json.loads(told(gate.home, "show", complete.id, "--json"))
        cause = told(gate.home, "why", refused.id)
        diagnosis = json.loads(told(gate.home, "why", refused.id, "--json"))
        told(gate.home, "show", "ffffffff", code=2)
    assert all(word in shown for word in (complete.id, "a/other", "/logit_bias dropped", "HTTP 200", "first"))
    assert (one["asked"], one["front"], one["first_ms"]) == ("m", "chat", complete.first_ms)
    assert one["first_ms"] is not None
    assert "nothing is wrong" in why
    assert "no such thing" in cause
    assert (diagnosis["kind"], diagnosis["run_id"]) == (refused.code, refused.id)


def test_an_open_exchange_comes_first_and_says_how_far_it_is(told: Said) -> None:
    slow = Turn(text="word " * 40, pieces=40, fault=Fault(pause_ms=100), times=None)
    path, body = question(CHAT, stream=True)
    with answered(Turn(text="hi"), slow) as gate:
        said(gate)
        import http.client

        client = http.client.HTTPConnection("127.0.0.1", gate.port, timeout=10)
        client.request("POST", path, json.dumps(body), {"authorization": "Bearer dummy"})
        client.getresponse().read(10)
        rows = [json.loads(line) for line in told(gate.home, "runs", "--gateway", "--json").splitlines()]
        (live,) = told(gate.home, "runs", "--gateway", "--live").splitlines()
        why = told(gate.home, "why", rows[0]["id"])
        client.close()
    assert [(row["state"], row["first_ms"] is None) for row in rows] == [("live", False), ("ended", True)]
    assert "answering" in live
    assert "the service is answering" in why


def test_cost_names_the_gateway_beside_the_runs(told: Said) -> None:
    with answered(Turn(text="hi", usage=ScriptUsage(input=1000, output=500))) as gate:
        assert "gateway" not in told(gate.home, "cost")
        said(gate)
        assert len(gate.ends) == 1
        beside = told(gate.home, "cost").splitlines()[-1]
        total = json.loads(told(gate.home, "cost", "--json").splitlines()[-1])
    assert beside.startswith("beside: the gateway")
    assert "$0.0020  1 exchange" in beside
    assert total["runs"] == 0


def test_the_newest_of_several_starts_come_first(tmp_path: Path) -> None:
    write(tmp_path, begin(1), end(1)).close()
    (path,) = (tmp_path / FOLDER).glob("*.jsonl")
    path.rename(path.with_name("2026-11-01T000000-1.jsonl"))
    later = "2026-11-28T11:00:00.000Z"
    journal = write(tmp_path, begin(2, later), end(2), begin(3, "2026-11-28T09:00:00.000Z"), begin(4, later), first(4))
    found = [(one.id[-1], one.state, one.first_ms) for one in recorded(tmp_path)]
    assert found == [("4", "live", 320), ("3", "live", None), ("2", "ended", None), ("1", "ended", None)]
    journal.close()
    assert {one.state for one in recorded(tmp_path)} == {"cut_off", "ended"}
    write(tmp_path).close()
    ended = {one.id[-1]: one for one in recorded(tmp_path)}
    assert (ended["3"].end, ended["3"].backend, ended["3"].first_ms) == ("interrupted", None, None)
    assert (ended["4"].end, ended["4"].backend, ended["4"].model) == ("interrupted", "a", "big")
    assert (ended["4"].status, ended["4"].first_ms) == (200, 320)


def test_ten_thousand_exchanges_are_listed_at_once(tmp_path: Path, told: Said) -> None:
    lines = [line for number in range(10_000) for line in (begin(number), end(number))]
    write(tmp_path, *lines).close()
    began = time.monotonic()
    assert len(told(tmp_path, "runs", "--gateway").splitlines()) == 30
    assert time.monotonic() - began < 5  # It takes some 0.1 s; a busy machine more.


def test_a_reader_that_looks_does_not_keep_a_file_from_its_gateway(tmp_path: Path) -> None:
    write(tmp_path, begin(1), end(1)).close()
    looks = recorded(tmp_path)
    assert isinstance(next(looks), RecordedExchange)
    write(tmp_path, begin(2)).close()


def test_hostile_texts_of_an_exchange_are_escaped(tmp_path: Path, told: Said) -> None:
    bad = "\x1b]0;x\x07<script>"
    journal = write(tmp_path, begin(1, client=bad, model=bad), end(1, backend=bad, model=bad, error=bad, lost=(bad,)))
    journal.close()
    for words in (("runs", "--gateway"), ("show", ID.format(1)), ("why", ID.format(1)), ("cost", "--gateway")):
        assert "\x1b" not in told(tmp_path, *words)


def test_a_request_without_a_stream_has_no_first_piece() -> None:
    with answered(Turn(text="hi")) as gate:
        assert ask(gate, *question(CHAT))[0] == 200
        assert gate.ends[0].first_ms is None
        assert not [line for line in gate.lines if isinstance(line, ExchangeFirst)]


def test_a_list_without_runs_names_the_gateways(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKPLANE_HOME", str(tmp_path))
    assert main(["runs"]) == 0
    assert "gateway" not in capfd.readouterr().err
    write(tmp_path, begin(1), end(1)).close()
    assert main(["runs"]) == 0
    assert "backplane runs --gateway" in capfd.readouterr().err


def test_a_record_that_is_pruned_meanwhile_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, begin(1), end(1)).close()
    looks = recorded(tmp_path)
    assert next(looks).id == ID.format(1)
    (path,) = (tmp_path / FOLDER).glob("*.jsonl")
    path.unlink()
    assert list(looks) == []
    assert list(recorded(tmp_path)) == []
