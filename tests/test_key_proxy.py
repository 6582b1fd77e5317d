"""The proxy that knows a key which its agent does not."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import anyio.abc
import httpx
import pytest

import backplane
from backplane.agents import rows
from backplane.config import BackendSettings, Isolation, ServerSettings, Settings
from backplane.contract.receipt import Usage
from backplane.contract.work import PolicyProfile, RuntimeConfig
from backplane.errors import BackendError, ConfigError
from backplane.gateway.key_proxy import PATHS_MAX, KeyProxy, KeyUse, leads_up, open_key_proxy, placeholder_for
from backplane.runtime import backends
from backplane.testing import Call, Failure, Fault, ModelServer, ProtocolName, ScriptUsage, Turn
from tests.runs import order
from tests.test_runs import cli

KEY = "sk-ant-api03-the-key-itself"
ASK = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
WAIT_S = 10

# A stream that is left before its end leaves httpx's generators to trio, which says so.
pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")]


async def ask(proxy: KeyProxy, stream: bool = False, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=proxy.address) as client:
        given = {"headers": {"x-api-key": proxy.placeholder}, "json": {**ASK, "stream": stream}, **more}
        return await client.post("/v1/messages", **given)


Serve = Callable[[anyio.abc.SocketStream], Awaitable[None]]


@asynccontextmanager
async def service(serve: Serve) -> AsyncIterator[str]:
    """A server of this test's own, for what goes wrong below HTTP; its address."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)

    async def attend(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await serve(stream)

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, attend)
        with anyio.fail_after(WAIT_S):
            yield f"http://127.0.0.1:{port}"
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def raw(proxy: KeyProxy) -> AsyncIterator[anyio.abc.SocketStream]:
    async with await anyio.connect_tcp(proxy.host, proxy.port) as stream:
        yield stream


def head(proxy: KeyProxy, what: str, *headers: str) -> bytes:
    lines = (f"{what} HTTP/1.1", "Host: x", f"X-Api-Key: {proxy.placeholder}", *headers, "", "")
    return "\r\n".join(lines).encode()


async def until(stream: anyio.abc.SocketStream, words: bytes) -> bytes:
    data = b""
    while words not in data:
        data += await stream.receive()
    return data


# What goes through ----------------------------------------------------------------------------------------------------


async def test_the_key_is_put_in_where_the_placeholder_stands_and_nowhere_else() -> None:
    use = KeyUse()
    with ModelServer([Turn(text="one"), Turn(text="two")]) as server:
        async with open_key_proxy(f"{server.url}/v1", KEY, use) as proxy:
            assert KEY not in proxy.placeholder
            assert (await ask(proxy)).json()["content"][0]["text"] == "one"
            bearer = await ask(proxy, headers={"authorization": f"Bearer {proxy.placeholder}"})
            assert bearer.status_code == 200
            async with httpx.AsyncClient(base_url=proxy.address) as client:
                await client.get("/v1/models", headers={"x-api-key": proxy.placeholder, "authorization": "another's"})
    first, second, third = server.requests
    assert first.headers["x-api-key"] == KEY
    assert second.headers["authorization"] == f"Bearer {KEY}"
    assert (third.headers["x-api-key"], third.headers.get("authorization")) == (KEY, None)
    assert first.headers["host"] == server.url.removeprefix("http://")
    assert proxy.placeholder not in str([(request.headers, request.query) for request in server.requests])
    assert use.to_wire() == {
        "with_key": 3,
        "without_key": 0,
        "unanswered": 0,
        "paths": {"POST /v1/messages": 2, "GET /v1/models": 1},
        "answers": {"counted": 2, "uncounted": 0, "models": {"m": 2}},
    }


