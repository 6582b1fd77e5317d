"""Runs under asyncio's own runner: nobody tells anyio there which loop it is on, and `sniffio` looks at the task."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from backplane.contract.approval import Decision
from backplane.runtime.run import Run
from tests.runs import ended, go, order, plane, saying, script, texts

pytestmark = pytest.mark.timeout(40)

ENDS = {
    "it ends": ("os._exit(3)", "host_exit"),
    "a line that is no JSON": ('put(b"{bad\\n"); end()', "protocol"),
    "silence": ("end()", "idle"),
    "its output closed": ("os.close(1); end()", "host_exit"),
    "its input not read": (
        """
for number in range(3000):
    put({"t": "ask", "ref_id": run["id"], "id": str(number), "kind": "tool", "name": "b", "input": {"a": 3000 * "x"}})
time.sleep(60)""",
        "idle",
    ),
    "its end": ("put(final(run)); end()", "complete"),
}


@pytest.fixture(autouse=True)
def untold() -> None:
    """Where it is not installed, anyio asks asyncio itself."""
    sniffio = pytest.importorskip("sniffio")
    assert "sniffio" in sys.modules
    with pytest.raises(sniffio.AsyncLibraryNotFoundError):
        sniffio.current_async_library()


@pytest.mark.parametrize("how", ENDS)
def test_a_run_ends_as_under_any_runner(how: str, backplane_home: Path, root: Path, tmp_path: Path) -> None:
    body, reason = ENDS[how]
    hello = 'hello(extensions=["ask/1"]); run = take(); put(event(run)); time.sleep(0.1)\n'
    backend = script(tmp_path, hello + body)

    async def run() -> str:
        async with plane(backplane_home, idle_s=0.8) as control:
            done, _ = await go(control, order(root), backend)
            return ended(done)[0]

    assert asyncio.run(run()) == reason
    assert os.listdir(backplane_home / "stage") == []


ASKS = """
hello(extensions=["ask/1"]); run = take(); put(event(run)); time.sleep(0.1)
put({"t": "ask", "ref_id": run["id"], "id": "a1", "kind": "tool", "name": "Bash", "input": {"command": "ls"}})
put(event(run, take()["decision"]), final(run)); end()
"""


@pytest.mark.parametrize("handed", [False, True], ids=["read where it began", "read by another task"])
def test_an_ask_waits_for_its_answer(handed: bool, backplane_home: Path, root: Path, tmp_path: Path) -> None:
    backend = script(tmp_path, ASKS)

    async def run() -> list[str]:
        said: list[str] = []

        async def read(begun: Run) -> None:
            async for event in begun:
                said.extend(texts([event]))

        async with plane(backplane_home) as control:
            answer = saying(Decision(decision="allow"))
            async with control.start(order(root), backend, on_ask=answer) as begun:
                await (asyncio.create_task(read(begun)) if handed else read(begun))
        return said

    assert asyncio.run(run()) == ["a", "allow"]
