"""The way to a service: addresses, kept connections, closed sockets, broken servers, and what is not loaded."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import anyio
import msgspec
import pytest

from backplane.contract.events import AssistantDelta
from backplane.errors import ConfigError
from backplane.testing import PROTOCOLS, Fault, ModelServer, Script, Turn
from backplane.upstream.client import Upstream
from backplane.upstream.completion import ModelClient
from backplane.upstream.endpoint import PROTOCOLS as TABLE
from backplane.upstream.endpoint import Endpoint, address
from backplane.upstream.failure import UpstreamError
from backplane.upstream.ladder import LADDERS
from tests.upstream.talk import BOUND_S, KEY, conversation, endpoint, talk


def at(base_url: str, protocol: Any = "openai_compatible", *, stream: bool = True, **more: Any) -> str:
    return address(Endpoint(protocol=protocol, base_url=base_url, api_key="k", **more), "m", stream=stream)


@pytest.mark.parametrize(("base_url", "protocol", "expected"), [
    ("https://x/v1", "openai_compatible", "https://x/v1/chat/completions"),
    ("https://x/v1/", "openai_responses", "https://x/v1/responses"),
    ("https://x/v1/messages", "anthropic", "https://x/v1/messages"),
    ("https://x/openai?api-version=1", "openai_compatible", "https://x/openai/chat/completions?api-version=1"),
    ("https://x", "gemini_ai_studio", "https://x/v1beta/models/m:streamGenerateContent?alt=sse"),
    ("https://x/v1beta", "gemini_ai_studio", "https://x/v1beta/models/m:streamGenerateContent?alt=sse"),
    ("https://x/gw/v1alpha/", "gemini_ai_studio", "https://x/gw/v1alpha/models/m:streamGenerateContent?alt=sse"),
])  # fmt: skip
def test_a_base_and_a_protocol_make_an_address(base_url: str, protocol: str, expected: str) -> None:
    assert at(base_url, protocol) == expected


def test_a_model_with_a_folder_keeps_it_and_cannot_leave_the_path() -> None:
    one = Endpoint(protocol="gemini_ai_studio", base_url="https://x")
    assert "/v1beta/tunedModels/mine:generate" in address(one, "tunedModels/mine", stream=False)
    assert "?" not in address(one, "a?b#c", stream=False)


@pytest.mark.parametrize("base_url", ["x.example/v1", "ftp://x/v1", "", "https:///v1", "file:///etc/passwd"])
def test_a_base_that_is_no_http_address_is_refused_at_once(base_url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Endpoint(protocol="anthropic", base_url=base_url)
    assert caught.value.code == "config_invalid"


def test_an_unknown_protocol_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        Endpoint(protocol="telex", base_url="https://x")  # type: ignore[arg-type]  # told at run time, too
    assert "anthropic" in str(caught.value.hint)


def test_every_protocol_that_can_be_named_can_be_spoken_and_has_a_ladder() -> None:
    assert set(PROTOCOLS) == set(TABLE) == set(LADDERS)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_connections_are_used_again(protocol: str) -> None:
    asked = conversation(protocol)
    done = talk(protocol, [Turn(text=str(number)) for number in range(4)], *[asked] * 4)
    assert [turn.text for turn in done.turns] == ["0", "1", "2", "3"]
    assert {request.connection for request in done.requests} == {1}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_cancelling_closes_the_socket(protocol: str) -> None:
    script = [Turn(text="word " * 40, pieces=40, fault=Fault(stall_after_frames=8))]

    async def ask(server: ModelServer) -> None:
        async with Upstream(endpoint(server, protocol)) as up:
            with anyio.CancelScope() as scope:

                async def hear(event: object) -> None:
                    if isinstance(event, AssistantDelta):
                        scope.cancel()

                await ModelClient(up).ask(conversation(protocol), hear, lambda: "2026-11-22T00:00:00Z")
            assert scope.cancelled_caught
            ended = await anyio.to_thread.run_sync(server.wait_end, 1)
            assert ended == "left"

    with ModelServer(script) as server:
        anyio.run(bounded, ask, server)


async def bounded(work: Any, *arguments: Any) -> None:
    with anyio.fail_after(BOUND_S):
        await work(*arguments)


def test_a_server_that_is_not_there_is_named_without_its_secrets() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://user:pw@127.0.0.1:{port}/v1?key=SECRET"

    async def ask() -> None:
        one = Endpoint(protocol="anthropic", base_url=url, api_key=KEY)
        async with Upstream(one) as up, up.stream({"model": "m"}, stream=False):
            pass

    with pytest.raises(UpstreamError) as caught:
        anyio.run(bounded, ask)
    assert (caught.value.code, caught.value.failure.may_pass) == ("backend_unavailable", True)
    said = f"{caught.value} {caught.value.hint} {caught.value.__cause__!r}"
    assert "SECRET" not in said
    assert "pw" not in said
    assert f"127.0.0.1:{port}" in said


@pytest.mark.parametrize("key", ["sk-very-secret\nsecond line", "sk-very-secrét"])
def test_a_key_that_cannot_be_sent_is_a_setting_that_is_wrong_and_is_not_shown(key: str) -> None:
    done = talk("openai_compatible", [Turn(text="ok")], api_key=key)
    assert done.failed.code == "config_invalid"
    assert "secr" not in str(done.failed)


def test_a_key_from_a_file_loses_its_newline() -> None:
    done = talk("openai_compatible", [Turn(text="ok")], api_key=f"{KEY}\n")
    assert done.requests[0].headers["authorization"] == f"Bearer {KEY}"


def test_a_redirect_is_not_followed_with_the_key_and_says_where_it_went() -> None:
    fault = Fault(status=302, headers={"location": "https://elsewhere.example/login?next=SECRET"})
    done = talk("openai_compatible", [Turn(fault=fault)])
    assert (done.failed.code, done.failed.facts.exit_code) == ("backend_model_not_found", 1)
    assert "base_url" in (done.failed.hint or "")
    assert "https://elsewhere.example/login" in done.failed.message
    assert "SECRET" not in done.failed.message


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_wrong_path_is_told_from_a_model_that_is_not_there(protocol: str) -> None:
    async def ask(server: ModelServer) -> None:
        one = msgspec.structs.replace(endpoint(server, protocol), base_url=f"{server.url}/nowhere/v1")
        async with Upstream(one) as up, up.stream({"model": "m"}, stream=False):
            pass

    with ModelServer(Script(turns=(Turn(text="ok"),), prefix="/v1")) as server, pytest.raises(UpstreamError) as caught:
        anyio.run(bounded, ask, server)
    assert caught.value.failure.status == 404
    assert caught.value.code == "backend_model_not_found"


def test_leaving_a_stream_early_closes_it() -> None:
    async def ask(server: ModelServer) -> None:
        async with Upstream(endpoint(server, "openai_compatible")) as up:
            request = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            async with up.stream(request) as reply:
                async for _ in reply:
                    break
            assert await anyio.to_thread.run_sync(server.wait_end, 1) == "left"

    with ModelServer([Turn(text="a b c d", fault=Fault(stall_after_frames=2))]) as server:
        anyio.run(bounded, ask, server)


def test_only_who_speaks_with_models_loads_the_http_library() -> None:
    code = ("import sys, backplane, backplane.cli, backplane.host, backplane.upstream, backplane.routing.driver\n"
            "sys.exit('httpx' in sys.modules)")  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