async def test_the_key_is_put_in_only_where_a_service_looks_for_one() -> None:
    use = KeyUse()
    with ModelServer([]) as server:
        async with open_key_proxy(server.url, KEY, use) as proxy, httpx.AsyncClient(base_url=proxy.address) as client:
            given = proxy.placeholder
            # A service may say each of these in its answer.
            for name, value in {
                "origin": given,
                "access-control-request-headers": given,
                "x-request-id": given,
                "idempotency-key": given,
                "authorization": f"Bearer {given}x",
                "x-api-key": f"{given} {given}",
            }.items():
                assert (await client.get("/v1/models", headers={name: value})).status_code == 401
                await client.get(f"/{given}?key={given}", headers={"api-key": given, name: value})
    assert all(str((asked.path, asked.headers, asked.query)).count(KEY) == 1 for asked in server.requests)
    assert (use.with_key, use.without_key, len(server.requests)) == (6, 6, 6)


async def test_a_request_with_another_key_is_refused() -> None:
    """With one that it brought, a command would send what it sees to an account of somebody else's."""
    with ModelServer([]) as server:
        async with open_key_proxy(server.url, KEY, KeyUse()) as proxy:
            answer = await ask(proxy, headers={"x-api-key": "another's"})
    assert answer.status_code == 401
    assert server.requests == ()


async def test_a_query_has_the_key_where_the_service_takes_it_there_and_a_redirect_does_not_tell_it() -> None:
    key = "AIza+&the-key"
    with ModelServer([Turn(fault=Fault(status=302, headers={"location": f"/{quote(key)}?key={key}"}))]) as server:
        async with open_key_proxy(server.url, key, KeyUse(), key_in_query=True) as proxy:
            answer = await ask(proxy, headers={}, params={"key": proxy.placeholder, "alt": "sse"})
    assert server.requests[0].query == {"key": key, "alt": "sse"}
    assert answer.headers["location"] == f"/{proxy.placeholder}?key={proxy.placeholder}"


async def test_a_request_whose_answer_would_be_itself_is_refused() -> None:
    with ModelServer([]) as server:
        async with open_key_proxy(server.url, KEY, KeyUse()) as proxy, httpx.AsyncClient() as client:
            answer = await client.request("TRACE", proxy.address, headers={"x-api-key": proxy.placeholder})
    assert answer.status_code == 405
    assert server.requests == ()


async def test_a_stream_comes_through_piece_by_piece() -> None:
    with ModelServer([Turn(text="first second", fault=Fault(stall_after_frames=4))]) as server:
        async with open_key_proxy(server.url, KEY, KeyUse()) as proxy, httpx.AsyncClient(timeout=WAIT_S) as client:
            given: Any = {"headers": {"x-api-key": proxy.placeholder}, "json": {**ASK, "stream": True}}
            async with client.stream("POST", f"{proxy.address}/v1/messages", **given) as answer:
                seen = ""
                async for piece in answer.aiter_text():  # The server never ends it.
                    seen += piece
                    if "content_block_delta" in seen:
                        break


async def test_a_stream_that_breaks_off_breaks_off_here_too() -> None:
    use = KeyUse()
    with ModelServer([Turn(text="an answer that is cut", fault=Fault(cut_after_bytes=400))]) as server:
        async with open_key_proxy(server.url, KEY, use) as proxy:
            with pytest.raises(httpx.RemoteProtocolError):
                await ask(proxy, stream=True)
    assert use.unanswered == 1


@pytest.mark.parametrize("says", [b"", b"connection: close\r\n"], ids=["kept", "closed"])
async def test_a_connection_that_the_service_closes_is_closed_here(says: bytes) -> None:
    async def serve(stream: anyio.abc.SocketStream) -> None:
        await until(stream, b"{}")
        await stream.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n" + says + b"\r\n2\r\n{}\r\n0\r\n\r\n")

    async with service(serve) as url, open_key_proxy(url, KEY, KeyUse()) as proxy:
        answer = await ask(proxy, content=b"{}", json=None)
    assert answer.headers.get("connection") == ("close" if says else None)


