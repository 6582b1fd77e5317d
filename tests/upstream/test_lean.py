"""The gateway's small HTTP client: it fails in the same words as httpx, keeps connections, and speaks TLS."""

from __future__ import annotations

import gzip
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from backplane.upstream.client import KEPT_S, RefusedAnswer, answer_to, client_of
from backplane.upstream.endpoint import CONNECT_S, Endpoint
from backplane.upstream.failure import UpstreamError
from backplane.upstream.lean import LeanClient, is_lean

Client = httpx.AsyncClient | LeanClient
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nok"
HEADERS = {"content-type": "application/json", "user-agent": "backplane"}


class Peer:
    """A server that sends one scripted answer for each request, and ends the connection after the last."""

    def __init__(self, answers: list[bytes], tls: ssl.SSLContext | None = None) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.heads: list[bytes] = []
        self.connections = 0
        self.left = threading.Event()
        self.answers, self._tls = answers, tls
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                end, _ = self.listener.accept()
                self.connections += 1
                with suppress(OSError):
                    self._attend(self._tls.wrap_socket(end, server_side=True) if self._tls else end)
                end.close()

    def _attend(self, end: socket.socket) -> None:
        end.settimeout(5)
        while self.answers:
            data = b""
            while b"\r\n\r\n{}" not in data:
                if not (more := end.recv(65536)):
                    self.left.set()
                    return
                data += more
            self.heads.append(data)
            answer = self.answers.pop(0)
            end.sendall(answer)
            if not answer or answer.endswith(b"!") or b"connection: close" in answer:
                break  # The answer is cut here.
            if answer is SILENT or answer is HALF:
                self.left.wait(0.5)
                if not end.recv(65536):
                    self.left.set()
        end.close()


SILENT = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"
HALF = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n"


@contextmanager
def peer(*answers: bytes, tls: ssl.SSLContext | None = None) -> Iterator[Peer]:
    one = Peer(list(answers), tls)
    yield one
    one.listener.close()


def endpoint(base_url: str, **more: Any) -> Endpoint:
    return Endpoint(protocol="openai_compatible", base_url=base_url, **{"api_key": "k", "timeout_s": 0.4, **more})


def lean_of(at: Endpoint) -> Client:
    return LeanClient(at.base_url, timeout_s=at.timeout_s, connect_s=CONNECT_S, kept_max=2, kept_s=KEPT_S)


def httpx_of(at: Endpoint) -> Client:
    return client_of(at, httpx.Limits(max_connections=None))


CLIENTS = (lean_of, httpx_of)


def posted(
    make: Callable[[Endpoint], Client], at: Endpoint, *, times: int = 1, headers: dict[str, str] = HEADERS
) -> list[Any]:
    """Send requests; return the body of each, or its failure."""

    async def once(client: Client) -> Any:
        try:
            async with answer_to(client, at, f"{at.base_url}/chat", headers, b"{}") as response:
                return b"".join([data async for data in response.aiter_bytes()])
        except UpstreamError as error:
            return error.failure

    async def work() -> list[Any]:
        async with make(at) as client:
            return [await once(client) for _ in range(times)]

    return anyio.run(work)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n!",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf!",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n!",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n!",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: br\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 429 Slow\r\nretry-after: 7\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 302 Found\r\nlocation: https://127.0.0.1/v2\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 500 No\r\ncontent-type: text/html\r\n\r\n<h1>broken</h1>!",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        OK,
        b"HTTP/1.0 200 OK\r\n\r\nold!",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 50_000 + OK[15:],
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000 + b"\r\n\r\n!",
        SILENT,
        HALF,
    ],
)
def test_an_answer_means_the_same_as_with_httpx(answer: bytes) -> None:
    found = []
    for make in CLIENTS:
        with peer(answer) as server:
            (one,) = posted(make, endpoint(f"http://127.0.0.1:{server.port}/v1"))
        found.append(repr(one).replace(str(server.port), "PORT"))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("base_url", "headers"),
    [
        ("http://127.0.0.1:9/v1", HEADERS),
        ("http://no-such-host.invalid/v1", HEADERS),
        ("https://127.0.0.1:9/v1", HEADERS),
        ("http://127.0.0.1:9/v1", {"authorization": "Bearer k\n"}),
        ("http://127.0.0.1:9/v1", {"authorization": "Bearer ключ"}),
    ],
)
def test_a_request_that_cannot_be_sent_fails_in_the_same_words(base_url: str, headers: dict[str, str]) -> None:
    found = [posted(make, endpoint(base_url), headers=headers)[0] for make in CLIENTS]
    assert found[0].code == found[1].code
    assert found[0].message.partition(":")[0] == found[1].message.partition(":")[0]
    assert found[0].hint == found[1].hint


