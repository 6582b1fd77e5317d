"""A request that one of our own proxies refuses is `policy_denied`, with the rule's words, and is not tried again."""

from __future__ import annotations

import functools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from backplane.contract.work import PolicyProfile
from backplane.errors import DENIAL
from backplane.gateway.key_proxy import KeyUse, open_key_proxy
from backplane.policy.rules import compile_policy
from backplane.process.aio import beside
from backplane.sandbox import proxy
from backplane.sandbox.network import variables
from backplane.sandbox.proxy import ConnectionRules, Connections
from backplane.testing import ModelServer, Turn
from backplane.upstream.client import Upstream
from backplane.upstream.completion import ModelClient
from backplane.upstream.endpoint import Endpoint
from backplane.upstream.failure import UpstreamError
from tests.all.doors.test_contain import control, found
from tests.api_agent import api
from tests.runs import ended, go, order
from tests.upstream.talk import BOUND_S, KEY, conversation

pytestmark = pytest.mark.anyio
__all__ = ["found"]

RULES = [
    ({"deny_network": ("model.example",)}, "connecting to 'model.example:443' is forbidden by 'model.example'"),
    ({"deny_network": ("*.example",)}, "forbidden by '*.example'"),
    ({"allow_network": ("other.example",)}, "allow"),
    ({"deny_network": ("môdel.*", "**")}, "forbidden by '**'"),
]


@asynccontextmanager
async def behind(monkeypatch: pytest.MonkeyPatch, **lists: Any) -> AsyncIterator[Connections]:
    """Have this process reach its model's service through a proxy with these rules."""
    seen = Connections()
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.setblocking(False)
        for name, value in variables(door.getsockname()[1]).items():
            monkeypatch.setenv(name, value)
        rules = ConnectionRules(compile_policy(PolicyProfile(**lists)), ())
        async with beside(functools.partial(proxy.serve, door, rules, seen)):
            yield seen


async def failing(base_url: str, key: str = KEY, protocol: Any = "openai_compatible") -> UpstreamError:
    """Ask a model and give the failure."""

    async def hear(_: Any) -> None:
        """Nothing is looked for."""

    endpoint = Endpoint(protocol=protocol, base_url=base_url, api_key=key, backoff_ms=1)
    with anyio.fail_after(BOUND_S), pytest.raises(UpstreamError) as caught:
        async with Upstream(endpoint) as up:
            await ModelClient(up, parallel=True, stream=True).ask(
                conversation(protocol), hear, lambda: "2026-11-27T00:00:00Z"
            )
    return caught.value


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize(("lists", "words"), RULES)
async def test_a_service_that_a_rule_forbids_is_no_service_that_failed(
    scheme: str, lists: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with behind(monkeypatch, **lists) as seen:
        error = await failing(f"{scheme}://model.example/v1")
    assert error.code == "policy_denied"
    assert DENIAL in error.message
    assert (words if scheme == "https" else words.partition(" is ")[2]) in error.message
    assert "the service answered" not in error.message
    assert "rule" in (error.hint or "")
    assert seen.denied == 1


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_service_that_cannot_be_found_is_no_denial(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with behind(monkeypatch, allow_network=("model.invalid",)):
        error = await failing(f"{scheme}://model.invalid/v1")
    assert error.code == "backend_unavailable"


@pytest.mark.parametrize("rules", [{"deny_network": ("**",)}, {"allow_network": ("other.example",)}])
async def test_the_host_api_says_which_rule_keeps_it_from_its_service(
    rules: dict[str, Any], found: Any, backplane_home: Path, tmp_path: Path
) -> None:
    with ModelServer([Turn(text="ok")]) as server:
        backend = msgspec.structs.replace(api(server), endpoints=())
        async with control(backplane_home, found) as plane:
            run, _ = await go(plane, order(tmp_path, mode="pass_through", policy=PolicyProfile(**rules)), backend)
    assert ended(run) == ("failed", "policy_denied", "failed")
    assert run.end_error is not None
    assert DENIAL in run.end_error.message
    assert run.receipt.backplane["network"]["denied"] == 1
    assert len(server.requests) == 0


@pytest.mark.parametrize(
    ("over", "key", "path", "words"),
    [
        ("the limit of 5 tokens (budget_tokens) is used up", None, "/v1", "(budget_tokens) is used up"),
        (None, "sk-another", "/v1", "the key that stands in the environment"),
        (None, None, "/v2", "below the path of its address"),
    ],
    ids=["budget", "key", "path"],
)
@pytest.mark.parametrize("protocol", ["openai_compatible", "anthropic"])
async def test_what_the_key_proxy_refuses_is_no_refusal_of_the_service(
    over: str | None, key: str | None, path: str, words: str, protocol: str
) -> None:
    use = KeyUse()
    use.over = over
    with ModelServer([Turn(text="ok")]) as server:
        async with open_key_proxy(f"{server.url}/v1", KEY, use) as at:
            error = await failing(f"{at.address}{path}", key or at.placeholder, protocol)
    assert (error.code, len(server.requests)) == ("policy_denied", 0)
    assert words in error.message
    assert "the service answered" not in error.message