async def test_a_request_ends_with_its_client() -> None:
    came, left = anyio.Event(), anyio.Event()

    async def serve(stream: anyio.abc.SocketStream) -> None:
        await until(stream, b"hello")
        came.set()
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            await stream.receive()
        left.set()

    async with service(serve) as url, open_key_proxy(url, KEY, KeyUse()) as proxy:
        async with raw(proxy) as stream:
            # Another request waits behind the first one.
            await stream.send(head(proxy, "POST /", "Content-Length: 5") + b"hello" + head(proxy, "GET /"))
            await came.wait()
        await left.wait()


async def test_nothing_is_asked_once_a_budget_is_used_up() -> None:
    use = KeyUse()
    with ModelServer([Turn(text="one"), Turn(text="two")]) as server:
        async with open_key_proxy(server.url, KEY, use) as proxy:
            use.on_answer = lambda use: setattr(use, "over", f"{use.meter.spent.output} tokens are enough")
            first, second = await ask(proxy), await ask(proxy)
    assert (first.status_code, second.status_code, len(server.requests)) == (200, 403, 1)
    assert "tokens are enough" in second.text


@pytest.mark.parametrize("status", [401, 429, 529, 302])
async def test_an_answer_is_passed_on_as_it_is(status: int) -> None:
    fault = Fault(status=status, headers={"retry-after": "7", "location": "/elsewhere"}, message="as it was")
    with ModelServer([Turn(fault=fault)]) as server:
        async with open_key_proxy(server.url, KEY, KeyUse()) as proxy:
            answer = await ask(proxy)
    assert (answer.status_code, answer.headers["retry-after"], len(server.requests)) == (status, "7", 1)


async def test_bodies_of_any_length_go_on_in_either_framing() -> None:
    picture = "x" * 3_000_000

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "'
        yield picture.encode()
        yield b'"}]}'

    with ModelServer([Turn(text="one"), Turn(text="two")]) as server:
        async with open_key_proxy(server.url, KEY, KeyUse()) as proxy:
            asked = {**ASK, "messages": [{"role": "user", "content": picture}]}
            await ask(proxy, json=asked)
            await ask(proxy, json=None, content=pieces())
    sizes = [len(request.body["messages"][0]["content"]) for request in server.requests]
    assert sizes == [len(picture)] * 2


# What is counted ------------------------------------------------------------------------------------------------------

ASKS: dict[ProtocolName, tuple[str, dict[str, Any]]] = {
    "anthropic": ("/messages", ASK),
    "openai_responses": ("/responses", {"model": "m", "input": "hello"}),
    "openai_compatible": (
        "/chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream_options": {"include_usage": True}},
    ),
    "gemini_ai_studio": ("/models/m:generateContent", {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}),
}
COUNTED = ScriptUsage(input=100, output=10, cache_read=40)


async def counted(protocol: ProtocolName, turns: list[Turn], *, stream: bool) -> KeyUse:
    """Ask a scripted service as often as there are turns."""
    path, body = ASKS[protocol]
    if protocol == "gemini_ai_studio":
        path = path.replace(":g", ":streamG") + "?alt=sse" if stream else path
    elif stream:
        body = {**body, "stream": True}
    use = KeyUse()
    with ModelServer(turns) as server:
        async with open_key_proxy(server.base_url(protocol), KEY, use) as proxy, httpx.AsyncClient() as client:
            base = server.base_url(protocol).replace(server.url, proxy.address)
            for _ in turns:
                with suppress(httpx.RemoteProtocolError):
                    await client.post(f"{base}{path}", headers={"x-api-key": proxy.placeholder}, json=body)
    assert all(request.asks == "generate" for request in server.requests)
    return use


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("protocol", ASKS)
async def test_tokens_are_what_the_service_says_of_every_answer(protocol: ProtocolName, stream: bool) -> None:
    failed = Turn(fault=Fault(status=500))  # No answer: it says no tokens, and costs none.
    use = await counted(
        protocol, [Turn(text="one", usage=COUNTED), failed, Turn(text="2", usage=COUNTED)], stream=stream
    )
    usage = use.meter.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.cache_read_tokens) == (200, 20, 80)
    assert use.to_wire()["answers"] == {"counted": 2, "uncounted": 0, "models": {"m": 2}}


