"""What a gateway adds to a request: ours beside claude-code-router and Portkey, `bench/gateway.py` prints JSON.

Upstream, gateway and client are processes of their own. The upstream sends prepared bytes, and the client is a socket
that stays open. All gateways run at once, and are asked in turn; only one of them works at a time.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".cache" / "bench-gateway"
"""Folder of the peers' packages."""
PACKAGES = {"@musistudio/claude-code-router": "2.0.0", "@portkey-ai/gateway": "1.15.2"}
"""Pinned; the router's next major needs a newer Node than 20."""
ROUTER, PORTKEY = ("node_modules/@musistudio/claude-code-router/dist/cli.js",
                   "node_modules/@portkey-ai/gateway/build/start-server.js")  # fmt: skip
INSTALL_S_MAX, START_S_MAX, WAIT_S_MAX = 240, 30, 30
FIRSTS, WARM, WHOLES, CHUNKS, STREAMS, LOAD_S, CONNECTIONS = 60, 5, 150, 3_000, 4, 3.0, 8
OPEN = (100, 500)
SIZES = {"small": 1, "8k": 8_000, "50k": 50_000}
KEY = "bench-key"

# The upstream ---------------------------------------------------------------------------------------------------------

UPSTREAM = r"""
import asyncio, json, sys
CHUNKS, HELD = [3], []
def sse(*events):
    return b"".join((b"event: %b\n" % e["type"].encode() if "type" in e else b"") + b"data: " + json.dumps(e).encode() + b"\n\n" for e in events)
USAGE = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
def chat(delta, stop=None, **more):
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": stop}], **more}
WORD = "some words of an answer, "
def stream(path, count):
    if path.endswith(b"/messages"):
        head = sse({"type": "message_start", "message": {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 9, "output_tokens": 1}}}, {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
        one = sse({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": WORD}})
        tail = sse({"type": "content_block_stop", "index": 0}, {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"output_tokens": 9}}, {"type": "message_stop"})
        return head + one, one * (count - 1), tail
    one = sse(chat({"content": WORD}))
    return sse(chat({"role": "assistant", "content": ""})) + one, one * (count - 1), sse(chat({}, "stop")) + sse({**chat({}), "choices": [], "usage": USAGE}) + b"data: [DONE]\n\n"
def whole(path):
    if path.endswith(b"/messages"):
        return {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": WORD}], "stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 9, "output_tokens": 9}}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [{"index": 0, "message": {"role": "assistant", "content": WORD}, "finish_reason": "stop"}], "usage": USAGE}
def piece(data):
    return b"%x\r\n%b\r\n" % (len(data), data)
MADE = {}
def made(path):
    key = (path[-9:], CHUNKS[0])
    if key not in MADE:
        body = json.dumps(whole(path)).encode()
        MADE[key] = (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body,
            [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + piece(stream(path, max(CHUNKS[0], 1))[0]), *map(piece, stream(path, max(CHUNKS[0], 1))[1:])])
    return MADE[key]
class Server(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport, self.data = transport, b""
    def data_received(self, data):
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15:].split(b"\r\n")[0]) if at >= 0 else 0
            if len(self.data) < end + 4 + length:
                return
            body, path = self.data[end + 4:end + 4 + length], head.split(b" ")[1].partition(b"?")[0]
            self.data = self.data[end + 4 + length:]
            if path.startswith(b"/set/"):
                CHUNKS[0] = int(path[5:])
                self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            elif b'"stream":true' in body.replace(b": ", b":"):
                pieces = made(path)[1]
                if not CHUNKS[0]:
                    self.transport.write(pieces[0])  # The rest never comes.
                else:
                    self.transport.write(b"".join(pieces) + b"0\r\n\r\n")
            else:
                self.transport.write(made(path)[0])
async def main():
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""  # noqa: E501


# The client -----------------------------------------------------------------------------------------------------------


@dataclass
class Way:
    """One way to a model: an address, a path, headers, and the interface of its requests."""

    name: str
    port: int
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    pid: int | None = None
    start_ms: float | None = None
    model: str = "m"

    def request(self, size: int, *, stream: bool, number: int = 0) -> bytes:
        """Return a request of some bytes: an agent's history, whose last message is another one each time."""
        messages = history(size)
        messages.append({"role": "user", "content": f"go on {number}"})
        body = {"model": self.model, "max_tokens": 4000, "stream": stream, "messages": messages}
        if self.path.endswith("/messages"):
            body["messages"] = [as_messages(one) for one in messages]
        data = json.dumps(body, separators=(",", ":")).encode()
        head = {"host": f"127.0.0.1:{self.port}", "content-type": "application/json", "content-length": len(data)}
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**head, **self.headers}.items())
        return f"POST {self.path} HTTP/1.1\r\n{lines}\r\n".encode() + data