def test_a_connection_is_kept_and_replaced_when_the_service_has_closed_it() -> None:
    with peer(OK, OK, OK) as server:
        assert posted(lean_of, endpoint(f"http://127.0.0.1:{server.port}/v1"), times=3) == [b"ok"] * 3
        assert server.connections == 1
        assert server.heads[0].startswith(b"POST /v1/chat HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n" % server.port)
    closing = OK.replace(b"content-length", b"connection: close\r\ncontent-length")
    with peer(closing, OK) as server:
        assert posted(lean_of, endpoint(f"http://127.0.0.1:{server.port}/v1"), times=2) == [b"ok"] * 2
        assert server.connections == 2


def test_a_kept_connection_that_the_service_closes_meanwhile_is_not_used_again() -> None:
    with peer(OK) as first:
        at = endpoint(f"http://127.0.0.1:{first.port}/v1")

        async def work() -> None:
            async with lean_of(at) as client:
                async with answer_to(client, at, f"{at.base_url}/chat", HEADERS, b"{}") as response:
                    await response.aread()
                await anyio.sleep(0.05)  # The peer has no further answer, and closes.
                first.answers.append(OK)
                async with answer_to(client, at, f"{at.base_url}/chat", HEADERS, b"{}") as response:
                    assert await response.aread() == b"ok"

        anyio.run(work)
        assert first.connections == 2


def test_a_connection_with_more_bytes_than_its_answer_is_not_used_again() -> None:
    with peer(OK + b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged", OK) as server:
        assert posted(lean_of, endpoint(f"http://127.0.0.1:{server.port}/v1"), times=2) == [b"ok"] * 2
        assert server.connections == 2


def test_a_host_of_the_settings_replaces_that_of_the_address() -> None:
    with peer(OK) as server:
        at = endpoint(f"http://127.0.0.1:{server.port}/v1")
        assert posted(lean_of, at, headers={**HEADERS, "host": "models.example"}) == [b"ok"]
        assert server.heads[0].lower().count(b"\nhost:") == 1
        assert b"models.example" in server.heads[0]


def test_leaving_an_answer_early_closes_its_connection() -> None:
    with peer(HALF) as server:
        at = endpoint(f"http://127.0.0.1:{server.port}/v1", timeout_s=5)

        async def work() -> None:
            async with (
                lean_of(at) as client,
                answer_to(client, at, f"{at.base_url}/chat", HEADERS, b"{}") as response,
            ):
                assert await anext(response.aiter_bytes()) == b"ab"

        anyio.run(work)
        assert server.left.wait(5)


def test_a_packed_answer_is_unpacked() -> None:
    body = gzip.compress(b"some words")
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body)
    with peer(head + body) as server:
        assert posted(lean_of, endpoint(f"http://127.0.0.1:{server.port}/v1")) == [b"some words"]


def test_a_refusal_has_its_words() -> None:
    with peer(b"HTTP/1.1 400 No\r\ncontent-length: 3\r\n\r\nbad") as server:
        at = endpoint(f"http://127.0.0.1:{server.port}/v1", api_key=None)

        async def work() -> bytes:
            async with lean_of(at) as client:
                with pytest.raises(RefusedAnswer) as caught:
                    async with answer_to(client, at, f"{at.base_url}/chat", HEADERS, b"{}"):
                        pass
                return caught.value.body

        assert anyio.run(work) == b"bad"


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl: not installed")
    path = tmp_path / "both.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*command, "-keyout", path, "-out", tmp_path / "c.pem", *names], check=True, capture_output=True)
    path.write_text(path.read_text() + (tmp_path / "c.pem").read_text())
    return path


def test_tls_is_spoken_and_a_strange_certificate_refused(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    words = []
    for make in CLIENTS:
        with peer(OK, OK, tls=tls) as server:
            at = endpoint(f"https://127.0.0.1:{server.port}/v1", timeout_s=5)
            failure = posted(make, at)[0]
            words.append((failure.code, failure.message.replace(str(server.port), ""), failure.hint))
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            assert posted(make, at, times=2) == [b"ok", b"ok"]
            monkeypatch.delenv("SSL_CERT_FILE")
    assert words[0] == words[1]
    assert words[0][0] == "backend_unavailable"


def test_proxies_and_names_in_an_address_are_left_to_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert is_lean("http://127.0.0.1:1/v1")
    assert not is_lean("http://me:secret@127.0.0.1:1/v1")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:3128")
    assert not is_lean("https://api.example/v1")