@pytest.mark.parametrize(
    "fault",
    [
        Fault(cut_after_bytes=300),
        Fault(raw=b"no answer at all"),
        Fault(raw=b'data: {"type": "message_start", "message": []}\n\n', headers={"content-type": "text/event-stream"}),
        Fault(raw=gzip.compress(b"{}"), headers={"content-encoding": "gzip"}),
        Fault(failure=Failure(code="overloaded_error", message="too many at once")),
    ],
    ids=["cut", "noise", "odd", "packed", "failed"],
)
async def test_an_answer_that_cannot_be_counted_leaves_the_sum_unknown(fault: Fault) -> None:
    use = await counted("anthropic", [Turn(text="one", usage=COUNTED), Turn(text="x" * 400, fault=fault)], stream=True)
    assert use.meter.usage == Usage()
    assert (use.meter.spent.requests, use.meter.uncounted) == (1, 1)
    most = use.meter.tokens_most
    assert most is not None
    assert 110 + 9 < most < 3_000, "the longest answer that its request allows"


# What goes wrong ------------------------------------------------------------------------------------------------------


async def test_an_error_of_the_proxy_itself_is_in_the_record_and_ends_no_other_connection() -> None:
    use = KeyUse()

    def broken(_: KeyUse) -> None:
        raise RuntimeError(f"a bug, beside {KEY}")

    with ModelServer([Turn(text="one", times=None)]) as server:
        async with open_key_proxy(f"{server.url}/v1", KEY, use) as proxy:
            use.on_answer = broken
            await ask(proxy)
            use.on_answer = None
            assert (await ask(proxy)).status_code == 200
    found = use.to_wire()
    assert (found["failed"], found["failure"]) == (1, "RuntimeError: a bug, beside [key]")


async def test_a_service_that_is_not_there_is_told() -> None:
    use = KeyUse()
    async with open_key_proxy("http://127.0.0.1:9/v1", KEY, use) as proxy:
        answer = await ask(proxy, content=b"x" * 3_000_000, json=None)
    assert answer.status_code == 502
    assert answer.json()["error"]["message"].startswith("the service at 127.0.0.1:9 does not answer: ")
    assert use.unanswered == 1


