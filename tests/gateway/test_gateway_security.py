"""What must not get past the gateway: keys, foreign pages, wrong HTTP, endless input, and a kill."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane.gateway.clients import digest
from backplane.gateway.journal import lines_of
from backplane.gateway.record import ExchangeBegin, ExchangeEnd, ExchangeFirst
from backplane.testing import Fault, ModelServer, Turn
from tests.gateway.ground import KEY, Gate, all_of, backend, gateway
from tests.gateway.test_gateway import BEARER, CHAT, GEMINI, MESSAGES, ask, said
from tests.scripted import question

PATH, BODY = question(CHAT)
DATA = json.dumps(BODY).encode()


def send(gate: Gate, text: bytes, *, wait_s: float = 5.0) -> bytes:
    """Send bytes and read until the server closes, or a whole answer has come."""
    with socket.create_connection(("127.0.0.1", gate.port), timeout=wait_s) as end:
        end.sendall(text)
        got = b""
        while True:
            try:
                more = end.recv(65_536)
            except (TimeoutError, ConnectionResetError):
                return got
            got += more
            if not more or (b"\r\n\r\n" in got and b"}" in got):
                return got


def head(gate: Gate, *lines: str, host: str | None = None, path: str = PATH) -> bytes:
    rows = [f"POST {path} HTTP/1.1", *([f"host: {host}"] if host else [f"host: 127.0.0.1:{gate.port}"]), *lines]
    return ("\r\n".join(rows) + "\r\n\r\n").encode("latin-1")


@pytest.fixture
def gate() -> Iterator[Gate]:
    with ModelServer([Turn(text="ok")] * 9) as server, gateway(all_of(server), {"m": CHAT}) as one:
        yield one


AUTH = f"authorization: Bearer {KEY}"
LENGTH = f"content-length: {len(DATA)}"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["host: 127.0.0.1:{port}"], 400),
        ([LENGTH, "transfer-encoding: chunked"], 400),
        ([LENGTH, f"content-length: {len(DATA) + 1}"], 400),
        (["x-a: b\x00c"], 400),
        (["origin: http://127.0.0.1:{port}"], 403),
        (["origin: https://example.com", "content-type: text/plain"], 403),
    ],
)
def test_requests_that_servers_read_in_two_ways_are_refused(gate: Gate, lines: list[str], status: int) -> None:
    rows = [line.format(port=gate.port) for line in lines]
    if not any("content-length" in row for row in rows):
        rows.append(LENGTH)
    got = send(gate, head(gate, AUTH, *rows) + DATA)
    assert got.startswith(b"HTTP/1.1 %d" % status), got[:300]
    assert gate.ends == []


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1", "127.0.0.1:1", "localhost.evil:80", ""])
def test_a_host_that_is_not_this_server_is_refused(gate: Gate, host: str) -> None:
    got = send(gate, head(gate, AUTH, LENGTH, host=host or " ") + DATA)
    assert got.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400"))
    assert gate.ends == []


def test_a_page_gets_no_permission_to_ask(gate: Gate) -> None:
    text = f"OPTIONS {PATH} HTTP/1.1\r\nhost: 127.0.0.1:{gate.port}\r\norigin: http://a.b\r\n"
    got = send(gate, (text + "access-control-request-method: POST\r\n\r\n").encode())
    assert got.startswith(b"HTTP/1.1 403")
    assert b"access-control" not in got.lower()


def test_node_may_ask(gate: Gate) -> None:
    assert ask(gate, PATH, BODY, {**BEARER, "sec-fetch-mode": "cors", "accept-language": "*"})[0] == 200


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (PATH, {"authorization": f"Bearer {KEY}"}),
        (PATH, {"x-api-key": KEY}),
        (PATH, {"x-goog-api-key": KEY}),
        (f"{PATH}?key={KEY}", {}),
    ],
)
def test_a_key_is_taken_from_four_places_and_reaches_no_service(path: str, headers: dict[str, str]) -> None:
    with ModelServer([Turn(text="ok")] * 2) as server:
        for service in (CHAT, MESSAGES):
            with gateway(all_of(server), {"m": service}) as gate:
                assert ask(gate, path, BODY, headers)[0] == 200
                (file,) = (gate.home / "gateway").glob("*")
                assert KEY not in file.read_text()
        for request in server.requests:
            assert KEY not in json.dumps([request.headers, request.query, request.path, request.body])


@pytest.mark.parametrize("key", [None, "", "wrong", KEY + "x", "Bearer"])
def test_a_wrong_key_asks_nothing(gate: Gate, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    for method, path in (("POST", PATH), ("GET", "/v1/models"), ("POST", "/v1/messages/count_tokens")):
        status, _, data = ask(gate, path, BODY if method == "POST" else None, headers, method)
        assert status == 401
        assert (key or "\0") not in data.decode()
    assert gate.ends == []


@pytest.mark.parametrize("model", ["../../v1/files", "..%2F..%2Fx", "//evil.example/x", "a\r\nx: y", "m?key=1", "m#x"])
def test_a_models_name_is_never_part_of_another_address(model: str) -> None:
    with ModelServer([Turn(text="ok")] * 4) as server:
        for service in (GEMINI, CHAT):
            with gateway(all_of(server), {"*": service}) as gate:
                said(gate, model=model)
        for request in server.requests:
            assert request.path.startswith(("/v1beta/models/", "/v1/chat/completions"))
            assert ".." not in request.path.split("/")


def test_a_redirect_is_not_followed_with_the_key() -> None:
    with ModelServer([]) as other:
        fault = Fault(status=302, headers={"location": other.base_url(CHAT) + "/chat/completions"})
        with ModelServer(Turn(fault=fault)) as server, gateway(all_of(server), {"m": CHAT}) as gate:
            assert said(gate)[0] >= 400
        assert other.requests == ()


def test_a_service_that_repeats_its_key_gives_it_to_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"error": {"message": "Incorrect API key provided: sk-of-the-service", "type": "invalid_request_error"}}'
    fault = Fault(status=401, raw=body, headers={"content-type": "application/json"})
    with ModelServer([Turn(fault=fault)] * 2) as server:
        for service in (CHAT, MESSAGES):
            row = backend(server, service, key_env="OF_THE_SERVICE")
            row = msgspec.structs.replace(row, env={"OF_THE_SERVICE": "sk-of-the-service"})
            with gateway({"a": row}, {"m": "a"}) as gate:
                status, _, data = ask(gate, PATH, BODY)
                record = [str(line) for line in gate.lines]
            assert status == 401
            assert "sk-of-the-service" not in data.decode() + str(record)


def test_headers_of_a_service_come_by_a_list_of_allowed_ones() -> None:
    fault = Fault(headers={"set-cookie": "a=b", "x-secret": "s", "connection": "close", "x-ratelimit-limit": "5"})
    with ModelServer([Turn(text="ok", fault=fault)] * 2) as server:
        for service in (CHAT, MESSAGES):
            with gateway(all_of(server), {"m": service}) as gate:
                headers = ask(gate, PATH, BODY)[1]
            assert not {"set-cookie", "x-secret"} & headers.keys()


def test_a_body_over_the_limit_is_refused_unread(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backplane.gateway.doors.BODY_BYTES_MAX", 10_000)
    assert send(gate, head(gate, AUTH, "content-length: 999999999")).startswith(b"HTTP/1.1 413")
    bomb = gzip.compress(b"[" * 1_000_000)
    got = send(gate, head(gate, AUTH, f"content-length: {len(bomb)}", "content-encoding: gzip") + bomb)
    assert got.startswith(b"HTTP/1.1 413")
    got = send(gate, head(gate, AUTH, "content-length: 4", "content-encoding: zstd") + b"abcd")
    assert got.startswith(b"HTTP/1.1 415")
    packed = gzip.compress(DATA)
    got = send(gate, head(gate, AUTH, f"content-length: {len(packed)}", "content-encoding: gzip") + packed)
    assert got.startswith(b"HTTP/1.1 200")


def test_half_a_request_is_ended(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backplane.gateway.doors.HEAD_S_MAX", 0.2)
    monkeypatch.setattr("backplane.gateway.doors.BODY_S_MAX", 0.2)
    assert send(gate, b"POST / HTTP/1.1\r\nhost: x").startswith(b"HTTP/1.1 408")
    assert send(gate, head(gate, AUTH, LENGTH) + DATA[:5]).startswith(b"HTTP/1.1 408")


def test_a_head_without_an_end_is_refused(gate: Gate) -> None:
    got = send(gate, b"POST / HTTP/1.1\r\n" + b"x-a: b\r\n" * 20_000)
    assert got.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"{} x", b"NaN"])
def test_json_that_cannot_be_read_is_a_wrong_request(gate: Gate, data: bytes) -> None:
    assert ask(gate, PATH, data)[0] == 400


def test_websockets_and_unknown_paths_are_refused(gate: Gate) -> None:
    upgrade = {**BEARER, "upgrade": "websocket", "connection": "upgrade"}
    assert ask(gate, "/v1/responses", None, upgrade, "GET")[0] == 426
    for method, path, status in (("POST", "/v1/files", 404), ("GET", "/x", 404), ("DELETE", "/v1/models/m", 405)):
        given, _, data = ask(gate, path, BODY if method == "POST" else None, None, method)
        assert given == status
        assert json.loads(data)["error"]["message"]


def test_a_slow_reader_slows_the_service_and_not_the_memory() -> None:
    turn = Turn(text="x" * 40_000_000, pieces=4000)
    with ModelServer(turn) as server, gateway(all_of(server), {"m": CHAT}) as gate:
        path, body = question(CHAT, stream=True)
        data = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", gate.port)) as end:
            end.sendall(head(gate, AUTH, f"content-length: {len(data)}", path=path) + data)
            end.recv(100)
            before = rss()
            time.sleep(1)
            assert rss() - before < 30_000_000
        assert server.wait_end(1) == "left"


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# A kill ---------------------------------------------------------------------------------------------------------------


@contextmanager
def started(folder: Path, server: ModelServer, *words: str) -> Iterator[tuple[subprocess.Popen[str], Gate, str]]:
    """Start the command; yield it, where it listens, and its key."""
    (folder / "backplane.toml").write_text(
        f'[backends.s]\nhost = "api"\noptions = {{ protocol = "{CHAT}", base_url = "{server.base_url(CHAT)}" }}\n'
        '[gateway.models]\nm = "s"\n'
    )
    env = {**os.environ, "BACKPLANE_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "backplane", "gateway", "--port", "0", *words]
    with subprocess.Popen(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        address, key = program.stdout.readline().strip(), program.stdout.readline().strip().removeprefix("key ")
        try:
            yield program, Gate(int(address.rpartition(":")[2]), folder / "home"), key
        finally:
            program.kill()


KILLED = 100
"""Streams that are open when the gateway is killed."""


def test_a_killed_gateway_leaves_a_record_of_every_exchange(tmp_path: Path) -> None:
    slow = Turn(text="word " * 400, pieces=400, fault=Fault(pause_ms=20), times=None)
    path, body = question(CHAT, stream=True)
    data = json.dumps(body).encode()
    ends = []
    with ModelServer(slow) as server:
        with started(tmp_path, server) as (program, gate, key):
            for _ in range(KILLED):
                end = socket.create_connection(("127.0.0.1", gate.port), timeout=5)
                ends.append(end)
                end.sendall(
                    head(gate, f"authorization: Bearer {key}", f"content-length: {len(data)}", path=path) + data
                )
            server.wait_requests(KILLED)
            # Half of the clients have read a piece; how far the others are is known to the record alone.
            for end in ends[: KILLED // 2]:
                while b"word" not in end.recv(1 << 16):
                    pass
            program.kill()
            program.wait()
        began = time.monotonic()
        with started(tmp_path, server) as (program, gate, key):
            assert ask(gate, "/v1/models", None, {"authorization": f"Bearer {key}"}, "GET")[0] == 200
            assert time.monotonic() - began < 5  # The goal is a second; a busy machine starts Python slowly.
            lines = [line for file in (gate.home / "gateway").glob("*.jsonl") for line in lines_of(file)]
    for end in ends:
        end.close()
    begun = [line.id for line in lines if isinstance(line, ExchangeBegin)]
    reached = {line.id: (line.backend, line.ms) for line in lines if isinstance(line, ExchangeFirst)}
    ended = {line.id: line for line in lines if isinstance(line, ExchangeEnd)}
    assert len(begun) == KILLED
    assert [ended[one].end for one in begun] == ["interrupted"] * KILLED
    assert KILLED // 2 <= len(reached) <= KILLED
    assert {one: (line.backend, line.first_ms) for one, line in ended.items() if line.backend} == reached


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_gateway(tmp_path: Path, number: signal.Signals) -> None:
    with ModelServer([]) as server, started(tmp_path, server) as (program, _, _):
        program.send_signal(number)
        assert program.wait(5) == 128 + number


def test_a_new_key_is_printed_with_its_lines_and_answers(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "backplane", "gateway", "--new-key", "ci"], capture_output=True, text=True, check=True
    )
    key, _, lines = made.stdout.partition("\n\n")
    assert re.fullmatch(r"bpk-[0-9a-f]{64}", key)
    assert key not in lines
    with ModelServer(Turn(text="ok")) as server, started(tmp_path, server) as (program, _, _):
        program.kill()
    with (tmp_path / "backplane.toml").open("a") as file:
        file.write(lines)
    with ModelServer(Turn(text="ok")) as server:
        text = (tmp_path / "backplane.toml").read_text()
        (tmp_path / "backplane.toml").write_text(re.sub(r"http://[^\"]*", server.base_url(CHAT), text))
        env = {**os.environ, "BACKPLANE_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", "backplane", "gateway", "--port", "0"]
        with subprocess.Popen(command, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE) as program:
            assert program.stdout is not None
            gate = Gate(int(program.stdout.readline().strip().rpartition(":")[2]), tmp_path / "home")
            assert ask(gate, PATH, BODY, {"x-api-key": key})[0] == 200
            assert ask(gate, PATH, BODY, {"x-api-key": "bpk-other"})[0] == 401
            program.terminate()
            program.wait(5)


# Another address ------------------------------------------------------------------------------------------------------


def test_another_address_answers_its_own_hosts_and_says_that_it_is_plain(tmp_path: Path) -> None:
    with ModelServer([Turn(text="ok")] * 9) as server:
        (tmp_path / "backplane.toml").write_text(
            f'[backends.s]\nhost = "api"\noptions = {{ protocol = "{CHAT}", base_url = "{server.base_url(CHAT)}" }}\n'
            f'[gateway]\nhosts = ["Models.example.com"]\n[gateway.models]\nm = "s"\n'
            f'[gateway.clients.ci]\nkey_sha256 = "{digest(KEY)}"\n'
        )
        env = {**os.environ, "BACKPLANE_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", "backplane", "gateway", "--address", "0.0.0.0", "--port", "0"]
        with subprocess.Popen(
            command, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as program:
            assert program.stdout is not None
            assert program.stderr is not None
            port = int(program.stdout.readline().strip().rpartition(":")[2])
            assert "plain HTTP" in program.stderr.readline()

            def status(to: str, host: str, key: str = KEY) -> int:
                client = http.client.HTTPConnection(to, port, timeout=10)
                client.request("POST", PATH, DATA, {"host": host, "authorization": f"Bearer {key}"})
                found = client.getresponse().status
                client.close()
                return found

            local, other = "127.0.0.1", "127.0.0.2"
            for host in (f"localhost:{port}", "models.example.com", "MODELS.example.com:443", f"{other}:{port}"):
                assert status(other, host) == 200
            for host in ("example.com", "models.example.com.evil", f"evil.models.example.com:{port}", "0.0.0.0", other):
                assert status(other, host) == 403
            assert status(local, f"{other}:{port}") == 403
            assert status(local, f"{local}:{port}", "bpk-other") == 401
            program.terminate()
            program.wait(5)


@pytest.mark.parametrize(
    ("words", "text", "fact", "step"),
    [
        (["--address", "0.0.0.0"], "", "no client of the gateway has a key", "--new-key"),
        ([], '[gateway]\naddress = "10.0.0.5"\n', "other machines reach 10.0.0.5", "--new-key"),
        (["--address", "::"], "", "other machines reach ::", "--new-key"),
        (["--address", "here"], "", "'here' is no IP address", "127.0.0.1"),
        (["--address", "192.0.2.1"], f'[gateway.clients.ci]\nkey_sha256 = "{"0" * 64}"\n', "cannot listen", "--port"),
        (["--address", "10.0.0.5", "--for", "claude", "--", "true"], "", "no effect", "127.0.0.1"),
        ([], '[gateway]\nhosts = ["a:1"]\n', "hosts", "hosts"),
    ],
)
def test_an_address_that_others_reach_needs_keys(
    words: list[str], text: str, fact: str, step: str, tmp_path: Path
) -> None:
    (tmp_path / "backplane.toml").write_text(text)
    env = {**os.environ, "BACKPLANE_HOME": str(tmp_path / "home"), "OPENAI_API_KEY": "dummy"}
    command = [sys.executable, "-m", "backplane", "gateway", "--port", "0", *words]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 2
    assert fact in done.stderr
    assert step in done.stderr
    assert not (tmp_path / "home" / "gateway").exists()


WRONG: list[tuple[str, Any]] = [
    ('[gateway.models]\nm = "nothing/x"\n', "no backend with host"),
    ("[gateway]\nport = 70000\n", "port"),
    ('[gateway.clients.a]\nkey_sha256 = "short"\n', "key_sha256"),
    ("[gateway]\nmodel = {}\n", "did you mean"),
]


@pytest.mark.parametrize(("text", "word"), WRONG)
def test_a_wrong_configuration_is_named(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "backplane.toml").write_text(text)
    env = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    command = [sys.executable, "-m", "backplane", "gateway", "--port", "0"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**env, "BACKPLANE_HOME": str(tmp_path / "home")}, capture_output=True, text=True,
        check=False, timeout=20,
    )  # fmt: skip
    assert done.returncode == 2
    assert word in done.stderr
    assert not (tmp_path / "home" / "gateway").exists()