def history(size: int) -> list[dict[str, Any]]:
    """Return turns of an agent with calls and results, some bytes together."""
    messages: list[dict[str, Any]] = []
    while size > 500 and len(json.dumps(messages)) < size:
        number = len(messages)
        call = {"name": "read", "arguments": json.dumps({"path": f"src/{number}.py"})}
        messages += [
            {"role": "user" if not messages else "assistant", "content": "I look at the next file of the parser."},
            {"role": "assistant", "content": None,
             "tool_calls": [{"id": f"call_{number}", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": "def parse(line):\n    return line\n" * 16},
        ]  # fmt: skip
        if number:
            text, called, result = messages[-3:]
            messages[-3:] = [{**called, "content": text["content"]}, result]
    return messages


def as_messages(one: dict[str, Any]) -> dict[str, Any]:
    """Return a message of Chat as one of Messages."""
    if one["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": one["tool_call_id"], "content": one["content"]}
        return {"role": "user", "content": [block]}
    blocks = [{"type": "text", "text": one["content"]}] if one["content"] else []
    for call in one.get("tool_calls", ()):
        asked = json.loads(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": asked})
    return {"role": one["role"], "content": blocks}


def connected(way: Way) -> socket.socket:
    end = socket.create_connection(("127.0.0.1", way.port), timeout=WAIT_S_MAX)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


def is_whole(data: bytes) -> bool:
    """Return True if an answer has come to its end."""
    head, found, body = data.partition(b"\r\n\r\n")
    if not found:
        return False
    lowered = head.lower()
    if b"content-length:" in lowered:
        return len(body) >= int(lowered.split(b"content-length:")[1].split(b"\r\n")[0])
    return data.endswith(b"0\r\n\r\n")


def take(end: socket.socket, request: bytes, done: Callable[[bytes], bool]) -> tuple[float, bytes]:
    """Send a request and read until something is there; return the seconds and the bytes."""
    began, data = time.perf_counter(), b""
    end.sendall(request)
    while not done(data):
        more = end.recv(1 << 18)
        if not more:
            raise RuntimeError(f"the connection ended: {data[:300]!r}")
        data += more
    took = time.perf_counter() - began
    if not data.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"no answer: {data[:400]!r}")
    return took, data


def has_text(data: bytes) -> bool:
    return b"some words" in data or (data[:8] == b"HTTP/1.1" and data[9:12] != b"200")


def firsts(way: Way, size: int, count: int = FIRSTS) -> list[float]:
    """Return milliseconds to the first piece of a stream, for each of some requests of one conversation."""
    with connected(way) as end:
        found = []
        for number in range(count + WARM):
            request, data = way.request(size, stream=True, number=number), b""
            took, data = take(end, request, has_text)
            while not data.endswith(b"0\r\n\r\n"):
                data += end.recv(1 << 18)
            found.append(took * 1000)
    return found[WARM:]


def wholes(way: Way, size: int) -> list[float]:
    with connected(way) as end:
        request = way.request(size, stream=False)
        return [take(end, request, is_whole)[0] * 1000 for _ in range(WHOLES)]


def stream_s(way: Way) -> float:
    """Return the seconds of a stream of `CHUNKS` chunks."""
    with connected(way) as end:
        request = way.request(1, stream=True)
        began, size, tail = time.perf_counter(), 0, b""
        end.sendall(request)
        while not tail.endswith(b"0\r\n\r\n"):
            more = end.recv(1 << 18)
            if not more:
                raise RuntimeError(f"the stream ended after {size} bytes")
            size, tail = size + len(more), (tail + more)[-16:]
        return time.perf_counter() - began


def per_second(way: Way) -> float:
    """Return the requests a second on `CONNECTIONS` connections."""
    request, ends = way.request(1, stream=False), [connected(way) for _ in range(CONNECTIONS)]
    parts, poll, done = {end.fileno(): b"" for end in ends}, select.epoll(), 0
    by = {end.fileno(): end for end in ends}
    for end in ends:
        end.sendall(request)
        poll.register(end, select.EPOLLIN)
    began = time.perf_counter()
    while (now := time.perf_counter()) < began + LOAD_S:
        for number, _ in poll.poll(1):
            parts[number] += by[number].recv(1 << 16)
            if is_whole(parts[number]):
                if not parts[number].startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(f"no answer: {parts[number][:300]!r}")
                parts[number], done = b"", done + 1
                by[number].sendall(request)
    poll.close()
    for end in ends:
        end.close()
    return done / (now - began)


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, which a busy machine changes less than the clock's."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """Return the memory of a process and its children."""
    pages = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(folder.name) == pid or int(stat[1]) == pid:
                pages += int((folder / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def held(way: Way, count: int) -> Iterator[None]:
    """Keep streams open whose first piece has come."""
    with ExitStack() as opened:
        for _ in range(count):
            end = opened.enter_context(connected(way))
            take(end, way.request(1, stream=True), has_text)
        yield


# The gateways ---------------------------------------------------------------------------------------------------------


def missing() -> str | None:
    """Return why there are no peers; None when they are installed."""
    if (PEERS / ROUTER).exists() and (PEERS / PORTKEY).exists():
        return None
    if not shutil.which("npm"):
        return "npm is not installed"
    PEERS.mkdir(parents=True, exist_ok=True)
    (PEERS / "package.json").write_text(json.dumps({"private": True, "dependencies": PACKAGES}))
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    try:
        done = subprocess.run(
            command, cwd=PEERS, capture_output=True, text=True, timeout=INSTALL_S_MAX, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"installing them took over {INSTALL_S_MAX} s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["npm failed"])[-1][:120]


@contextmanager
def child(*command: str, cwd: Path, env: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """Run a program until the block ends; yield it and when it was started."""
    # Else Python would compile our modules at each start.
    without = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    program = subprocess.Popen(
        command, cwd=cwd, env={**without, **env}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield program, began
    finally:
        program.kill()
        program.wait()
        assert program.stdout is not None
        program.stdout.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def until_listening(port: int, began: float) -> float:
    """Return the milliseconds from a start to the first connection."""
    while time.perf_counter() < began + START_S_MAX:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return (time.perf_counter() - began) * 1000
        time.sleep(0.002)
    raise RuntimeError(f"nothing listens on port {port} after {START_S_MAX} s")


@contextmanager
def ours(folder: Path, upstream: int) -> Iterator[list[Way]]:
    """Start our gateway, with a model of each protocol."""
    home = folder / "home"
    rows = "".join(
        f'[backends.{name}]\nhost = "api"\noptions = {{ protocol = "{protocol}", '
        f'base_url = "http://127.0.0.1:{upstream}/v1" }}\nenv = {{ BACKPLANE_MODEL_KEY = "k" }}\n'
        for name, protocol in (("chat", "openai_compatible"), ("messages", "anthropic"))
    )
    (folder / "backplane.toml").write_text(f'{rows}[gateway.models]\nsame = "chat/m"\nother = "messages/m"\n')
    command = [sys.executable, "-m", "backplane", "gateway", "--port", "0"]
    env = {"BACKPLANE_HOME": str(home), "PYTHONPATH": str(ROOT)}
    with child(*command, cwd=folder, env=env) as (program, began):
        assert program.stdout is not None
        port = int(program.stdout.readline().decode().strip().rpartition(":")[2])
        took = (time.perf_counter() - began) * 1000
        key = program.stdout.readline().decode().split()[1]
        bearer = {"authorization": f"Bearer {key}"}
        yield [
            Way("ours, translated", port, "/v1/chat/completions", bearer, program.pid, took, "other"),
            Way("ours, same dialect", port, "/v1/chat/completions", bearer, program.pid, took, "same"),
        ]


@contextmanager
def router(folder: Path, upstream: int) -> Iterator[Way]:
    """Start claude-code-router, which answers Messages by a service of Chat."""
    port, place = free_port(), folder / ".claude-code-router"
    place.mkdir()
    provider = {"name": "bench", "api_base_url": f"http://127.0.0.1:{upstream}/v1/chat/completions", "api_key": "k",
                "models": ["m"]}  # fmt: skip
    settings = {"PORT": port, "HOST": "127.0.0.1", "APIKEY": KEY, "LOG": False, "NON_INTERACTIVE_MODE": True,
                "Providers": [provider], "Router": {"default": "bench,m"}}  # fmt: skip
    (place / "config.json").write_text(json.dumps(settings))
    env = {"HOME": str(folder), "SERVICE_PORT": str(port)}
    with child("node", str(PEERS / ROUTER), "start", cwd=folder, env=env) as (program, began):
        took = until_listening(port, began)
        yield Way("claude-code-router", port, "/v1/messages", {"x-api-key": KEY}, program.pid, took, "bench,m")


@contextmanager
def portkey(folder: Path, upstream: int) -> Iterator[Way]:
    """Start Portkey's gateway, which passes Chat on."""
    port = free_port()
    headers = {"x-portkey-provider": "openai", "x-portkey-custom-host": f"http://127.0.0.1:{upstream}/v1",
               "authorization": "Bearer k"}  # fmt: skip
    command = ["node", str(PEERS / PORTKEY), f"--port={port}", "--headless"]
    env = {"HOME": str(folder), "TRUSTED_CUSTOM_HOSTS": "127.0.0.1,localhost"}
    with child(*command, cwd=folder, env=env) as (program, began):
        took = until_listening(port, began)
        yield Way("portkey", port, "/v1/chat/completions", headers, program.pid, took)


# The measurement ------------------------------------------------------------------------------------------------------


def measure(*, with_peers: bool = True) -> dict[str, Any]:
    """Return the figures of each gateway by its name; those of the peers are missing where they are not installed."""
    absent = missing() if with_peers else "not asked"
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        program, _ = opened.enter_context(child(sys.executable, "-c", UPSTREAM, cwd=folder, env={}))
        assert program.stdout is not None
        upstream = int(program.stdout.readline())
        own = folder / "ours"
        own.mkdir()
        ways = opened.enter_context(ours(own, upstream))
        failed: dict[str, str] = {}
        for name, peer in (("claude-code-router", router), ("portkey", portkey)) if absent is None else ():
            place = folder / name
            place.mkdir()
            try:
                ways.append(opened.enter_context(peer(place, upstream)))
            except (RuntimeError, OSError) as error:
                failed[name] = str(error)[:160]
        direct = Way("direct", upstream, "/v1/chat/completions")
        figures: dict[str, dict[str, Any]] = {way.name: {"start_ms": way.start_ms} for way in ways}
        for way in ways:
            assert way.pid is not None
            figures[way.name]["rss_idle"] = rss_mib(way.pid)
        attempt = Attempts(figures)
        added(ways, direct, figures, attempt, upstream)
        for count in OPEN:
            tell(upstream, 0)
            for way in ways:
                assert way.pid is not None
                with attempt(way, f"rss_{count}"), held(way, count):
                    figures[way.name][f"rss_{count}"] = rss_mib(way.pid)
        return {"absent": absent, "failed": failed, "figures": figures}


class Attempts:
    """Notes a measurement that a gateway does not take, in place of its figure."""

    def __init__(self, figures: dict[str, dict[str, Any]]) -> None:
        self._figures = figures

    @contextmanager
    def __call__(self, way: Way, name: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            self._figures.get(way.name, {})[f"{name}_failed"] = str(error)[:300]


def added(ways: list[Way], direct: Way, figures: dict[str, dict[str, Any]], attempt: Attempts, upstream: int) -> None:
    """Measure what each way adds to the direct one."""
    tell(upstream, 3)
    for name, size in SIZES.items():
        alone = statistics.median(firsts(direct, size))
        for way in ways:
            assert way.pid is not None
            with attempt(way, f"first_{name}"):
                before = cpu_s(way.pid)
                figures[way.name][f"first_{name}_ms"] = statistics.median(firsts(way, size)) - alone
                figures[way.name][f"cpu_{name}_ms"] = (cpu_s(way.pid) - before) * 1000 / (FIRSTS + WARM)
    alone = statistics.median(wholes(direct, 1))
    for way in ways:
        with attempt(way, "whole"):
            figures[way.name]["whole_ms"] = statistics.median(wholes(way, 1)) - alone
    tell(upstream, CHUNKS)
    taken: dict[str, list[float]] = {}
    for _ in range(STREAMS):
        for way in (direct, *ways):
            with attempt(way, "chunk"):
                taken.setdefault(way.name, []).append(stream_s(way))
    for way in ways:
        if taken.get(way.name):
            figures[way.name]["chunk_us"] = (min(taken[way.name]) - min(taken["direct"])) / CHUNKS * 1e6
    tell(upstream, 3)
    for _ in range(2):
        for way in ways:
            with attempt(way, "per_s"):
                assert way.pid is not None
                best, before = figures[way.name].get("per_s", 0.0), cpu_s(way.pid)
                found = per_second(way)
                figures[way.name]["cpu_ms"] = (cpu_s(way.pid) - before) * 1000 / (found * LOAD_S)
                figures[way.name]["per_s"] = max(best, found)


def tell(upstream: int, chunks: int) -> None:
    """Set the number of chunks of a stream; 0 leaves it open after the first."""
    with socket.create_connection(("127.0.0.1", upstream)) as end:
        end.sendall(f"GET /set/{chunks} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        end.recv(100)


if __name__ == "__main__":
    print(json.dumps(measure(with_peers="--alone" not in sys.argv), indent=1 if "--alone" in sys.argv else None))
