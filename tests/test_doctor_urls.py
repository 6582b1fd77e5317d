"""`doctor --url` and `--probe`: what is wrong with a base address and what would be right, for each protocol."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from backplane.errors import ConfigError
from backplane.testing import Fault, ModelServer, Script, Turn
from backplane.upstream import baseurl, probe
from backplane.upstream.endpoint import PROTOCOLS, Endpoint

S_MAX = 60
KEY = "sk-the-secret-of-this-test"
OTHER = "sk-another-secret-of-this-test"
Check = baseurl.Check

pytestmark = pytest.mark.usefixtures("_no_proxy")


@pytest.fixture
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@contextmanager
def playing(*turns: Turn, **more: Any) -> Iterator[ModelServer]:
    with ModelServer(Script(turns=turns or (Turn(text="ok", times=None),), **more)) as server:
        yield server


def check(protocol: str, base_url: str, key: str | None = KEY, model: str | None = None, **more: Any) -> list[Check]:
    async def run() -> list[Check]:
        endpoint = Endpoint(protocol=protocol, base_url=base_url, api_key=key, connect_s=5.0, first_byte_s=10.0, **more)
        return await probe.probe(endpoint, model, "MY_KEY" if key else "")

    found = anyio.run(run)
    assert KEY not in str(found)
    assert OTHER not in str(found)
    return found


def turn(**fault: Any) -> Turn:
    return Turn(text="ok", times=None, fault=Fault(**fault))


# The four lines of the document ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_base_with_its_version_whose_path_answers_an_event_stream_is_right(protocol: Any) -> None:
    with playing(keys=(KEY,), protocols=(protocol,)) as server:
        (found,) = check(protocol, server.base_url(protocol))
        path = server.requests[-1].path
    assert (found.state, "answers text/event-stream" in found.fact) == ("ok", True)
    version, end = {
        "openai_compatible": ("/v1", "/chat/completions"),
        "openai_responses": ("/v1", "/responses"),
        "anthropic": ("/v1", "/messages"),
        "gemini_ai_studio": ("/v1beta", ":streamGenerateContent"),
    }[protocol]
    assert path.startswith(version + "/")
    assert path.endswith(end)


def test_v1beta_is_put_together_where_it_is_missing_and_the_stream_is_asked_for_with_alt_sse() -> None:
    with playing() as server:
        (found,) = check("gemini_ai_studio", server.url)
        request = server.requests[-1]
    assert found.state == "ok"
    assert request.path.startswith("/v1beta/models/")
    assert request.query["alt"] == "sse"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_answer_that_does_not_stream_is_named(protocol: Any) -> None:
    with playing(turn(answer_as="whole")) as server:
        (found,) = check(protocol, server.base_url(protocol))
    assert found.state == "note"
    assert "not text/event-stream" in found.fact
    assert ("alt=sse" in found.fact) == (protocol == "gemini_ai_studio")


# Wrong addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name != "gemini_ai_studio"])
@pytest.mark.parametrize("path", ["", "/v2/v2", "/api"])
def test_a_wrong_path_is_told_with_the_one_that_answers(protocol: Any, path: str) -> None:
    with playing(keys=(KEY,), prefix="/v1/") as server:
        found = check(protocol, server.url + path)
        right = server.base_url(protocol)
    assert found[-1].state == "missing"
    assert found[-1].fix == f"base_url = {right!r}"


@pytest.mark.parametrize(
    ("protocol", "given", "state", "words"),
    [
        ("openai_compatible", "https://a.example", "note", "has no /v1"),
        ("openai_compatible", "https://a.example/v1/v1", "missing", "2 versions"),
        ("openai_compatible", "https://a.example/v1/chat/completions", "note", "added by itself"),
        ("openai_compatible", "https://a.example/v1/chat/completions/chat/completions", "missing", "2 times"),
        ("openai_responses", "https://a.example/v1/responses/", "note", "added by itself"),
        ("openai_responses", "https://a.example/v1/chat/completions", "missing", "which is of openai_compatible"),
        ("anthropic", "https://a.example", "note", "has no /v1"),
        ("anthropic", "https://a.example/v1/messages", "note", "added by itself"),
        ("gemini_ai_studio", "https://a.example", "note", "has no /v1beta"),
        ("gemini_ai_studio", "https://a.example/v1beta/models/m:generateContent", "note", "added by itself"),
        ("gemini_ai_studio", "https://a.example/v1beta/openai", "missing", "openai_compatible"),
        ("gemini_ai_studio", "https://a.example/v1", "note", "has not all that /v1beta has"),
        ("anthropic", "a.example/v1", "missing", "https:// is missing"),
        ("anthropic", "ftp://a.example/v1", "missing", "no http address"),
    ],
)
def test_what_is_typed_wrong_is_seen_without_asking_anybody(protocol: str, given: str, state: str, words: str) -> None:
    found, *_ = baseurl.path_doubts(protocol, given)
    assert (found.state, words in found.fact) == (state, True), found
    if words != "no http address":
        version = "/v1beta" if protocol == "gemini_ai_studio" else "/v1"
        assert f"base_url = 'https://a.example{version}'" in found.fix


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_right_address_raises_no_doubt(protocol: str) -> None:
    version = baseurl.version_of(protocol)
    assert baseurl.path_doubts(protocol, f"https://a.example{version}") == []
    assert baseurl.path_doubts(protocol, f"https://a.example/proxy{version}/") == []


def test_another_protocol_at_the_address_is_found() -> None:
    for protocol, other in (("openai_compatible", "anthropic"), ("anthropic", "openai_responses")):
        with playing(keys=(KEY,), protocols=(other,)) as server:
            found = check(protocol, server.url + "/v1")
        assert found[-1].state == "missing"
        assert found[-1].fix == f"protocol {other}"


@pytest.mark.parametrize(
    ("body", "forms"),
    [
        ({"type": "error", "error": {"type": "not_found_error", "message": "x"}}, ("anthropic",)),
        ([{"error": {"code": 404, "message": "x", "status": "NOT_FOUND"}}], ("gemini_ai_studio",)),
        ({"error": {"message": "x", "type": "invalid_request_error", "param": None, "code": None}},
         ("openai_compatible", "openai_responses")),
        ({"detail": "Not Found"}, ()),
    ],
)  # fmt: skip
def test_whose_an_error_is_is_seen_by_its_form(body: Any, forms: tuple[str, ...]) -> None:
    assert baseurl.error_forms(body) == forms
    for protocol in PROTOCOLS:
        with playing(turn(status=404, body=body)) as server:
            found = check(protocol, server.url + baseurl.version_of(protocol))
        assert found[-1].state == "missing"
        assert ("has the form of" in found[-1].fact) == bool(forms and protocol not in forms)


def test_a_stream_of_another_protocol_names_it() -> None:
    raw = b'data: {"type":"message_start","message":{}}\n\n'
    with playing(turn(raw=raw, content_type="text/event-stream")) as server:
        found = check("openai_compatible", server.url + "/v1")
    assert "speaks anthropic" in found[-1].fact


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_web_page_is_told_as_one(protocol: Any) -> None:
    page = b"<!doctype html><title>Sign in to\nthe proxy</title>"
    for status in (200, 404, 503):
        fault = {"status": status, "content_type": "text/html", "body": page.decode()}
        with playing(turn(**(fault if status != 200 else {"raw": page, "content_type": "text/html"}))) as server:
            found = check(protocol, server.base_url(protocol))
        assert found[-1].state == "missing"
        assert "web page ('Sign in to the proxy')" in found[-1].fact
        assert "HTTPS_PROXY" in found[-1].fix


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_redirect_is_not_followed_and_its_target_is_named(protocol: Any) -> None:
    end = PROTOCOLS[protocol].path or "/models/m:streamGenerateContent"
    target = f"https://b.example/v1{end}?key={OTHER}"
    with playing(turn(status=308, headers={"location": target}, body="")) as server:
        found = check(protocol, server.base_url(protocol))
    assert found[-1].state == "missing"
    assert f"https://b.example/v1{end};" in found[-1].fact
    assert found[-1].fix == "base_url = 'https://b.example/v1'"


@pytest.mark.parametrize(
    ("raw", "content_type", "words"),
    [(b"hello", "text/plain", "and no JSON: 'hello'"), (b'{"hello":1}', "application/json", "not of")],
)
def test_what_is_no_answer_of_a_model_is_told(raw: bytes, content_type: str, words: str) -> None:
    with playing(turn(raw=raw, content_type=content_type)) as server:
        found = check("openai_compatible", server.url + "/v1")
    assert (found[-1].state, words in found[-1].fact) == ("missing", True), found


# Keys -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_refused_key_is_told_by_its_variable(protocol: Any) -> None:
    with playing(keys=(OTHER,)) as server:
        found = check(protocol, server.base_url(protocol))
    assert found[-1].state == "missing"
    assert "refuses the key in MY_KEY" in found[-1].fact
    assert found[-1].fix == "put a valid key into MY_KEY"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_missing_key_says_how_to_name_one(protocol: Any) -> None:
    with playing(keys=(KEY,)) as server:
        found = check(protocol, server.base_url(protocol), key=None)
    assert found[-1].state == "missing"
    assert "--key-env NAME" in found[-1].fix


def test_a_service_that_repeats_the_key_does_not_get_it_printed() -> None:
    with playing(turn(status=401, message=f"Incorrect API key provided: {KEY}")) as server:
        found = check("openai_compatible", server.url + "/v1")
    assert "[key]" in found[-1].fact


@pytest.mark.parametrize("base_url", [f"https://a.example/v1?key={KEY}", f"https://{KEY}@a.example/v1"])
def test_a_key_in_the_address_is_told_and_not_used(base_url: str) -> None:
    (found,) = check("gemini_ai_studio", base_url, key=None)
    assert found.state == "missing"
    assert "'https://a.example/v1'" in found.fix


def test_a_key_is_not_sent_over_plain_http_to_another_machine() -> None:
    (found,) = check("openai_compatible", "http://a.example/v1")
    assert found.fix == "base_url = 'https://a.example/v1'"
    assert baseurl.key_doubts("http://127.0.0.1:1/v1", has_key=True) == []
    assert baseurl.key_doubts("http://a.example/v1", has_key=False) == []


def test_the_key_does_not_go_along_when_the_guess_is_weaker() -> None:
    assert all(one.startswith("https:") for one in baseurl.candidates("anthropic", "https://a.example/api"))
    assert len(baseurl.candidates("anthropic", "https://a.example/x/y/v2/messages")) <= baseurl.CANDIDATES_MAX


def test_a_key_that_no_header_can_hold_is_told() -> None:
    with playing() as server:
        (*_, found) = check("openai_compatible", server.url + "/v1", key=KEY + "é“")
    assert "copy the key again" in found.fix


# Services in trouble --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "state", "words"),
    [
        ({"status": 429, "headers": {"retry-after": "7"}}, "note", "limited now"),
        ({"status": 500}, "missing", "was reached and fails"),
        ({"status": 529}, "missing", "was reached and fails"),
        ({"status": 400, "message": "no such field"}, "note", "was reached"),
        ({"status": 404, "message": "The model `m` does not exist"}, "note", "is right, and the key"),
    ],
)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_service_that_was_reached_is_not_blamed_on_the_address(
    protocol: Any, fault: dict[str, Any], state: str, words: str
) -> None:
    with playing(turn(**fault)) as server:
        found = check(protocol, server.base_url(protocol), model="m")
    assert (found[-1].state, words in found[-1].fact) == (state, True), found
    assert "base_url" not in found[-1].fix


def test_a_port_that_nobody_listens_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = check("anthropic", f"http://127.0.0.1:{port}/v1")
    assert found[-1].fact == f"nothing listens at http://127.0.0.1:{port}/v1"


def test_https_to_a_port_that_speaks_http() -> None:
    def answer() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(4096)
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        found = check("anthropic", f"https://127.0.0.1:{listener.getsockname()[1]}/v1", model="m")
        thread.join(S_MAX)
    assert "does not speak https" in found[-1].fact
    assert "plain http: http://127.0.0.1" in found[-1].fix


def test_a_connection_that_is_broken_may_want_https() -> None:
    with playing(turn(reset=True)) as server:
        found = check("anthropic", server.base_url("anthropic"), model="m")
    assert "it may speak https" in found[-1].fix


def test_a_service_that_says_nothing_is_given_up() -> None:
    async def run(base_url: str) -> list[Check]:
        return await probe.probe(Endpoint(protocol="anthropic", base_url=base_url, first_byte_s=0.2), "m")

    with playing(turn(hang=True)) as server:
        found = anyio.run(run, server.base_url("anthropic"))
    assert "said nothing for 0.2 s" in found[-1].fact


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (socket.gaierror(-2, "Name or service not known"), "(DNS)"),
        (ssl.SSLCertVerificationError("self-signed"), "certificate"),
        (OSError(101, "Network is unreachable"), "no way to"),
    ],
)
def test_what_hides_behind_a_failed_connection_is_told(cause: Exception, words: str) -> None:
    import httpx

    error = httpx.ConnectError("All connection attempts failed")
    error.__cause__ = OSError("all failed")
    error.__cause__.__cause__ = ExceptionGroup("several", [cause])
    endpoint = Endpoint(protocol="anthropic", base_url=f"https://a.example/v1?x={KEY}", api_key=KEY)
    found = probe.explain(error, endpoint)
    assert words in found.fact
    assert found.fix
    assert KEY not in str(found)


# The command ----------------------------------------------------------------------------------------------------------

Doctor = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def doctor(tmp_path: Path, backplane_home: Path) -> Doctor:
    def call(*words: str, config: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        if config is not None:
            (tmp_path / "backplane.toml").write_text(config)
        return subprocess.run(
            [sys.executable, "-m", "backplane", "doctor", *words], cwd=tmp_path, capture_output=True, text=True,
            timeout=S_MAX, check=False, env={**os.environ, "BACKPLANE_HOME": str(backplane_home), **env},
        )  # fmt: skip

    return call


def test_the_command_tries_an_address_and_never_prints_the_key(doctor: Doctor) -> None:
    with playing(keys=(KEY,), prefix="/v1/") as server:
        words = ("--url", server.url + "/", "--protocol", "anthropic", "--key-env", "MY_KEY")
        bad = doctor(*words, "--json", MY_KEY=KEY)
        good = doctor(*words[:1], server.url + "/v1", *words[2:], MY_KEY=KEY)
        refused = doctor(*words[:1], server.url + "/v1", *words[2:], MY_KEY=OTHER)
    findings = [json.loads(line) for line in bad.stdout.splitlines()]
    assert bad.returncode == 1
    assert findings[-1]["fix"] == f"base_url = '{server.url}/v1'"
    assert (good.returncode, good.stdout.split()[:2]) == (0, ["ok", "service"])
    assert refused.returncode == 1
    for done in (bad, good, refused):
        assert not {KEY, OTHER} & set(done.stdout.split() + done.stderr.split())
        assert KEY not in done.stdout + done.stderr
        assert OTHER not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (("--url", "http://127.0.0.1:1/v1"), "--url needs --protocol"),
        (("--url", "http://127.0.0.1:1/v1", "--protocol", "soap"), "no protocol 'soap'"),
        (("--url", "http://127.0.0.1:1/v1", "--protocol", "anthropic", "--key-env", "NOT_SET_HERE"), "NOT_SET_HERE"),
        (("--protocol", "anthropic"), "--protocol has no effect without --url"),
    ],
)
def test_a_wrong_use_says_what_is_missing(doctor: Doctor, words: tuple[str, ...], fact: str) -> None:
    done = doctor(*words)
    assert done.returncode == 2
    assert fact in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_an_address_without_a_scheme_is_told_by_the_command(doctor: Doctor) -> None:
    done = doctor("--url", "localhost:11434", "--protocol", "openai_compatible")
    assert done.returncode == 1
    assert "base_url = 'http://localhost:11434/v1'" in done.stdout


def test_configured_services_are_looked_at_always_and_asked_only_with_probe(doctor: Doctor) -> None:
    with playing(keys=(KEY,)) as server:
        config = (
            '[backends.here]\nhost = "api"\n'
            f'options = {{protocol = "anthropic", base_url = "{server.url}/v1/v1", key_env = "MY_KEY"}}\n'
        )
        looked = doctor("--json", config=config, MY_KEY=KEY)
        assert server.requests == ()
        tried = doctor("--json", "--probe", MY_KEY=KEY)
        assert server.requests != ()
    for done in (looked, tried):
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert "2 versions" in next(one["fact"] for one in found if one["name"] == "service here")
        assert KEY not in done.stdout + done.stderr


def test_an_endpoint_that_is_none_is_an_error() -> None:
    with pytest.raises(ConfigError):
        Endpoint(protocol="anthropic", base_url="a.example")