@pytest.mark.parametrize(
    "asked",
    [
        b"GET http://elsewhere.example/v1/models HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n",
        b"CONNECT elsewhere.example:443 HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n",
        b"GET nonsense HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1x/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET //elsewhere.example/v1 HTTP/1.1\r\nHost: x\r\n\r\n",
        *(
            b"GET /v1/" + step + b"/key HTTP/1.1\r\nHost: x\r\n\r\n"
            for step in (
                b"..",
                b"%2e%2E",
                b"..%2fkey",
                b"..;a=b",
                b"..%5c..",
                b"%25252e.",
                b"%2e%2e%3b",
                b"%c0%ae%c0%ae",
            )
        ),
        b"GET /v1/a#b HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /" + b"x" * 66_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_it_is_a_proxy_for_one_service(asked: bytes) -> None:
    with ModelServer([]) as server:
        async with open_key_proxy(f"{server.url}/v1", KEY, KeyUse()) as proxy, raw(proxy) as stream:
            await stream.send(asked.replace(b"\r\n", f"\r\nX-Api-Key: {proxy.placeholder}\r\n".encode(), 1))
            assert (await until(stream, b"}")).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 403 "))
    assert server.requests == ()


@pytest.mark.parametrize("asked", [b"\0\0\0\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/1.1\r\nA: " + b"x" * 100_000])
async def test_what_is_no_request_ends_its_connection_alone(asked: bytes) -> None:
    with ModelServer([Turn(text="one")]) as server:
        async with open_key_proxy(server.url, KEY, KeyUse()) as proxy:
            async with raw(proxy) as stream:
                await stream.send(asked)
                with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                    await until(stream, b"what nobody says")
            assert (await ask(proxy)).status_code == 200


async def test_the_record_of_paths_has_a_bound() -> None:
    use = KeyUse()
    with ModelServer([]) as server:
        async with open_key_proxy(server.url, KEY, use) as proxy, httpx.AsyncClient(base_url=proxy.address) as client:
            for number in range(PATHS_MAX + 3):
                await client.get(f"/{number}/{'x' * 300}")
    assert len(use.paths) == PATHS_MAX + 1
    assert use.paths["other"] == 3
    assert max(map(len, use.paths)) < 210


@pytest.mark.parametrize(
    ("key", "begins"),
    [("sk-ant-api03-x", "sk-ant-api03-"), ("sk-proj-x", "sk-proj-"), ("AIzaSy", "AIza"), ("mine", "")],
)
def test_a_placeholder_looks_like_its_key_and_says_nothing_of_it(key: str, begins: str) -> None:
    made, other = placeholder_for(key), placeholder_for(key)
    assert made != other
    assert made.startswith(begins)
    assert len(made) == len(begins) + 48


# Backends -------------------------------------------------------------------------------------------------------------


OWN = {"preset": "openai"}


def find(declared: BackendSettings, **environ: str) -> backends.ProcessBackend:
    return backends.find("mine", Settings(backends={"mine": declared}), environ)


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        (BackendSettings(host="shell", key_proxy=True), "nobody knows which key"),
        (BackendSettings(host="opencode", key_proxy=True), "nothing says which variable has the key"),
        (BackendSettings(host="claude", key_proxy=True, options={"own_state": True}), "a login of its own"),
        (BackendSettings(host="claude", key_proxy=True, remote=True), "another machine"),
        (
            BackendSettings(host="api", key_proxy=True, options={**OWN, "headers": {"x": "$OTHER"}}),
            "its headers carry keys",
        ),
        (BackendSettings(host="claude", key_proxy=True, options={"base_url": "https://u:p@x.example"}), "no plain"),
        (
            BackendSettings(host="opencode", key_proxy=True, options={"key_env": "K", "base_url": "https://x.example"}),
            "nothing tells the agent where to ask",
        ),
    ],
)
def test_a_proxy_that_would_have_no_effect_is_refused_when_it_is_configured(
    declared: BackendSettings, why: str
) -> None:
    environ = {"OPENAI_API_KEY": "k", "OTHER": "o", "ANTHROPIC_API_KEY": "k"}
    with pytest.raises(ConfigError, match=why) as error:
        find(declared, **environ)
    assert error.value.code == "config_invalid"
    ((name, told),) = backends.option_faults(Settings(backends={"mine": declared}))
    assert name == "mine"
    assert why in told


@pytest.mark.parametrize(
    ("declared", "held"),
    [
        (BackendSettings(host="claude"), "ANTHROPIC_API_KEY"),
        (BackendSettings(host="api", options={"preset": "openai"}), "OPENAI_API_KEY"),
        (BackendSettings(host="api", options={"preset": "ollama"}), None),
        (BackendSettings(host="shell"), None),
        (BackendSettings(host="opencode", key_proxy=False), None),
    ],
    ids=["claude", "api", "no key", "no model", "not this one"],
)
def test_all_backends_that_ask_a_model_are_behind_a_proxy_where_the_configuration_says_so(
    declared: BackendSettings, held: str | None
) -> None:
    environ = {"OPENAI_API_KEY": KEY, "ANTHROPIC_API_KEY": KEY}
    found = backends.find("mine", Settings(backends={"mine": declared}, key_proxy=True), environ)
    assert (found.held_key and found.held_key.variable) == held
    assert backends.find("claude", Settings(key_proxy=True), environ).held_key is not None
    with pytest.raises(ConfigError, match="nothing says which variable") as error:
        backends.find("opencode", Settings(key_proxy=True), environ)
    assert "key_proxy = false" in str(error.value.hint)


