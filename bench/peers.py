"""The same measurements over other people's clients: `bench/peers.py NAME ARGUMENT…` prints JSON.

Run by the Python of `.venv-bench`, where the peers are; each is used as its own manual says, by
its public client over standard input and output, with a child that says 200 bytes a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

CHILD = str(Path(__file__).with_name("child.py"))
FEW = 200
"""Events of the run that is taken off; enough for all that happens once."""

Take = Callable[[str], None]
Play = Callable[[str, int, Take], Awaitable[None]]


def command(dialect: str, mode: str, count: int) -> list[str]:
    return [sys.executable, "-E", "-s", CHILD, dialect, mode, str(count)]


# Peers: each plays one session of `count` events and gives every event's text to `take`. ------------------------------


@asynccontextmanager
async def mcp_session(mode: str, count: int, heard: Any) -> AsyncIterator[Any]:
    from mcp import ClientSession, StdioServerParameters  # type: ignore[import-not-found,unused-ignore]
    from mcp.client.stdio import stdio_client  # type: ignore[import-not-found,unused-ignore]

    program, *arguments = command("mcp", mode, count)
    async with (
        stdio_client(StdioServerParameters(command=program, args=arguments)) as (reader, writer),
        ClientSession(reader, writer, logging_callback=heard) as session,
    ):
        await session.initialize()
        yield session


async def mcp(mode: str, count: int, take: Take) -> None:
    left, done = count, asyncio.Event()

    async def heard(params: Any) -> None:
        nonlocal left
        take(params.data)
        left -= 1
        if not left:
            done.set()

    async with mcp_session(mode, count, heard):
        await done.wait()


async def acp(mode: str, count: int, take: Take) -> None:
    import acp as peer  # type: ignore[import-not-found,unused-ignore]

    class Client:
        async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
            take(update.content.text)

        def on_connect(self, _: Any) -> None:
            """Called by the library."""

    async with peer.spawn_agent_process(Client(), *command("acp", mode, count)) as (connection, _):
        await connection.initialize(protocol_version=peer.PROTOCOL_VERSION)
        session = await connection.new_session(cwd=os.getcwd(), mcp_servers=[])
        await connection.prompt(prompt=[peer.text_block("go")], session_id=session.session_id)


def fake_cli(mode: str, count: int) -> str:
    """A program in the place of the vendor's own, that says stream-json lines."""
    path = Path(tempfile.mkdtemp()) / "claude"
    words = " ".join(f"'{word}'" for word in command("claude", mode, count))
    path.write_text(f'#!/bin/sh\n[ "$1" = -v ] && {{ echo "99.0.0 (Claude Code)"; exit; }}\nexec {words}\n')
    path.chmod(0o755)
    return str(path)


async def claude_client(mode: str, count: int, take: Take) -> None:
    from claude_agent_sdk import (  # type: ignore[import-not-found,unused-ignore]
        AssistantMessage,
        ClaudeAgentOptions,
        ClaudeSDKClient,
    )

    async with ClaudeSDKClient(ClaudeAgentOptions(cli_path=fake_cli(mode, count))) as client:
        await client.query("go")
        async for message in client.receive_response():
            if isinstance(message, AssistantMessage):
                take(message.content[0].text)


async def claude_transport(mode: str, count: int, take: Take) -> None:
    from claude_agent_sdk import ClaudeAgentOptions
    from claude_agent_sdk._internal.transport.subprocess_cli import (  # type: ignore[import-not-found,unused-ignore]
        SubprocessCLITransport,
    )

    transport = SubprocessCLITransport(prompt=nothing(), options=ClaudeAgentOptions(cli_path=fake_cli(mode, count)))
    await transport.connect()
    await transport.write('{"type":"user"}\n')
    async for message in transport.read_messages():
        if message["type"] == "result":
            break
        take(message["message"]["content"][0]["text"])
    await transport.close()


async def nothing() -> AsyncIterator[dict[str, Any]]:
    return
    yield {}


PEERS: dict[str, Play] = {
    "mcp": mcp,
    "acp": acp,
    "claude_client": claude_client,
    "claude_transport": claude_transport,
}


# Measurements ---------------------------------------------------------------------------------------------------------


async def cpu_of(play: Play, count: int) -> float:
    seen = 0

    def take(_: str) -> None:
        nonlocal seen
        seen += 1

    began = time.process_time()
    await play("stream", count, take)
    assert seen == count, f"{seen} of {count}"
    return time.process_time() - began


def stream(name: str, count: int) -> dict[str, Any]:
    """CPU µs an event, the fixed cost taken off."""

    async def both() -> float:
        await cpu_of(PEERS[name], FEW)
        few = await cpu_of(PEERS[name], FEW)
        return (await cpu_of(PEERS[name], count) - few) / (count - FEW) * 1e6

    return {"us": asyncio.run(both())}


def paced(name: str, count: int) -> dict[str, Any]:
    """Microseconds from the writing of an event to its consumer, the middle one."""
    waited: list[int] = []
    asyncio.run(PEERS[name]("paced", count, lambda text: waited.append(time.monotonic_ns() - int(text.split()[0]))))  # type: ignore[arg-type]
    return {"us": sorted(waited)[len(waited) // 2] / 1000}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(name: str, sessions: int) -> dict[str, Any]:
    """Bytes of the process with one open session, and for each further one."""
    assert name == "mcp"

    async def hold() -> dict[str, Any]:
        async def heard(_: Any) -> None:
            """Nothing is said in an idle session."""

        opened = []
        one = 0
        for number in range(sessions + 1):
            session = mcp_session("idle", 0, heard)
            await session.__aenter__()
            opened.append(session)
            one = one or resident_bytes()
            del number
        each = (resident_bytes() - one) / sessions
        for session in reversed(opened):
            await session.__aexit__(None, None, None)
        return {"one_bytes": one, "each_bytes": each, "threads": threading.active_count()}

    return asyncio.run(hold())


WORK: dict[str, Callable[..., dict[str, Any]]] = {"stream": stream, "paced": paced, "memory": memory}


def main() -> None:
    name, *arguments = sys.argv[1:]
    print(json.dumps(WORK[name](*(int(word) if word.isdigit() else word for word in arguments))))


if __name__ == "__main__":
    main()
