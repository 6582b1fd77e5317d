"""The public Python SDK of the Model Context Protocol as a client of `backplane mcp`; run by the referees' Python.

Arguments: the command to start, as JSON. Prints one JSON object of what was seen.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import anyio
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("run", {"task": "echo hi > a.txt", "backend": "shell"}),
    ("receipts", {}),
    ("validate", {"document": {"task": 3}}),
    ("validate", {"document": '{"task": "x"}'}),
    ("run", {}),
    ("run", {"task": "x", "root": "../.."}),
    ("run", {"task": "x", "backend": "nobody"}),
)


async def main() -> None:
    command = json.loads(sys.argv[1])
    server = StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ))
    seen: dict[str, Any] = {"progress": [], "answers": []}

    async def progress(done: float, total: float | None, message: str | None) -> None:
        seen["progress"].append([done, message])

    async with stdio_client(server) as (reader, writer), ClientSession(reader, writer) as session:
        hello = await session.initialize()
        seen["server"] = hello.server_info.name
        seen["tools"] = [tool.name for tool in (await session.list_tools()).tools]
        await session.send_ping()
        for name, arguments in CALLS:
            answer = await session.call_tool(name, arguments, progress_callback=progress)
            seen["answers"].append([answer.is_error, answer.structured_content])
        try:
            await session.call_tool("no such tool", {})
        except Exception as error:
            seen["refused"] = str(error)
    print(json.dumps(seen))


anyio.run(main)
