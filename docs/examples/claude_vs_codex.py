"""Run one order on two agents from the same tree, and compare the results; a winner needs data that names it."""

import asyncio
import sys

from backplane import ControlPlane, WorkOrder
from backplane.routing.compare import Side, compare


async def main(first: str, second: str, rounds: str = "3") -> None:
    async with ControlPlane() as plane:
        order = WorkOrder("Write the word of the day into word.txt.")
        found = await compare(plane, order, [Side(first), Side(second)], check="test -s word.txt", repeat=int(rounds))
    for side in found.sides:
        money = side.cost_usd_micros
        cost = f"${money.value / 1e6:.6f}" if money is not None else "an unknown sum"
        print(f"{side.side}: {side.succeeded} of {side.runs} passed, {cost} a run, {side.patches} different patches")
    for verdict in found.verdicts:
        print(f"{verdict.measure}: {verdict.better or 'nothing can be said'}")


if len(sys.argv) not in (1, 3, 4):
    sys.exit("usage: claude_vs_codex.py [A B [ROUNDS]]")
asyncio.run(main(*(sys.argv[1:] or ("claude", "codex"))))
