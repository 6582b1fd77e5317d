"""How the host `api` is told of a service, what its commands cannot see, and what holds it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from backplane.config import BackendSettings, Settings, parse
from backplane.contract.events import (
    ToolResult,
)
from backplane.contract.work import PolicyProfile, RuntimeConfig
from backplane.errors import BackendError, ConfigError
from backplane.runtime import backends, readiness
from backplane.testing import ModelServer, Turn
from tests.api_agent import KEY, LIMITS, api, call, everything, job, of, solve
from tests.peers import PLAIN, PYTHON, ROOT, Child
from tests.peers import run as sent
from tests.runs import backplane_of, ended, go, plane

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    # What is tested here runs in a child with a loop of its own.
    return "asyncio"


# Keys -----------------------------------------------------------------------------------------------------------------


async def test_the_key_is_nowhere_but_in_its_header(tmp_path: Path, backplane_home: Path) -> None:
    # A key of this test's own, as all processes of the user are looked through; and the search does not find itself.
    key = f"sk-{uuid.uuid4().hex}"
    look = f"env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | grep -ac 's[k]-{key[3:]}' | sed s/^/found=/"
    turns = [Turn(calls=(call("bash", command=look),)), Turn(text="ok")]
    work = job(tmp_path, config=RuntimeConfig(env={"PART": "plain", "COPY": key}))
    run, events, server = await solve(backplane_home, turns, work, key=key)
    output = str(of(ToolResult, events)[0].output)
    assert "PART=" in output
    assert "COPY" not in output
    assert "SCRIPTED_KEY" not in output
    assert "found=0" in output
    assert key not in everything(run, events)
    assert all(request.headers["authorization"] == f"Bearer {key}" for request in server.requests)
    assert all(key not in request.path + str(request.query) for request in server.requests)
    assert key not in json.dumps([request.body for request in server.requests])


async def test_a_header_of_ones_own_is_filled_from_the_environment(tmp_path: Path, backplane_home: Path) -> None:
    own = {"x-team": "blue", "authorization": "Token $SCRIPTED_KEY"}
    _, _, server = await solve(backplane_home, [Turn(text="ok")], job(tmp_path), headers=own)
    assert server.requests[0].headers["x-team"] == "blue"
    assert server.requests[0].headers["authorization"] == f"Token {KEY}"


# Containment ----------------------------------------------------------------------------------------------------------


@pytest.mark.needs("bwrap")
async def test_without_a_network_the_model_is_still_reached_and_nothing_else(
    tmp_path: Path, backplane_home: Path
) -> None:
    connect = "import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
    with ModelServer([]) as other, ModelServer([]) as server:
        tries = "; ".join(
            f'{sys.executable} -c "{connect.format(port=port)}" 2>/dev/null || echo no'
            for port in (other.port, server.port)
        )
        server.play([Turn(calls=(call("bash", command=tries), call("web_fetch", url=other.url))), Turn(text="ok")])
        async with plane(backplane_home, LIMITS, isolation="best_effort") as control:
            work = job(tmp_path, policy=PolicyProfile(deny_network=("*",)))
            run, events = await go(control, work, api(server))
        assert other.requests == ()
    assert ended(run) == ("complete", None, "complete")
    assert backplane_of(run)["endpoints"] == [f"127.0.0.1:{server.port}"]
    command, page = of(ToolResult, events)
    assert command.output == "no\nno\n[exit code 0]"
    assert page.output.startswith("policy_denied")
    rule = next(row for row in backplane_of(run)["enforcement"]["rules"] if row["rule"] == "deny_network")
    assert rule["layer"] == "os"


# The command line -----------------------------------------------------------------------------------------------------


def backplane(*words: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PYTHON, "-m", "backplane", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env={**os.environ, **env},
        check=False,
    )


def test_a_configured_service_is_listed_and_run_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    turns = [Turn(calls=(call("write_file", path="made", content="yes\n"),)), Turn(text="It is made.")]
    with ModelServer(turns) as server:
        (tmp_path / "backplane.toml").write_text(
            'isolation = "off"\n[backends.local]\nhost = "api"\n[backends.local.options]\npreset = "ollama"\n'
            f'model = "m-1"\nbase_url = "{server.base_url("openai_compatible")}"\nkey_env = "SCRIPTED_KEY"\n'
        )
        listed = backplane("backends", folder=tmp_path)
        assert "export SCRIPTED_KEY=" in listed.stdout
        ready = backplane("backends", "--json", folder=tmp_path, SCRIPTED_KEY=KEY)
        rows = {row["id"]: row for row in map(json.loads, ready.stdout.splitlines())}
        assert rows["local"]["ready"]
        run = ("run", "make it", "--backend", "local", "--root", "work", "--apply")
        refused = backplane(*run, folder=tmp_path)
        assert refused.returncode == 1
        assert "SCRIPTED_KEY" in refused.stderr
        done = backplane(*run, folder=tmp_path, SCRIPTED_KEY=KEY)
    assert (done.returncode, (tmp_path / "work/made").read_text()) == (0, "yes\n")
    assert "It is made." in done.stdout
    assert KEY not in done.stdout + done.stderr + listed.stdout + ready.stdout


def test_a_host_that_was_told_of_no_service_says_hello_and_refuses_its_runs(tmp_path: Path) -> None:
    with Child((*PYTHON, str(ROOT / "hosts" / "api.py"))) as child:
        child.send(sent("r1", "do it", PLAIN, workspace={"root": str(tmp_path)}))
        child.close_stdin()
        told = child.until("final", "fatal", wait_s=15.0)
        assert child.wait() == 0
    assert told[0]["capabilities"]["tool_edit"] == "emulated"
    assert told[-1]["error_code"] == "config_invalid"
    assert "names no model service" in told[-1]["error"]


# Configuration --------------------------------------------------------------------------------------------------------


def configured(**options: Any) -> Settings:
    return Settings(backends={"agent": BackendSettings(host="api", options=options)})


async def test_a_backend_without_its_key_is_not_ready_and_says_how_it_would_be() -> None:
    settings = configured(preset="anthropic")
    status = next(status for status in readiness.known(settings, {}) if status.id == "agent")
    assert not status.ready
    assert "ANTHROPIC_API_KEY" in status.why
    assert "export ANTHROPIC_API_KEY" in status.fix
    status = next(
        status
        for status in readiness.known(settings, {"ANTHROPIC_API_KEY": "k", "PATH": os.environ["PATH"]})
        if status.id == "agent"
    )
    assert status.ready


def test_the_services_of_the_guide_are_ready_once_their_keys_are_set(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guide" / "agents.md").read_text("utf-8")
    block = next(block for block in re.findall(r"^```toml\n(.*?)^```$", page, re.S | re.M) if "backends.mine" in block)
    settings = parse(block.encode(), source="agents.md", folder=tmp_path)
    environ = {"PATH": os.environ["PATH"], "ANTHROPIC_API_KEY": KEY}
    ready = {status.id for status in readiness.known(settings, environ) if status.ready}
    assert {"sonnet", "mine"} <= ready


@pytest.mark.parametrize("preset", ["ollama", "llama_cpp", "vllm"])
async def test_a_local_server_needs_no_key_and_may_always_be_reached(preset: str) -> None:
    found = backends.find("agent", configured(preset=preset), {})
    assert isinstance(found, backends.ProcessBackend)
    assert found.endpoints[0].startswith("127.0.0.1:")
    assert found.secrets == ()


async def test_keys_travel_in_the_environment_and_count_as_secrets() -> None:
    found = backends.find("agent", configured(preset="openai"), {"OPENAI_API_KEY": KEY})
    assert isinstance(found, backends.ProcessBackend)
    assert found.endpoints == ("api.openai.com:443",)
    assert found.secrets == (KEY,)
    assert found.env["OPENAI_API_KEY"] == KEY
    assert KEY not in " ".join(found.argv)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "names no model service"),
        ({"preset": "nobody"}, "one of: openai"),
        ({"preset": "openai", "modle": "x"}, "modle"),
        ({"protocol": "smtp", "base_url": "https://x/v1"}, "protocol"),
        ({"protocol": "anthropic", "base_url": "ftp://x"}, "base_url"),
        ({"protocol": "anthropic", "base_url": "https://u:secret@x/v1"}, "base_url"),
        ({"protocol": "anthropic", "base_url": "https://x/v1?key=secret"}, "base_url"),
        ({"protocol": "anthropic", "base_url": "http://example.com/v1", "key_env": "K"}, "plain http"),
        ({"protocol": "anthropic", "base_url": "http://example.com/v1", "headers": {"x": "$K"}}, "plain http"),
        ({"preset": "ollama", "timeout_s": 0}, "timeout_s"),
        ({"preset": "ollama", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_options_that_are_wrong_are_named_without_their_secrets(options: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        backends.find("agent", configured(**options), {})
    assert error.value.code == "config_invalid"
    assert words in f"{error.value.message} {error.value.hint}"
    assert "secret" not in f"{error.value.message} {error.value.hint}"


async def test_a_variable_of_a_header_that_is_not_set_is_named() -> None:
    with pytest.raises(BackendError, match="TEAM_TOKEN"):
        backends.find("agent", configured(preset="ollama", headers={"x-team": "Bearer $TEAM_TOKEN"}), {})