@pytest.mark.parametrize("environ", [{}, {"ANTHROPIC_API_KEY": " \n"}], ids=["none", "blank"])
def test_a_proxy_needs_a_key(environ: dict[str, str]) -> None:
    with pytest.raises(BackendError, match="ANTHROPIC_API_KEY is not set") as error:
        find(BackendSettings(host="claude", key_proxy=True), **environ)
    assert error.value.code == "backend_unavailable"


@pytest.mark.parametrize("key", [f"{KEY}\n{KEY}", f"{KEY} # mine", "schlüssel-des-nutzers"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_told(key: str) -> None:
    with pytest.raises(ConfigError, match="a character that no header can carry") as error:
        find(BackendSettings(host="claude", key_proxy=True), ANTHROPIC_API_KEY=key)
    assert key not in f"{error.value.message} {error.value.hint}"


@pytest.mark.parametrize(
    "server",
    [
        ServerSettings(command=("/bin/cat",), env={"K": "$ANTHROPIC_API_KEY"}),
        ServerSettings(url="https://x.example", headers={"authorization": f"Bearer {KEY}"}),
    ],
    ids=["env", "headers"],
)
def test_a_server_of_the_agent_that_is_given_its_key_is_refused(server: ServerSettings) -> None:
    settings = Settings(backends={"mine": BackendSettings(host="claude", key_proxy=True)}, mcp_servers={"docs": server})
    with pytest.raises(ConfigError, match=r"\[mcp_servers\] docs is given the key"):
        backends.find("mine", settings, {"ANTHROPIC_API_KEY": KEY})


@pytest.mark.parametrize(
    ("given", "listed"),
    [({}, "h"), ({"NO_PROXY": "a,b"}, "a,b,h"), ({"no_proxy": "a"}, "a,h")],
)
def test_a_host_is_added_to_what_is_asked_past_proxies_in_both_spellings(given: dict[str, str], listed: str) -> None:
    assert rows.past_proxies(given, "h") == {"NO_PROXY": listed, "no_proxy": listed}


def test_behind_a_proxy_the_service_itself_is_out_of_reach() -> None:
    found = find(BackendSettings(host="claude", key_proxy=True), ANTHROPIC_API_KEY=KEY)
    assert found.endpoints == ()
    assert found.secrets == (KEY,)
    assert find(BackendSettings(host="claude"), ANTHROPIC_API_KEY=KEY).endpoints == ("api.anthropic.com:443",)


@pytest.mark.parametrize(
    "declared",
    [
        BackendSettings(host="acp", options={"program": "mine", "arguments": ["--url", "{base_url}"]}),
        BackendSettings(host="opencode", env={"OPENCODE_CONFIG_CONTENT": '{"a": "{base_url}"}'}),
    ],
    ids=["options", "env"],
)
def test_an_address_without_a_name_for_it_is_refused(declared: BackendSettings) -> None:
    with pytest.raises(ConfigError, match=r"say \{base_url\}, and there is no base_url"):
        find(declared)


# Runs -----------------------------------------------------------------------------------------------------------------

LOOKS = "cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep -ac 'the-key-itsel[f]'; test $A_WORD = given && echo equal"


def settings_for(server: ModelServer, isolation: Isolation = "best_effort") -> Settings:
    options = {"protocol": "anthropic", "base_url": f"{server.url}/v1", "key_env": "A_KEY", "model": "m"}
    env = {"A_KEY": f"{KEY}\n", "AS_JSON": json.dumps({"key": KEY})}
    declared = BackendSettings(host="api", options=options, env=env, key_proxy=True)
    return Settings(backends={"mine": declared}, isolation=isolation)


async def play(server: ModelServer, root: Path, **more: Any) -> Any:
    env = {"A_WORD": "given", **more.pop("env", {})}
    settings = settings_for(server, more.pop("isolation", "best_effort"))
    work = order(root, task="look", mode="pass_through", config=RuntimeConfig(env=env), **more)
    async with backplane.start(work, backend="mine", settings=settings) as run:
        async for _ in run:
            pass
    return run.receipt


@pytest.mark.needs("bwrap")
@pytest.mark.parametrize("policy", [PolicyProfile(), PolicyProfile(deny_network=("*",))], ids=["open", "no network"])
async def test_a_run_asks_with_a_key_that_it_does_not_have(tmp_path: Path, policy: PolicyProfile) -> None:
    turns = [Turn(calls=(Call(name="bash", input={"command": LOOKS}),)), Turn(text="done")]
    with ModelServer(turns) as server:
        receipt = await play(server, tmp_path, policy=policy)
    assert receipt.outcome == "complete"
    assert [request.headers["x-api-key"] for request in server.requests] == [KEY, KEY]
    said = json.dumps(server.requests[-1].body["messages"][-1])
    assert "0\\nequal" in said
    added = receipt.usage_raw["backplane"]
    assert added["key_proxy"] == {
        "state": "enforced",
        "with_key": 2,
        "without_key": 0,
        "unanswered": 0,
        "paths": {"POST /v1/messages": 2},
        "answers": {"counted": 2, "uncounted": 0, "models": {"m": 2}},
    }
    assert ("network" in added) == bool(policy.deny_network)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_warm_host_asks_for_its_own_run(tmp_path: Path) -> None:
    with ModelServer([Turn(text="done", times=None)]) as server:
        async with backplane.ControlPlane(settings_for(server)) as plane:
            receipts = []
            for _ in range(3):
                async with plane.start(order(tmp_path, task="look"), backend="mine") as run:
                    async for _ in run:
                        pass
                receipts.append(run.receipt.usage_raw["backplane"])
    assert [added.get("start") for added in receipts] == ["cold", "cold", "warm"]
    assert [added["key_proxy"]["with_key"] for added in receipts] == [1, 1, 1]


@pytest.mark.needs("bwrap")
def test_the_report_says_what_kept_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ModelServer([Turn(text="done")]) as server:
        service = f'protocol = "anthropic", base_url = "{server.url}/v1", key_env = "A_KEY", model = "m"'
        body = f'key_proxy = true\n[backends.mine]\nhost = "api"\noptions = {{ {service} }}\n'
        (tmp_path / "backplane.toml").write_text(body)
        assert cli("run", "--backend", "mine", "look", A_KEY=KEY).returncode == 0
    assert server.requests[0].headers["x-api-key"] == KEY
    assert "model&#x27;s key" in cli("report", "last").stdout
    shown = cli("receipts", "show", "last", "--json").stdout
    assert KEY not in shown


async def test_without_isolation_the_receipt_claims_nothing(tmp_path: Path) -> None:
    with ModelServer([Turn(text="done")]) as server:
        receipt = await play(server, tmp_path, isolation="off")
    assert receipt.usage_raw["backplane"]["key_proxy"]["state"] == "none"


async def test_an_order_that_names_the_key_is_refused(tmp_path: Path) -> None:
    with ModelServer([Turn(text="done")]) as server:
        receipt = await play(server, tmp_path, env={"A_KEY": "the order's own"})
    assert receipt.usage_raw["backplane"]["error"]["code"] == "config_invalid"
    assert "key_proxy = false" in receipt.usage_raw["backplane"]["error"]["hint"]
    assert server.requests == ()
    assert os.environ.get("A_KEY") is None


@pytest.mark.parametrize(
    "path", [b"/v1/models", b"/v1/a..b/...", b"/v1/m%C3%A9;x=1", b"/v1/models/gpt%2F5:run", b"/v1/a%20b", b"/v1/a;b..c"]
)
def test_a_path_of_its_service_leads_nowhere_up(path: bytes) -> None:
    assert not leads_up(path)
