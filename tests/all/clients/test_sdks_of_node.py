"""The gateway judged by the vendors' JavaScript SDKs: each hears the script through each protocol of a service.

`tests/gateway/test_gateway_sdks.py` does the same with the SDKs for Python. With `-s`, the number of answers that each
pair of an interface and a service has read is printed at the end.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backplane.config import GatewayAgentSettings
from backplane.testing import PROTOCOLS, Call, Failure, Fault, ModelServer, ProtocolName, Turn
from tests.gateway.ground import Gate, all_of, gateway
from tests.gateway.test_gateway_sdks import OPENAI, through
from tests.scripted import EVERY, EXCHANGES_MIN, READ, TOOLS, WAYS

PACKAGES = ("openai@6.49.0", "@anthropic-ai/sdk@1.12.0", "@google/genai@2.32.0")
"""The newest that were measured with Node 20; newer ones ask for a newer Node."""
PICTURE = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(60)).decode()
STEPS = [
    Turn(reasoning="hm", text="I look.", calls=(READ, Call(name="bash", input={"command": "ls"}))),
    Turn(calls=(Call(name="now"),)),
    Turn(text="all done"),
]
"""A conversation of three answers: two calls beside each other, one without arguments, and the last words."""


class Sdks:
    """A Node program that asks by the SDKs."""

    def __init__(self, program: subprocess.Popen[str]) -> None:
        self._program = program
        self.count = 0

    def ask(self, front: ProtocolName, way: str, gate: Gate, **ask: Any) -> Any:
        """Return what an SDK gave its user, or its exception."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        task = {"front": front, "way": way, "url": gate.url, "ask": {"text": "go", **ask}}
        self._program.stdin.write(json.dumps(task) + "\n")
        self._program.stdin.flush()
        answer = self._program.stdout.readline()
        assert answer, "the program has ended"
        self.count += 1
        return json.loads(answer)


