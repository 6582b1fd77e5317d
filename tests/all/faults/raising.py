"""Raise at one call of the package, or note the calls that a run comes to."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import anyio
import anyio.to_thread

import backplane

PACKAGE = str(Path(backplane.__file__).parent) + os.sep

WORDS = "raised on purpose"


class Raised(RuntimeError):
    """What nobody foresaw."""


class Probe:
    """Notes the places that a run comes to, or raises at one of them, once.

    A place is a function of the package and the one that called it, `…` for none of the package.
    """

    def __init__(self, place: str | None = None) -> None:
        self.places: dict[str, int] = {}
        self.raised = False
        self._place = place

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or self.raised:
            return
        caller = frame.f_back.f_code if frame.f_back is not None else None
        by = named(caller) if caller is not None and caller.co_filename.startswith(PACKAGE) else "…"
        place = f"{named(code)} < {by}"
        if self._place is None:
            self.places[place] = self.places.get(place, 0) + 1
        elif place == self._place:
            self.raised = True
            raise Raised(WORDS)


def named(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}"


@contextmanager
def probing(probe: Probe) -> Iterator[None]:
    """Have the probe called for every call of this thread, and of every function that is given to a worker thread."""
    real = anyio.to_thread.run_sync

    def unraisable(what: Any) -> None:
        probe.raised = not isinstance(what.exc_value, Raised)  # A generator was closed: nobody can raise there.

    def run_sync(work: Callable[..., Any], *given: Any, **how: Any) -> Any:
        def probed(*given: Any) -> Any:
            sys.setprofile(probe)
            try:
                return work(*given)
            finally:
                sys.setprofile(None)

        return real(probed, *given, **how)

    before = sys.getprofile()
    anyio.to_thread.run_sync = run_sync  # type: ignore[assignment]
    lost, sys.unraisablehook = sys.unraisablehook, unraisable
    threading.setprofile(probe)
    sys.setprofile(probe)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        anyio.to_thread.run_sync = real
        sys.unraisablehook = lost
