"""Budgets that several gateways share, bodies that are kept, and answers whose head or refusal comes early."""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.cli import main
from backplane.dialects import framing
from backplane.gateway.bodies import Bodies
from backplane.gateway.clients import Client
from backplane.gateway.journal import SUFFIX, ExchangeJournal, lines_of, new_id, now
from backplane.gateway.record import ExchangeBegin, ExchangeEnd
from backplane.redact.secrets import Redactor
from backplane.testing import PROTOCOLS, Fault, ModelServer, ProtocolName, ScriptUsage, Turn
from tests.gateway.ground import KEY, Gate, backend, gateway
from tests.gateway.test_gateway import CHAT, MESSAGES, PRICES, ask, client, said
from tests.scripted import question


def bodies_of(gate: Gate) -> list[Any]:
    assert gate.ends
    return [
        json.loads(line) for path in (gate.home / "gateway").glob("*.bodies*") for line in path.read_text().splitlines()
    ]


# Two gateways ---------------------------------------------------------------------------------------------------------


def test_two_gateways_of_one_folder_spend_one_budget_once(tmp_path: Path) -> None:
    usage = ScriptUsage(input=1000, output=500)  # 2,000 millionths.
    with ModelServer([Turn(text="hi", usage=usage)] * 9) as server:
        services = {"a": backend(server, CHAT, prices=PRICES)}
        given: dict[str, Any] = {"key": None, "clients": client(budget_usd=0.007)}
        with (
            gateway(services, {"m": "a"}, tmp_path, **given) as one,
            gateway(services, {"m": "a"}, tmp_path, **given) as two,
        ):
            statuses = []
            for gate in (one, two, one, two, one):
                statuses.append(said(gate, max_tokens=500)[0])
                assert gate.ends
    assert statuses == [200, 200, 200, 403, 403]


def test_an_open_exchange_of_another_gateway_is_reserved_here(tmp_path: Path) -> None:
    slow = Turn(text="slow", fault=Fault(first_byte_ms=60_000))
    with ModelServer(slow) as server:
        services = {"a": backend(server, CHAT, prices=PRICES)}
        given: dict[str, Any] = {"key": None, "clients": client(budget_usd=0.003)}
        with (
            gateway(services, {"m": "a"}, tmp_path, **given) as one,
            gateway(services, {"m": "a"}, tmp_path, **given) as two,
        ):
            from tests.gateway.test_gateway_cases import posted

            path, body = question(CHAT, max_tokens=500)
            with posted(one, path, body):
                server.wait_requests(1)
                assert said(two, max_tokens=500)[0] == 403


def begin(client: str, reserved: int) -> ExchangeBegin:
    return ExchangeBegin(id=new_id(), at=now(), client=client, front="chat", model="m", stream=False, reserved=reserved)


def test_the_lines_of_another_start_are_read_once_and_torn_ones_later(tmp_path: Path) -> None:
    one, two = ExchangeJournal(tmp_path), ExchangeJournal(tmp_path)
    try:
        line = begin("ci", 70)
        one.write(line)
        assert two.used("ci") == 70
        end = ExchangeEnd(id=line.id, at=now(), client="ci", end="complete", charged=30)
        data = msgspec.json.encode(end) + b"\n"
        with one.path.open("ab") as file:
            file.write(data[:20])
            file.flush()
            assert two.used("ci") == 70
            file.write(data[20:])
        for _ in range(2):
            assert two.used("ci") == 30
            assert two.used("other") == 0
    finally:
        one.close()
        two.close()


def test_a_torn_line_hides_no_end_of_the_next_start(tmp_path: Path) -> None:
    killed = ExchangeJournal(tmp_path)
    killed.write(begin("ci", 70))
    with killed.path.open("ab") as file:
        file.write(b'{"t": "begin", "id"')
    killed.close()
    for _ in range(2):
        ExchangeJournal(tmp_path).close()
    ends = [line for line in lines_of(killed.path) if isinstance(line, ExchangeEnd)]
    assert [(end.end, end.charged) for end in ends] == [("interrupted", 70)]


def test_a_start_that_began_later_is_seen(tmp_path: Path) -> None:
    one = ExchangeJournal(tmp_path)
    for number in range(1, 4):
        later = ExchangeJournal(tmp_path)
        later.write(begin("ci", 10))
        assert one.used("ci") == 10 * number
        later.close()
    one.close()


