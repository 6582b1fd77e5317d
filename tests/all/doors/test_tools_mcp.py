"""MCP servers of a model without a client of its own: the host `api` starts or reaches them and calls their tools."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import backplane
from backplane.config import BackendSettings, Limits, ServerSettings, Settings
from backplane.testing import Call, ModelServer, Turn
from tests.test_why import diagnosed

HOUSE = Path(__file__).parent.parent / "vendors" / "house_mcp.py"

PAGED = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "p"}}
    if asked["method"] == "tools/list":
        page = int(asked["params"].get("cursor", 0))
        result = {"tools": [{"name": f"odd name.{page}", "inputSchema": {"type": "object"}}]}
        result |= {"nextCursor": str(page + 1)} if page < 2 else {}
    if asked["method"] == "tools/call":
        name = asked["params"]["name"]
        parts = [{"type": "text", "text": name}, {"type": "image", "data": "", "mimeType": "image/png"}]
        parts.append({"type": "resource", "resource": {"uri": "file:///x", "text": "inside"}})
        result = {"content": parts, "isError": name.endswith("2")}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def play(
    turns: list[Turn], tmp_path: Path, home: Path, *, servers: tuple[Any, ...] = (), **given: Any
) -> tuple[backplane.Run, list[Any]]:
    """Run the host `api` over these turns; give the run and what the model was told each time."""
    with ModelServer(turns) as server:
        options = {"protocol": "openai_compatible", "base_url": server.base_url("openai_compatible"), "model": "m"}
        settings = Settings(
            backends={"mine": BackendSettings(host="api", options=options, endpoints=(server.url.partition("//")[2],))},
            isolation=given.pop("isolation", "off"),
            limits=given.pop("limits", Limits()),
            mcp_servers=given.pop("configured", {}),
        )
        vendor = {"abp": {"mcp_servers": list(servers)}} if servers else {}
        order = backplane.WorkOrder("go", config=backplane.RuntimeConfig(vendor=vendor))
        run = backplane.run(order, backend="mine", root=tmp_path, settings=settings, home=home, **given)
        return run, [request.body for request in server.requests]


def called(name: str, **input: Any) -> Turn:
    return Turn(calls=(Call(name=name, input=input),))


def results(run: backplane.Run) -> list[tuple[str, Any, bool]]:
    return [(e.tool_name, e.output, e.is_error) for e in run.receipt.trace if isinstance(e, backplane.ToolResult)]


def house(*words: str) -> dict[str, Any]:
    return {"name": "house", "command": sys.executable, "args": [str(HOUSE), *words]}


def test_a_server_is_started_and_its_tool_called_and_nothing_of_it_stays(tmp_path: Path, backplane_home: Path) -> None:
    turns = [called("mcp__house__word", a=1), Turn(text="done")]
    run, told = play(turns, tmp_path, backplane_home, servers=(house("walrus"),))
    assert run.check().text == "done"
    assert results(run) == [("mcp__house__word", 'walrus {"a": 1}', False)]
    offered = {tool["function"]["name"]: tool["function"] for tool in told[0]["tools"]}
    assert offered["mcp__house__word"]["description"] == "the word"
    assert "read_file" in offered


def test_pages_names_and_other_contents_are_read(tmp_path: Path, backplane_home: Path) -> None:
    (tmp_path / "paged.py").write_text(PAGED)
    row = {"name": "p", "command": sys.executable, "args": [str(tmp_path / "paged.py")]}
    turns = [called("mcp__p__odd_name_1"), called("mcp__p__odd_name_2"), Turn(text="done")]
    run, told = play(turns, tmp_path, backplane_home, servers=(row,))
    text = "\n[image, which is not shown]\nfile:///x:\ninside"
    assert results(run) == [
        ("mcp__p__odd_name_1", "odd name.1" + text, False),
        ("mcp__p__odd_name_2", "odd name.2" + text, True),
    ]
    assert len([tool for tool in told[0]["tools"] if tool["function"]["name"].startswith("mcp__p__")]) == 3


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"name": "gone", "command": "/nowhere/server"}, "ENOENT"),
        ({"name": "gone", "command": "true"}, "the program ended"),
        ({"name": "gone", "url": "http://127.0.0.1:1/mcp"}, "connect"),
        ({"name": "gone", "url": "https://127.0.0.1:1/mcp"}, "certificates cannot be loaded: No such file"),
    ],
)
def test_a_server_that_does_not_come_is_warned_about(
    row: Any, why: str, tmp_path: Path, backplane_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "no-bundle.pem"))
    run, _ = play([Turn(text="done")], tmp_path, backplane_home, servers=(row, house("walrus")))
    warnings = [event.message for event in run.receipt.trace if isinstance(event, backplane.Warned)]
    assert any("the MCP server 'gone' is not there" in words and why in words for words in warnings), warnings
    assert run.check().text == "done"
    assert any(why in row.text for row in diagnosed(backplane_home).evidence)


AWKWARD = """
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    result = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "a"}}
    if asked["method"] == "tools/list":
        result = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in ("hangs", "dies")]}
    if asked["method"] == "tools/call":
        if asked["params"]["name"] == "hangs":
            time.sleep(60)
        sys.exit("no DATABASE_URL")
    print("\\x07\\x1b[2K" + json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


@pytest.mark.parametrize(
    ("tool", "own", "limits", "words"),
    [
        ("hangs", {}, Limits(tool_s=0.5), "no answer to tools/call within 0.5 s"),
        ("hangs", {"tool_ms": 1300}, Limits(idle_s=1.0), "no answer to tools/call within 1.3 s"),
        ("dies", {}, Limits(), "the program ended; its stderr: no DATABASE_URL"),
    ],
)
def test_a_call_without_an_answer_fails_alone(
    tool: str, own: dict[str, Any], limits: Limits, words: str, tmp_path: Path, backplane_home: Path
) -> None:
    (tmp_path / "server.py").write_text(AWKWARD)
    row = {"name": "a", "command": sys.executable, "args": [str(tmp_path / "server.py")], **own}
    turns = [called(f"mcp__a__{tool}"), Turn(text="done")]
    run, _ = play(turns, tmp_path, backplane_home, servers=(row,), limits=limits)
    assert run.check().text == "done"
    ((_, output, is_error),) = results(run)
    assert (is_error, output) == (True, f"mcp__a__{tool} failed: {words}")


def test_the_configuration_limits_the_calls_of_one_server(tmp_path: Path, backplane_home: Path) -> None:
    (tmp_path / "server.py").write_text(AWKWARD)
    server = ServerSettings(command=(sys.executable, str(tmp_path / "server.py")), tool_s=0.5)
    turns = [called("mcp__a__hangs"), Turn(text="done")]
    run, _ = play(turns, tmp_path, backplane_home, configured={"a": server})
    assert run.check().text == "done"
    assert "within 0.5 s" in results(run)[0][1]


def test_a_time_that_is_none_in_a_servers_row_is_refused(tmp_path: Path, backplane_home: Path) -> None:
    run, _ = play([Turn(text="done")], tmp_path, backplane_home, servers=({**house("w"), "tool_ms": 0},))
    assert "tool_ms" in str(run.error)


def test_rules_and_approvals_hold_for_a_servers_tools(tmp_path: Path, backplane_home: Path) -> None:
    turns = [called("mcp__house__word"), Turn(text="done")]
    policy = backplane.PolicyProfile(disallowed_tools=("mcp__house__*",))
    run, _ = play(turns, tmp_path, backplane_home, servers=(house("walrus"),), policy=policy)
    ((_, output, is_error),) = results(run)
    assert (is_error, "policy_denied" in output) == (True, True)
    policy = backplane.PolicyProfile(require_approval_for=("mcp__*",))
    run, _ = play(
        turns, tmp_path, backplane_home, servers=(house("walrus"),), policy=policy, on_ask=lambda ask: ask.allow()
    )
    assert results(run) == [("mcp__house__word", "walrus {}", False)]


@pytest.mark.parametrize("isolation", ["off", "best_effort"])
def test_a_function_of_the_program_is_a_tool_of_a_model(isolation: str, tmp_path: Path, backplane_home: Path) -> None:
    def price(article: str) -> float:
        """Look up a price."""
        return {"pump": 129.0}[article]

    turns = [
        called("mcp__functions__price", article="pump"),
        called("mcp__functions__price", article="x"),
        Turn(text="k"),
    ]
    run, _ = play(turns, tmp_path, backplane_home, tools=[price], isolation=isolation)
    assert results(run) == [
        ("mcp__functions__price", "129.0", False),
        ("mcp__functions__price", "KeyError: 'x'", True),
    ]


class Handler(http.server.BaseHTTPRequestHandler):
    """A server over streamable HTTP: JSON for a greeting, an event stream for the rest."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != "Bearer k":
            self.send_response(401)
            self.end_headers()
            return
        if "id" not in asked:
            self.send_response(202)
            self.end_headers()
            return
        greeting = asked["method"] == "initialize"
        assert greeting or self.headers["Mcp-Session-Id"] == "s1"
        result: dict[str, Any] = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "w"}}
        if asked["method"] == "tools/list":
            result = {"tools": [{"name": "word", "inputSchema": {"type": "object"}}]}
        if asked["method"] == "tools/call":
            text = "data:image/png;base64,AAAA"  # Looks like an event stream, and is a member of a JSON body.
            result = {"structuredContent": {"word": "walrus", "of": text}, "content": []}
        message = {"jsonrpc": "2.0", "id": asked["id"], "result": result}
        note = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}
        body = json.dumps(message, indent=1)
        kind = "application/json; charset=utf-8"
        if not greeting and self.path != "/json":
            kind, end = "text/event-stream; charset=utf-8", "\r\n"
            parts = ("".join(f"data: {line}{end}" for line in json.dumps(part, indent=1).splitlines())
                     for part in (note, message))  # fmt: skip
            body = f": hello{end}{end}" + "".join(f"event: message{end}{part}id: 1{end}{end}" for part in parts)
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Mcp-Session-Id", "s1")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/mcp"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("path", ["/mcp", "/json"])
def test_a_server_at_an_address_is_reached_over_http(
    path: str, address: str, tmp_path: Path, backplane_home: Path
) -> None:
    turns = [called("mcp__web__word"), Turn(text="done")]
    row = {"name": "web", "url": address.replace("/mcp", path), "headers": {"Authorization": "Bearer k"}}
    run, _ = play(turns, tmp_path, backplane_home, servers=(row,))
    assert results(run) == [("mcp__web__word", '{"word":"walrus","of":"data:image/png;base64,AAAA"}', False)]
    run, _ = play([Turn(text="done")], tmp_path, backplane_home, servers=({"name": "web", "url": address},))
    assert any("HTTP 401" in e.message for e in run.receipt.trace if isinstance(e, backplane.Warned))
