"""`doctor --probe`: what is wrong with a base address and what would be right, for each protocol."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from backplane.testing import Fault, ModelServer, Script, Turn
from backplane.upstream import baseurl, probe
from backplane.upstream.endpoint import PROTOCOLS, Endpoint
from tests.in_process import in_process
from tests.scripted import one_document

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


def check(protocol: Any, base_url: str, key: str | None = KEY, model: str | None = None, **more: Any) -> list[Check]:
    async def run() -> list[Check]:
        endpoint = Endpoint(protocol=protocol, base_url=base_url, api_key=key, timeout_s=10.0, **more)
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
    assert found.state == "ok"
    version, end = {
        "openai_compatible": ("/v1", "/chat/completions"),
        "openai_responses": ("/v1", "/responses"),
        "anthropic": ("/v1", "/messages"),
        "gemini_ai_studio": ("/v1beta", ":streamGenerateContent"),
    }[protocol]
    assert path.startswith(version + "/")
    assert path.endswith(end)


def test_a_protocol_that_is_not_spoken_there_is_told_with_the_other_ones() -> None:
    with playing(keys=(KEY,), protocols=("openai_compatible",)) as server:
        found = check("anthropic", server.base_url("openai_compatible"))
    assert found[-1].state == "missing"
    assert "openai_compatible" in found[-1].fix


def test_an_answer_that_does_not_stream_is_a_note() -> None:
    with playing(replace(one_document("anthropic", Turn(text="ok")), times=None)) as server:
        (found,) = check("anthropic", server.base_url("anthropic"))
    assert found.state == "note"


# Wrong addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name != "gemini_ai_studio"])
@pytest.mark.parametrize("path", ["", "/v1/v1"])
def test_a_wrong_path_is_told_with_the_one_that_was_meant(protocol: Any, path: str) -> None:
    with playing(keys=(KEY,), prefix="/v1/") as server:
        found = check(protocol, server.url + path)
        right = server.base_url(protocol)
    assert found[-1].state == "missing"
    assert found[-1].fix == f"base_url = {right!r}"


@pytest.mark.parametrize(
    ("protocol", "given", "state"),
    [
        ("openai_compatible", "https://a.example", "note"),
        ("openai_compatible", "https://a.example/v1/v1", "missing"),
        ("openai_compatible", "https://a.example/v1/chat/completions", "note"),
        ("openai_responses", "https://a.example/v1/chat/completions", "missing"),
        ("gemini_ai_studio", "https://a.example/v1beta/openai", "missing"),
        ("gemini_ai_studio", "https://a.example/v1", "note"),
        ("anthropic", "a.example/v1", "missing"),
        ("anthropic", "https://a.example/proxy/v1/", None),
    ],
)
def test_what_is_typed_wrong_is_seen_without_a_request(protocol: str, given: str, state: str | None) -> None:
    found = baseurl.path_doubts(protocol, given)
    assert [one.state for one in found[:1]] == ([state] if state else [])
    version = "/v1beta" if protocol == "gemini_ai_studio" else "/v1"
    assert all(f"base_url = 'https://a.example{version}'" in one.fix for one in found[:1])


def test_a_web_page_is_told_as_one() -> None:
    protocol: Any = "anthropic"
    page = b"<!doctype html><title>Sign in to\nthe proxy</title>"
    for status in (200, 404, 503):
        with playing(turn(status=status, headers={"content-type": "text/html"}, raw=page)) as server:
            found = check(protocol, server.base_url(protocol))
        assert found[-1].state == "missing"
        assert "HTTPS_PROXY" in found[-1].fix


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_redirect_is_not_followed_and_its_target_is_named(protocol: Any) -> None:
    end = PROTOCOLS[protocol].path or "/models/m:streamGenerateContent"
    target = f"https://b.example/v1{end}?key={OTHER}"
    with playing(turn(status=308, headers={"location": target}, raw=b"")) as server:
        found = check(protocol, server.base_url(protocol))
    assert found[-1].state == "missing"
    assert found[-1].fix == "base_url = 'https://b.example/v1'"


# Keys -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_refused_and_a_missing_key_are_told_by_their_variable(protocol: Any) -> None:
    with playing(keys=(OTHER,)) as server:
        found = check(protocol, server.base_url(protocol))
        missing = check(protocol, server.base_url(protocol), key=None)
    assert (found[-1].state, missing[-1].state) == ("missing", "missing")
    assert "MY_KEY" in found[-1].fix
    assert "key_env" in missing[-1].fix


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


# Services in trouble --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        ({"status": 429, "headers": {"retry-after": "7"}}, "note"),
        ({"status": 529}, "missing"),
        ({"status": 400, "message": "no such field"}, "note"),
        ({"status": 404, "message": "The model `m` does not exist"}, "note"),
    ],
)
def test_a_service_that_was_reached_is_not_blamed_on_the_address(fault: dict[str, Any], state: str) -> None:
    with playing(turn(**fault)) as server:
        found = check("anthropic", server.base_url("anthropic"), model="m")
    assert found[-1].state == state, found
    assert "base_url" not in found[-1].fix


def test_a_port_that_nobody_listens_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = check("anthropic", f"http://127.0.0.1:{port}/v1")
    assert found[-1].state == "missing"


def test_a_service_that_says_nothing_is_given_up() -> None:
    async def run(base_url: str) -> list[Check]:
        return await probe.probe(Endpoint(protocol="anthropic", base_url=base_url, timeout_s=0.2), "m")

    with playing(turn(first_byte_ms=1000)) as server:
        found = anyio.run(run, server.base_url("anthropic"))
    assert found[-1].state == "missing"


# The command ----------------------------------------------------------------------------------------------------------

Doctor = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def doctor(tmp_path: Path, backplane_home: Path) -> Doctor:
    def call(*words: str, config: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        if config is not None:
            (tmp_path / "backplane.toml").write_text(config)
        environ = {**os.environ, "BACKPLANE_HOME": str(backplane_home), **env}
        return in_process("doctor", *words, cwd=tmp_path, env=environ)

    return call


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
        assert any(one["name"] == "service here" for one in found)
        assert KEY not in done.stdout + done.stderr
