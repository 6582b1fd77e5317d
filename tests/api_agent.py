"""The host `api` for tests: a run against a scripted model, and what is looked for in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from backplane.config import BackendSettings, Settings
from backplane.contract import canonical
from backplane.contract.events import (
    AgentEvent,
)
from backplane.contract.work import WorkOrder
from backplane.runtime import backends
from backplane.runtime.backends import Backend
from backplane.runtime.run import Run
from backplane.testing import Call, ModelServer, ScriptUsage, Turn
from backplane.upstream.endpoint import ProtocolName
from tests.runs import QUICK, go, order, plane

KEY = "sk-scripted-0123456789abcdef"
PRICES = {"input": 1, "output": 2, "cache_read": "0.5"}
LIMITS = msgspec.structs.replace(QUICK, hello_s=30.0, idle_s=60.0, cancel_grace_s=2.0)


def api(server: ModelServer, protocol: ProtocolName = "openai_compatible", key: str = KEY, **options: Any) -> Backend:
    given = {
        "protocol": protocol, "base_url": server.base_url(protocol), "key_env": "SCRIPTED_KEY", "model": "m-1",
        "prices": PRICES, **options,
    }  # fmt: skip
    settings = Settings(backends={"agent": BackendSettings(host="api", options=given)}, limits=LIMITS)
    return backends.find("agent", settings, {**os.environ, "SCRIPTED_KEY": key})


def job(root: Path, task: str = "do it", mode: str = "staged", **members: Any) -> WorkOrder:
    return order(root, task=task, mode=mode, **members)


async def solve(
    home: Path, turns: Sequence[Any], work: WorkOrder, protocol: ProtocolName = "openai_compatible", **options: Any
) -> tuple[Run, list[AgentEvent], ModelServer]:
    with ModelServer(turns) as server:
        async with plane(home, LIMITS) as control:
            run, events = await go(control, work, api(server, protocol, **options))
    return run, events, server


def of(kind: type[Any], events: Sequence[AgentEvent]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def everything(run: Run, events: Sequence[AgentEvent]) -> str:
    return b"".join(run.receipt_chunks()).decode() + b"".join(map(canonical.encode, events)).decode()


def raw(run: Run) -> Any:
    return run.receipt.usage_raw


def call(tool: str, **input: Any) -> Call:
    return Call(name=tool, input=input)


LOOP = Turn(calls=(call("bash", command="echo x >> count"),), usage=ScriptUsage(input=100, output=10), times=None)
"""A model that never ends; a turn costs 120 millionths of a dollar."""
