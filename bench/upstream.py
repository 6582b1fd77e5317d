"""What a model's stream costs: one measurement in a process of its own, `bench/upstream.py WAY ARGUMENT…` prints JSON.

`paced` takes the time from a request's arrival to the last event, by the clock that server and reader share: a bare
HTTP client, one turn of a model, and a whole run through `hosts/api`. `cpu` takes a reader's processor time a chunk,
beside the vendors' own clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

CHUNKS, PACE_NS = 1_000, 1_000_000
FEW, MANY = 200, 3_000
"""Chunks of the answers whose difference is taken: what does not grow with chunks falls out."""
WORD = "some words of an answer, "
KEY = "sk-bench"
QUESTION = [{"role": "user", "content": "go"}]
BASES = {
    "openai_compatible": "/v1", "openai_responses": "/v1", "anthropic": "/v1", "gemini_ai_studio": "/v1beta",
}  # fmt: skip


# A server that paces --------------------------------------------------------------------------------------------------


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer every request with `CHUNKS` chunks, one a millisecond by the clock; the first says when it arrived."""
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            writer.close()
            return
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(length)
        began = time.monotonic_ns()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number in range(CHUNKS):
            await asyncio.sleep(max(began + number * PACE_NS - time.monotonic_ns(), 0) / 1e9)
            send(writer, chunk({"content": f"{began} " if not number else WORD}, None))
        send(writer, chunk({}, "stop"))
        send(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def chunk(delta: dict[str, str], stop: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": stop}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def pace() -> None:
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


@contextmanager
def served(*command: str) -> Iterator[str]:
    """Run a server as a child; gives its root address."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(child.stdout.readline())}"
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


# Time -----------------------------------------------------------------------------------------------------------------


async def paced_bare(root: str) -> int:
    import httpx

    body = {"model": "m", "stream": True, "messages": QUESTION}
    async with httpx.AsyncClient() as client:
        for _ in range(2):  # the first opens the connection
            took = b""
            async with client.stream("POST", f"{root}/v1/chat/completions", json=body) as response:
                async for data in response.aiter_bytes():
                    took = took or data
            ended = time.monotonic_ns()
    return ended - int(json.loads(took[6:].splitlines()[0])["choices"][0]["delta"]["content"])


@asynccontextmanager
async def opened(root: str, protocol: Any) -> AsyncIterator[Callable[[], Awaitable[list[Any]]]]:
    """Give a coroutine that asks once and returns the events it heard."""
    from backplane.contract.canonical import timestamp_at
    from backplane.dialects.ir import Conversation, Message, Text
    from backplane.upstream.client import Upstream
    from backplane.upstream.completion import ModelClient
    from backplane.upstream.endpoint import PROTOCOLS, Endpoint

    heard: list[Any] = []
    asked = Conversation(
        dialect=PROTOCOLS[protocol].dialect, model="m", messages=(Message(role="user", parts=(Text(text="go"),)),),
        options={"max_tokens": 4096} if protocol == "anthropic" else {},
    )  # fmt: skip

    async def hear(event: Any) -> None:
        heard.append(event)

    async with Upstream(Endpoint(protocol=protocol, base_url=root + BASES[protocol], api_key=KEY)) as up:
        model = ModelClient(up)

        async def ask() -> list[Any]:
            heard.clear()
            await model.ask(asked, hear, lambda: timestamp_at(time.time_ns()))
            return heard

        yield ask


async def paced_turn(root: str) -> int:
    async with opened(root, "openai_compatible") as ask:
        await ask()
        heard = await ask()
        ended = time.monotonic_ns()
    return ended - int(next(event.text for event in heard if hasattr(event, "text")))


async def paced_host(root: str) -> int:
    """A whole run: the last delta at the consumer of a control plane, of a host that is up when it asks."""
    import backplane
    from backplane.config import BackendSettings, Settings
    from backplane.contract.events import AssistantDelta
    from backplane.runtime import backends

    options = {"protocol": "openai_compatible", "base_url": f"{root}/v1", "key_env": "BENCH_KEY", "model": "m"}
    settings = Settings(backends={"bench": BackendSettings(host="api", options=options)})
    host = backends.find("bench", settings, {**os.environ, "BENCH_KEY": KEY})
    began, ended, count = 0, 0, 0
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory() as home:
        async with backplane.start("go", backend=host, root=Path(work), home=Path(home)) as run:
            async for event in run:
                if isinstance(event, AssistantDelta):
                    began = began or int(event.text)
                    ended, count = time.monotonic_ns(), count + 1
    assert count == CHUNKS
    return ended - began


# Processor time -------------------------------------------------------------------------------------------------------


async def cpu_ours(root: str, protocol: str) -> None:
    async with opened(root, protocol) as ask:
        await ask()


async def cpu_bare(root: str, protocol: str) -> None:
    import httpx

    paths = {"openai_compatible": "/chat/completions", "openai_responses": "/responses", "anthropic": "/messages",
             "gemini_ai_studio": "/models/m:streamGenerateContent?alt=sse"}  # fmt: skip
    body: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": 10, "messages": QUESTION, "input": "go"}
    if protocol == "gemini_ai_studio":
        body = {"contents": [{"parts": [{"text": "go"}]}]}
    async with (
        httpx.AsyncClient() as client,
        client.stream("POST", root + BASES[protocol] + paths[protocol], json=body) as response,
    ):
        async for _ in response.aiter_bytes():
            pass


async def cpu_sdk(root: str, protocol: str) -> None:
    """The plainest loop over a stream that the vendor's asynchronous client has."""
    import importlib

    stream: Any
    if protocol == "gemini_ai_studio":
        genai = importlib.import_module("google.genai")
        client = genai.Client(api_key=KEY, http_options={"base_url": root})
        stream = await client.aio.models.generate_content_stream(model="m", contents="go")
    elif protocol == "anthropic":
        client = importlib.import_module("anthropic").AsyncAnthropic(base_url=root, api_key=KEY)
        stream = await client.messages.create(model="m", max_tokens=10, messages=QUESTION, stream=True)
    else:
        client = importlib.import_module("openai").AsyncOpenAI(base_url=root + "/v1", api_key=KEY)
        if protocol == "openai_compatible":
            stream = await client.chat.completions.create(model="m", messages=QUESTION, stream=True)
        else:
            stream = await client.responses.create(model="m", input="go", stream=True)
    async for _ in stream:
        pass


def cpu(way: str, protocol: str, script: Callable[[int], str]) -> float:
    """Microseconds of processor time a chunk."""
    read = {"ours": cpu_ours, "bare": cpu_bare, "sdk": cpu_sdk}[way]
    took = []
    for count in (FEW, FEW, MANY):  # the first one also loads and warms
        with served(sys.executable, "-m", "backplane.testing", script(count)) as root:
            before = resource.getrusage(resource.RUSAGE_SELF)
            asyncio.run(read(root, protocol))
            after = resource.getrusage(resource.RUSAGE_SELF)
        took.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return (took[2] - took[1]) / (MANY - FEW) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["pace", "paced", "cpu"])
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    if options.what == "pace":
        asyncio.run(pace())
        return
    if options.what == "paced":
        read = {"bare": paced_bare, "turn": paced_turn, "host": paced_host}[options.words[0]]
        with served(sys.executable, __file__, "pace") as root:
            print(json.dumps({"ms": asyncio.run(read(root)) / 1e6}))
        return
    with tempfile.TemporaryDirectory() as folder:

        def script(count: int) -> str:
            path = Path(folder, f"{count}.json")
            path.write_text(json.dumps([{"text": WORD * count, "pieces": count, "times": None}]))
            return str(path)

        print(json.dumps({"us": cpu(options.words[0], options.words[1], script)}))


if __name__ == "__main__":
    main()