@pytest.fixture
def sdks(npm_programs: Callable[..., Path], needs: Callable[[str], str], tmp_path: Path) -> Iterator[Sdks]:
    (tmp_path / "node_modules").symlink_to(npm_programs(*PACKAGES).parent)
    program = shutil.copy(Path(__file__).with_name("sdks.mjs"), tmp_path)
    with subprocess.Popen(
        [needs("node"), program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as node:
        yield Sdks(node)
        node.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer([]) as server:
        yield server


@pytest.fixture(scope="module", params=PROTOCOLS)
def behind(request: pytest.FixtureRequest, server: ModelServer) -> Iterator[tuple[ProtocolName, Gate]]:
    with gateway(all_of(server), {"m": request.param}) as gate:
        yield request.param, gate


@pytest.fixture(scope="module")
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """Answers read by each pair of an interface and a service; printed at the end."""
    counts: Counter[tuple[str, str]] = Counter()
    yield counts
    for (front, protocol), count in sorted(counts.items()):
        print(f"{front:>20} on {protocol:<20} {count}")


@pytest.mark.parametrize("front", PROTOCOLS)
def test_a_sdk_for_node_hears_the_script_through_any_service(
    behind: tuple[ProtocolName, Gate], server: ModelServer, front: ProtocolName, sdks: Sdks,
    counted: Counter[tuple[str, str]],
) -> None:  # fmt: skip
    protocol, gate = behind
    wrong = []
    for case, turn in EVERY.items():
        right = through(turn, front, protocol)
        plain = json.loads(json.dumps(right._asdict()))
        for way in WAYS:
            server.play(turn)
            answer = sdks.ask(front, way, gate, tools=TOOLS if turn.calls else None, think=turn.reasoning is not None)
            differs = {name: answer.get(name) for name in plain if answer.get(name) != plain[name]}
            if differs or "error" in answer:
                wrong.append(f"{case}, {way}: {answer if 'error' in answer else differs}"[:400])
    counted[front, protocol] = sdks.count
    assert wrong == []
    assert sdks.count >= EXCHANGES_MIN


@pytest.mark.parametrize("front", PROTOCOLS)
@pytest.mark.parametrize("way", ["loop", "loop-stream"])
def test_a_sdks_runner_of_tools_comes_to_its_end(
    behind: tuple[ProtocolName, Gate], server: ModelServer, front: ProtocolName, sdks: Sdks, way: str
) -> None:
    protocol, gate = behind
    server.play(STEPS)
    begun = len(server.requests)
    answer = sdks.ask(front, way, gate, tools=TOOLS)
    assert answer.get("ran") == [["read", READ.input], ["bash", {"command": "ls"}], ["now", {}]], answer
    assert answer["text"].endswith("all done")
    asked = [json.dumps(request.body) for request in server.requests[begun:]]
    # Anthropic's runner sends only what is new to a service that keeps the conversation, and all of it to any other.
    is_kept = front == protocol == "anthropic"
    assert [text.count("result of") for text in asked] == [0, 2, 1 if is_kept else 3]


@pytest.mark.parametrize("front", PROTOCOLS)
@pytest.mark.parametrize("way", WAYS)
def test_an_image_arrives(
    behind: tuple[ProtocolName, Gate], server: ModelServer, front: ProtocolName, sdks: Sdks, way: str
) -> None:
    _, gate = behind
    server.play(Turn(text="a marmot"))
    assert sdks.ask(front, way, gate, image=PICTURE).get("text") == "a marmot"
    assert PICTURE in json.dumps(server.requests[-1].body)


ERRORS: dict[tuple[ProtocolName, int], str] = {
    ("openai_compatible", 401): "AuthenticationError",
    ("openai_compatible", 404): "NotFoundError",
    ("openai_responses", 429): "RateLimitError",
    ("openai_responses", 500): "InternalServerError",
    ("anthropic", 403): "PermissionDeniedError",
    ("anthropic", 429): "RateLimitError",
    ("gemini_ai_studio", 400): "ApiError",
    ("gemini_ai_studio", 503): "ApiError",
}


@pytest.mark.parametrize(("front", "status"), ERRORS)
def test_a_failure_is_the_sdks_own_error(
    behind: tuple[ProtocolName, Gate], server: ModelServer, front: ProtocolName, status: int, sdks: Sdks
) -> None:
    _, gate = behind
    server.play(Turn(fault=Fault(status=status, message="as scripted"), times=None))
    for way in WAYS:
        answer = sdks.ask(front, way, gate)
        assert (answer.get("error"), "as scripted" in answer.get("message", "")) == (ERRORS[front, status], True), (
            answer
        )


@pytest.mark.parametrize("front", [front for front in PROTOCOLS if front != "openai_responses"])
def test_a_sdk_notices_a_failure_half_way(
    behind: tuple[ProtocolName, Gate], server: ModelServer, front: ProtocolName, sdks: Sdks
) -> None:
    _, gate = behind
    server.play(Turn(text="so far", fault=Fault(failure=Failure(message="as scripted")), times=None))
    for way in WAYS:
        answer = sdks.ask(front, way, gate)
        assert "as scripted" in answer.get("message", ""), answer


def test_a_failed_response_is_no_answer(behind: tuple[ProtocolName, Gate], server: ModelServer, sdks: Sdks) -> None:
    """The SDK's own helper returns a failed response without an exception, so its status is what counts."""
    _, gate = behind
    server.play(Turn(text="so far", fault=Fault(failure=Failure(message="as scripted")), times=None))
    answer = sdks.ask("openai_responses", "stream", gate)
    assert answer.get("error") or answer["stop"] == "failed", answer


@pytest.mark.parametrize("front", PROTOCOLS)
def test_an_agent_as_a_model_is_heard(server: ModelServer, front: ProtocolName, sdks: Sdks, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    write = Call(name="write_file", input={"path": "made.txt", "content": "marmot\n"})
    agents = {"maker": GatewayAgentSettings(root=str(tmp_path / "work"), backend="anthropic", model="m")}
    with gateway(all_of(server), {}, agents=agents) as gate:
        for way in WAYS:
            server.play([Turn(reasoning="hm", text="I write.", calls=(write,)), Turn(text="All done.")])
            answer = sdks.ask(front, way, gate, model="agent/maker")
            assert "All done." in answer.get("text", ""), answer
            assert "backplane apply" in answer["text"], answer
            assert "hm" in answer["reasoning"], answer
        server.play([Turn(text="so far", calls=(write,)), Turn(fault=Fault(status=401, message="as scripted"))])
        answer = sdks.ask(front, "helper", gate, model="agent/maker")
        assert "as scripted" in answer.get("message", answer.get("stop")), answer


@pytest.mark.parametrize("front", PROTOCOLS)
def test_models_and_counts_are_read(
    behind: tuple[ProtocolName, Gate], server: ModelServer, front: ProtocolName, sdks: Sdks
) -> None:
    _, gate = behind
    assert sdks.ask(front, "models", gate) == {"names": ["models/m" if front == "gemini_ai_studio" else "m"]}
    if front not in OPENAI:
        assert sdks.ask(front, "count", gate).get("count", 0) > 0


@pytest.mark.parametrize("front", [front for front in PROTOCOLS if front != "gemini_ai_studio"])
def test_a_sdk_waits_as_long_as_the_service_says_and_tries_again(
    behind: tuple[ProtocolName, Gate], server: ModelServer, front: ProtocolName, sdks: Sdks
) -> None:
    _, gate = behind
    limited = Turn(fault=Fault(status=429, headers={"retry-after": "1"}))
    server.play([limited, Turn(text="now")])
    begun = time.monotonic()
    assert sdks.ask(front, "whole", gate, retries=1).get("text") == "now"
    assert time.monotonic() - begun > 0.9
