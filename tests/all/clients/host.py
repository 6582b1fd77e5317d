"""A host for the client tests: says texts of any size, any number of times, and may wait then.

The order's `config.vendor.texts` is `{count, bytes, wait_s}`.
"""

from __future__ import annotations

from typing import Any

import anyio

from backplane.contract.capability import NATIVE
from backplane.host import Done, Host, HostRun, main


async def work(run: HostRun) -> Done:
    """Say what the order asks for."""
    wanted: dict[str, Any] = run.order.config.vendor["texts"]
    for number in range(wanted["count"]):
        await run.message(chr(ord("a") + number % 26) * wanted["bytes"])
    await anyio.sleep(wanted["wait_s"])
    return Done()


if __name__ == "__main__":
    main(Host(id="texts", capabilities={"streaming": NATIVE}), work)
