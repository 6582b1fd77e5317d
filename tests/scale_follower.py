"""Follows orders of a queue and notes what it heard, until they have ended; started again it goes on where it was.

Argv: the engine's URL, the file of notes, the orders.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TextIO

import anyio

from backplane.errors import BackplaneError
from backplane.scale.durable import DurableEngine


def whole_lines(path: Path) -> list[str]:
    """What was noted, without a line that was cut in the middle."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    text = text[: text.rfind("\n") + 1]
    path.write_text(text, encoding="utf-8")
    return text.splitlines()


async def follow(engine: DurableEngine, file: TextIO, order: str, after: int) -> None:
    while True:
        try:
            async for event in engine.events(order, after=after):
                file.write(json.dumps([order, event.attempt, event.seq, event.cursor]) + "\n")
                file.flush()
                after = event.cursor
            return
        except BackplaneError as error:  # The database is away: it comes back.
            print(error, flush=True)
            await anyio.sleep(0.5)


async def main(url: str, path: Path, orders: list[str]) -> None:
    cursors = dict.fromkeys(orders, 0)
    for order, *event in map(json.loads, whole_lines(path)):
        cursors[order] = event[-1]
    engine = DurableEngine(url)
    with path.open("a", encoding="utf-8") as file:
        async with anyio.create_task_group() as tasks:
            for order, after in cursors.items():
                tasks.start_soon(follow, engine, file, order, after)
    engine.close()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