def test_of_two_gateways_that_reserve_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ExchangeJournal(tmp_path)
    check, lines = Client.check_budget, [begin("ci", 2_000)]

    def check_and_reserve(self: Client, *given: Any) -> int:
        found = check(self, *given)
        if lines:  # Between the look at the budget and the reservation.
            other.write(lines.pop())
        return found

    monkeypatch.setattr(Client, "check_budget", check_and_reserve)
    usage = ScriptUsage(input=1000, output=500)
    with ModelServer([Turn(text="hi", usage=usage)] * 2) as server:
        services, given = {"a": backend(server, CHAT, prices=PRICES)}, client(budget_usd=0.004)
        with gateway(services, {"m": "a"}, tmp_path, key=None, clients=given) as gate:
            assert said(gate, max_tokens=500)[0] == 403
            assert server.requests == ()
            assert other.used("ci") == 2_000
    other.close()


def test_gateways_that_reserve_at_once_never_spend_more_than_the_budget(tmp_path: Path) -> None:
    usage, most = ScriptUsage(input=1000, output=500), 20_000
    with ModelServer([Turn(text="hi", usage=usage)] * 200) as server:
        services = {"a": backend(server, CHAT, prices=PRICES)}
        given: dict[str, Any] = {"key": None, "clients": client(budget_usd=most / 1_000_000)}
        with ExitStack() as opened:
            gates = [opened.enter_context(gateway(services, {"m": "a"}, tmp_path, **given)) for _ in range(4)]
            with ThreadPoolExecutor(8) as pool:
                statuses = list(pool.map(lambda place: said(gates[place % 4], max_tokens=500)[0], range(40)))
            ends = gates[0].ends
    assert set(statuses) == {200, 403}
    assert sum(end.charged for end in ends) == 2_000 * statuses.count(200) <= most


# Bodies ---------------------------------------------------------------------------------------------------------------


def test_bodies_are_kept_only_where_the_configuration_says_so() -> None:
    with ModelServer([Turn(text="the answer")] * 2) as server:
        services = {"a": backend(server, MESSAGES)}
        with gateway(services, {"m": "a"}) as gate:
            said(gate)
            assert bodies_of(gate) == []
        with gateway(services, {"m": "a"}, bodies=True) as gate:
            path, body = question(CHAT, "my question", stream=True)
            data = ask(gate, path, body)[2]
            (line,) = bodies_of(gate)
            (end,) = gate.ends
            (file,) = (gate.home / "gateway").glob("*.bodies")
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert line["id"] == end.id
    assert json.loads(line["request"]) == body
    assert line["answer"].encode() == data


def test_kept_bodies_have_no_secret_and_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backplane.gateway.bodies.BODY_BYTES_MAX", 500)
    monkeypatch.setattr("backplane.gateway.bodies.FILE_BYTES_MAX", 1_500)
    secret = "of-the-service-0123456789"
    with ModelServer([Turn(text=f"{secret} {'x' * 5_000}")] * 8) as server:
        row = msgspec.structs.replace(backend(server, CHAT, key_env="K"), env={"K": secret})
        with gateway({"a": row}, {"m": "a"}, bodies=True) as gate:
            for _ in range(8):
                said(gate, messages=[{"role": "user", "content": f"{secret} {'y' * 5_000}"}])
            assert gate.ends
            files = list((gate.home / "gateway").glob("*.bodies*"))
            text = "".join(path.read_text() for path in files)
            lines = bodies_of(gate)
    assert len(files) == 2
    assert sum(len(line) for line in text.splitlines()) < 8_000
    assert secret not in text
    assert KEY not in text
    assert all(len(line["request"]) <= 500 and line["request_bytes"] > 5_000 for line in lines)


SECRET = "of-the-service-0123456789"


@pytest.mark.parametrize("service", [CHAT, MESSAGES])
@pytest.mark.parametrize("front", PROTOCOLS)
def test_a_secret_that_comes_in_many_events_is_kept_nowhere(front: ProtocolName, service: ProtocolName) -> None:
    text = f"The key is {SECRET}, and so on."
    turns = [Turn(text=text, pieces=number) for number in (2, 7, len(text))]
    with ModelServer(turns) as server:
        row = msgspec.structs.replace(backend(server, service, key_env="K"), env={"K": SECRET})
        with gateway({"a": row}, {"m": "a"}, bodies=True) as gate:
            for _ in turns:
                path, body = question(front, stream=True)
                assert ask(gate, path, body)[0] == 200
            assert gate.ends
            lines = bodies_of(gate)
    assert len(lines) == 3
    for line in lines:
        said = "".join(re.findall(r'"(?:text|content|delta)":"([^"]*)"', line["answer"]))
        assert SECRET not in said
        assert "The key is [redacted], and so on." in said


