"""MCP servers of the configuration: they reach every host that can be a client, under the policy by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import backplane
from backplane.config import BackendSettings, ServerSettings, Settings, parse
from backplane.errors import BackplaneError, ConfigError
from backplane.testing import Call, ModelServer, Turn
from tests.all.doors.test_tools_mcp import HOUSE, called, house, results

SERVER = ServerSettings(command=(sys.executable, str(HOUSE), "walrus"))


def play(
    turns: list[Turn], root: Path, home: Path, *servers: ServerSettings, backend: str = "mine", **given: Any
) -> tuple[backplane.Run, list[Any]]:
    """Run over these turns with the configuration's servers `house`, `house1` …; what the model was told."""
    with ModelServer(turns) as model:
        options = {"protocol": "openai_compatible", "base_url": model.base_url("openai_compatible"), "model": "m"}
        named = {f"house{place or ''}": server for place, server in enumerate(servers)}
        settings = Settings(
            backends={"mine": BackendSettings(host="api", options=options)}, mcp_servers=named, isolation="off"
        )
        run = backplane.run(
            given.pop("order", "true"), backend=backend, root=root, settings=settings, home=home, **given
        )
        return run, [request.body for request in model.requests]


def told(run: backplane.Run) -> Any:
    return run.receipt.backplane.get("mcp_servers")


def test_a_server_declared_once_reaches_a_model_of_an_api(tmp_path: Path, backplane_home: Path) -> None:
    run, _ = play([called("mcp__house__word", a=1), Turn(text="done")], tmp_path, backplane_home, SERVER)
    assert results(run) == [("mcp__house__word", 'walrus {"a": 1}', False)]
    assert told(run) == {"given": ["house"], "not_given": []}


def test_the_policy_holds_for_it_by_name(tmp_path: Path, backplane_home: Path) -> None:
    turns = [Turn(calls=(Call(name="mcp__house__word"), Call(name="mcp__house1__word"))), Turn(text="done")]
    policy = backplane.PolicyProfile(disallowed_tools=("mcp__house__*",))
    run, _ = play(turns, tmp_path, backplane_home, SERVER, SERVER, policy=policy)
    denied, allowed = results(run)
    assert "policy_denied" in denied[1]
    assert allowed == ("mcp__house1__word", "walrus {}", False)


def test_an_orders_own_server_goes_over_one_of_the_same_name(tmp_path: Path, backplane_home: Path) -> None:
    config = backplane.RuntimeConfig(vendor={"abp": {"mcp_servers": [house("zebra")]}})
    order = backplane.WorkOrder("go", config=config)
    run, _ = play([called("mcp__house__word"), Turn(text="done")], tmp_path, backplane_home, SERVER, order=order)
    assert results(run) == [("mcp__house__word", "zebra {}", False)]


def test_a_value_of_a_variable_reaches_the_server_and_nothing_else(
    tmp_path: Path, backplane_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ServerSettings(command=(sys.executable, str(HOUSE)), env={"WORD": "$THE_WORD"})
    with pytest.raises(BackplaneError, match="'house' needs the environment variable THE_WORD"):
        play([], tmp_path, backplane_home, server)
    monkeypatch.setenv("THE_WORD", "walrus-walrus-walrus")
    run, said = play([called("mcp__house__word"), Turn(text="done")], tmp_path, backplane_home, server)
    assert results(run) == [("mcp__house__word", "[redacted] {}", False)]
    assert "walrus-walrus" not in str(run.receipt)
    assert "walrus-walrus-walrus {}" in str(said[-1])


def test_a_host_that_can_be_no_client_is_given_none_and_the_receipt_says_so(
    tmp_path: Path, backplane_home: Path
) -> None:
    run, _ = play([], tmp_path, backplane_home, SERVER, backend="shell")
    assert run.receipt.outcome == "complete"
    assert told(run) == {"given": [], "not_given": ["house"]}


def test_a_required_server_refuses_such_a_host_before_the_order_is_sent(tmp_path: Path, backplane_home: Path) -> None:
    import msgspec

    required = msgspec.structs.replace(SERVER, required=True)
    run, _ = play([], tmp_path, backplane_home, required, backend="shell")
    assert run.error is not None
    assert (run.error.code, run.error.facts.exit_code) == ("capability_unsupported", 4)
    assert "'house', which is required" in run.error.message
    assert not run.receipt.trace


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[mcp_servers.a]\ncommand = ["x"]\nurl = "http://x"', "exactly one of `command` and `url`"),
        ("[mcp_servers.a]", "exactly one of `command` and `url`"),
        ("[mcp_servers.a]\ncommand = []", "names no program"),
        ('[mcp_servers.a]\ncommand = ["x"]\ncomand = 1', "comand"),
        ('[mcp_servers."a__b"]\ncommand = ["x"]', "cannot have the name 'a__b'"),
        ("mcp_servers = 1", "`mcp_servers` must be a table"),
    ],
)
def test_a_faulty_row_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        parse(text.encode(), source="a.toml", folder=tmp_path)


def test_paths_of_a_row_count_from_the_configurations_folder(tmp_path: Path) -> None:
    (tmp_path / "server.py").touch()
    text = b'[mcp_servers.a]\ncommand = ["python3", "server.py"]\nenv = {A = "$B"}'
    found = parse(text, source="a.toml", folder=tmp_path).mcp_servers["a"]
    assert found.command == ("python3", str(tmp_path / "server.py"))
