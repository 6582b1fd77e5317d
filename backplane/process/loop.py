"""asyncio's own loop, where it calls us outside of any task; on trio there is none.

anyio has to know there which loop it is on. It asks `sniffio` where that is installed (trio brings it), and that looks
at the present task, unless it was told: `anyio.run` tells it, `asyncio.run` does not.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.lowlevel

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


def asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that this is called on; None on trio."""
    loop: Any = anyio.lowlevel.current_token().native_token
    return loop if hasattr(loop, "create_task") else None


def register(how: Callable[..., T], *given: Any) -> T:
    """Have the loop call something later: `how` is one of its methods, as `call_later` and `add_reader`.

    What is called then, and every task that it begins, can use all of anyio.
    """
    context = contextvars.copy_context()
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None and context.get(sniffio.current_async_library_cvar) is None:
        context.run(sniffio.current_async_library_cvar.set, "asyncio")
    return context.run(how, *given)