@given(
    st.lists(st.sampled_from(["a", " and ", SECRET, SECRET[:9], "é"]), max_size=9),
    st.lists(st.integers(0, 80), max_size=20),
)
def test_a_secret_is_found_wherever_its_text_is_cut(words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:stop] for start, stop in itertools.pairwise(places)]
    cleaned, count = Redactor([SECRET]).pieces(pieces)
    assert len(cleaned) == len(pieces)
    assert ("".join(cleaned), count) == Redactor([SECRET]).text(text)


def test_every_cut_of_a_kept_stream_hides_the_secret(tmp_path: Path) -> None:
    text = f"The key is {SECRET}."
    kept = Bodies(tmp_path / "one.jsonl", [SECRET])
    for place in range(len(text)):
        events = [{"choices": [{"index": 0, "delta": {"content": one}}]} for one in (text[:place], text[place:])]
        whole = b"".join(framing.sse_bytes(event) for event in events)
        kept.keep("1", b"{}", whole)
        kept.keep("2", b"{}", whole[:-9])  # The connection broke off in the last event.
    for row in map(json.loads, kept.path.read_text().splitlines()):
        words = "".join(re.findall(r'"content":"([^"]*)', row["answer"]))
        assert row["id"] == "2" or words == "The key is [redacted]."
        assert SECRET[-6:] not in row["answer"]


def test_bodies_go_with_the_record_that_they_belong_to(tmp_path: Path) -> None:
    with ModelServer([Turn(text="ok")] * 2) as server:
        services = {"a": backend(server, CHAT)}
        with gateway(services, {"m": "a"}, tmp_path, bodies=True) as gate:
            said(gate)
            assert len(bodies_of(gate)) == 1
        (record,) = (tmp_path / "gateway").glob(f"*{SUFFIX}")
        record.unlink()
        with gateway(services, {"m": "a"}, tmp_path, bodies=True):
            assert list((tmp_path / "gateway").glob("*.bodies*")) == []


def test_old_records_go_with_their_bodies_and_those_of_this_month_stay(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKPLANE_HOME", str(tmp_path))
    with ModelServer([Turn(text="ok")] * 2) as server:
        services = {"a": backend(server, CHAT)}
        with gateway(services, {"m": "a"}, tmp_path, bodies=True) as gate:
            assert said(gate)[0] == 200
            assert gate.ends
    (record,) = (tmp_path / "gateway").glob(f"*{SUFFIX}")
    files = sorted(record.parent.iterdir())
    assert len(files) == 2
    now_s = record.stat().st_mtime
    for age_s, words, left in ((0, "0s", 2), (70 * 86_400, "90d", 2), (100 * 86_400, "90d", 0)):
        os.utime(record, (now_s - age_s, now_s - age_s))
        assert main(["prune", "--older", words, "--dry-run"]) == 0
        assert sorted(record.parent.iterdir()) == files
        assert main(["prune", "--older", words]) == 0
        assert len(list(record.parent.iterdir())) == left
    assert "1 record of the gateway pruned" in capfd.readouterr().out


# Heads that are sent early --------------------------------------------------------------------------------------------


def test_the_head_of_a_silent_stream_counts_the_losses_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backplane.gateway.server.PING_S", 0.05)
    turn = Turn(text="late", fault=Fault(first_byte_ms=300))
    with ModelServer(turn) as server, gateway({"a": backend(server, MESSAGES)}, {"m": "a"}) as gate:
        path, body = question(CHAT, stream=True, logit_bias={"5": 1})
        _, headers, data = ask(gate, path, body)
        (end,) = gate.ends
    assert data.startswith(b": ping")
    assert int(headers["x-backplane-losses"]) == end.losses > 0


def test_a_client_that_is_still_sending_reads_the_refusal() -> None:
    with ModelServer([]) as server, gateway({"a": backend(server, CHAT)}, {"m": "a"}) as gate:
        path, body = question(CHAT, "x" * 3_000_000)
        assert ask(gate, path, body, {"authorization": "Bearer wrong"})[0] == 401
        assert ask(gate, path, body, {"host": "example.com"})[0] == 403
        assert ask(gate, "/v1/files", body)[0] == 404
        assert ask(gate, path, json.dumps(body).encode(), {"content-encoding": "zstd", "x-api-key": KEY})[0] == 415
