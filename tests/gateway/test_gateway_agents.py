"""A whole agent as a model of the gateway."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane.config import BackendSettings, GatewayAgentSettings
from backplane.errors import BackplaneError
from backplane.testing import PROTOCOLS, Call, Fault, ModelServer, ProtocolName, Turn
from tests.gateway.ground import Gate, gateway
from tests.gateway.test_gateway import ask
from tests.scripted import events, question

WRITE = Call(name="write_file", input={"path": "made.txt", "content": "marmot\n"})
SCRIPT = [Turn(reasoning="hm", text="I write.", calls=(WRITE,)), Turn(text="All done.")]


def api(server: ModelServer) -> dict[str, BackendSettings]:
    options = {"protocol": "anthropic", "base_url": server.base_url("anthropic"), "model": "m"}
    return {"maker": BackendSettings(host="api", options=options)}


def agents(root: Path) -> dict[str, GatewayAgentSettings]:
    root.mkdir(exist_ok=True)
    (root / "a.txt").write_text("a\n")
    return {"maker": GatewayAgentSettings(root=str(root))}


def request(protocol: ProtocolName, *, stream: bool, says: str = "go") -> tuple[str, Any]:
    path, body = question(protocol, says, stream=stream)
    return path.replace("/m:", "/agent%2Fmaker:"), {**body, "model": "agent/maker"} if "model" in body else body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_agent_answers_as_a_model_and_its_patch_is_a_link(
    protocol: ProtocolName, stream: bool, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with ModelServer(SCRIPT) as server, gateway(api(server), {}, home, agents=agents(tmp_path / "work")) as gate:
        path, body = request(protocol, stream=stream)
        status, headers, data = ask(gate, path, body)
        (end,) = gate.ends
    assert status == 200, data
    text = data.decode()
    joined = "".join(events(data)) if stream else text
    assert "done" in joined or "ne." in joined
    run = headers["x-backplane-run"]
    assert f"apply {run}" in text.replace('"', "") or run in text
    assert (end.end, end.backend, end.model) == ("complete", "maker", "agent/maker")
    assert end.tokens is not None
    assert not (tmp_path / "work" / "made.txt").exists()
    done = subprocess.run(
        [sys.executable, "-m", "backplane", "apply", run], env={"BACKPLANE_HOME": str(home), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "work" / "made.txt").read_text() == "marmot\n"


def test_the_conversation_so_far_is_part_of_the_task(tmp_path: Path) -> None:
    with ModelServer([Turn(text="ok")]) as server, gateway(api(server), {}, agents=agents(tmp_path / "w")) as gate:
        messages = [
            {"role": "system", "content": "Be short."}, {"role": "user", "content": "first"},
            {"role": "assistant", "content": "an answer"}, {"role": "user", "content": "and now this"},
        ]  # fmt: skip
        body = {"model": "agent/maker", "messages": messages, "temperature": 0.5}
        assert ask(gate, "/v1/chat/completions", body)[0] == 200
        (end,) = gate.ends
        said = json.dumps(server.requests[0].body["messages"])
    assert all(word in said for word in ("Be short.", "first", "an answer", "and now this"))
    assert any("temperature" in row for row in end.lost)


def test_a_client_that_goes_away_cancels_the_run(tmp_path: Path) -> None:
    slow = Turn(text="word " * 400, pieces=400, fault=Fault(pause_ms=50))
    with ModelServer(slow) as server, gateway(api(server), {}, agents=agents(tmp_path / "w")) as gate:
        import http.client

        client = http.client.HTTPConnection("127.0.0.1", gate.port, timeout=20)
        path, body = request("openai_compatible", stream=True)
        client.request("POST", path, json.dumps(body), {"authorization": "Bearer dummy"})
        client.getresponse().read(10)
        client.close()
        (end,) = gate.ends
        assert end.end == "left"
        assert server.wait_end(1) == "left"


def test_a_failed_agent_is_an_error_of_the_interface(tmp_path: Path) -> None:
    refused = Turn(fault=Fault(status=401, message="no key"), times=None)
    with ModelServer(refused) as server, gateway(api(server), {}, agents=agents(tmp_path / "w")) as gate:
        path, body = request("anthropic", stream=False)
        status, _, data = ask(gate, path, body)
        models = json.loads(ask(gate, "/v1/models", None, method="GET")[2])
    assert status == 401
    assert json.loads(data)["type"] == "error"
    assert [row["id"] for row in models["data"]] == ["agent/maker"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_configuration_that_became_wrong_is_no_error_that_clients_repeat(
    protocol: ProtocolName, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text("{}")
    row = msgspec.structs.replace(agents(tmp_path / "w")["maker"], policy=str(rules))
    with ModelServer([]) as server, gateway(api(server), {}, agents={"maker": row}) as gate:
        rules.unlink()
        status, headers, data = ask(gate, *request(protocol, stream=True))
        (end,) = gate.ends
    assert (status, headers["x-should-retry"], end.code) == (400, "false", "config_invalid")
    assert b"no policy" in data


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_agent_that_fails_half_way_has_no_good_end(protocol: ProtocolName, stream: bool, tmp_path: Path) -> None:
    script = [SCRIPT[0], Turn(fault=Fault(status=401, message="no key"), times=None)]
    with ModelServer(script) as server, gateway(api(server), {}, agents=agents(tmp_path / "w")) as gate:
        path, body = request(protocol, stream=stream)
        status, _, data = ask(gate, path, body)
        (end,) = gate.ends
    assert status == (200 if stream else 401)
    assert "no key" in data.decode()
    assert end.end == "failed"
    assert not any(word in data for word in (b"message_stop", b"[DONE]", b"response.completed", b'"STOP"', b'"stop"'))


def test_a_request_that_an_agent_cannot_get_whole_is_counted_or_refused(tmp_path: Path) -> None:
    path, body = request("openai_compatible", stream=False)
    body["temperature"] = 0.5
    with ModelServer([Turn(text="ok")]) as server:
        with gateway(api(server), {}, agents=agents(tmp_path / "w")) as gate:
            assert ask(gate, path, body)[1]["x-backplane-losses"] == "1"
        with gateway(api(server), {}, agents=agents(tmp_path / "w"), losses="fail") as gate:
            assert ask(gate, path, body)[0] == 400
        assert len(server.requests) == 1


@pytest.mark.parametrize("row", [{"root": "/no/such/folder"}, {"root": "/", "backend": "nothing"}])
def test_an_agent_that_cannot_work_is_named_at_the_start(row: dict[str, str]) -> None:
    words = "no folder" if "backend" not in row else "nothing"
    with (
        ModelServer([]) as server,
        pytest.raises(BackplaneError, match=words),
        gateway(api(server), {}, agents={"maker": GatewayAgentSettings(**row)}),
    ):
        pass


def test_agents_of_a_gate_are_found_by_their_name_alone(tmp_path: Path) -> None:
    with ModelServer([]) as server, gateway(api(server), {}, agents=agents(tmp_path / "w")) as gate:
        path, body = request("openai_compatible", stream=False)
        assert ask(gate, path, {**body, "model": "agent/other"})[0] == 404
        assert isinstance(gate, Gate)
