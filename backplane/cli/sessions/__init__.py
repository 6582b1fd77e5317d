"""Shared parts of the `sessions` commands."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import anyio

from backplane import config
from backplane.cli import asking, streams, terminal
from backplane.cli import options as add
from backplane.cli.command import Args, Parser, load_settings
from backplane.contract.conversation import SessionFile, UserMessage
from backplane.contract.events import RunCompleted, RunStarted
from backplane.providers import ErrorEvent, MessageDoneEvent, ProviderRegistry, Session, SessionConfig, store

ID_CHARS: Final = 8
"""Characters of a session's id in a list; any beginning that only one session has names it."""


def read(home: Any, name: str) -> SessionFile:
    """Read the session with this id, beginning of an id, or `last`."""
    return store.read(store.path_of(home, store.find(home, name)))


def turn_options(p: Parser) -> None:
    """Add the options of one turn."""
    add.on_ask(p)
    add.value(
        p, "--policy", metavar="FILE", help="tighten the session's policy with this one: a file, default, strict or ci"
    )
    add.config(p)


def turn_config(args: Args, model: str | None = None) -> SessionConfig:
    how = args.on_ask or ("prompt" if streams.is_interactive() else "deny")
    return SessionConfig(model=model, policy=args.policy, on_ask=asking.callback(how, lambda: "", dict(os.environ)))


async def turn(session: Any, words: str | UserMessage) -> int:
    """Send one message, and print what comes; return 1 if the turn failed."""
    async with session:
        before = session.losses
        end = await show_turn(session, words, terminal.Terminal(terminal.look(plain=True), None))
        if session.losses == before:
            print_losses(before)
        return 1 if end.stop_reason == "error" else 0


async def show_turn(session: Session, words: str | UserMessage, shown: terminal.Terminal) -> MessageDoneEvent:
    """Send one message, draw its events, and return the last one; losses and a failure go to stderr."""
    before, failure, end = session.losses, None, None
    async for event in session.send_for_events(words):
        if isinstance(event, ErrorEvent):
            failure = event.error.cause
        elif isinstance(event, MessageDoneEvent):
            end = event
        else:
            is_frame = isinstance(event, RunStarted | RunCompleted)
            shown.add("" if is_frame else shown.look.event(event), [event])
        if shown.is_full:
            streams.write(shown.frame())
    assert end is not None
    shown.add(shown.look.end_line() + ("" if end.stop_reason == "end_turn" else f"ended: {end.stop_reason}\n"))
    streams.write(shown.clear())
    if failure is not None:
        streams.error(failure)
    print_losses(tuple(loss for loss in session.losses if loss not in before))
    return end


def print_losses(losses: tuple[str, ...]) -> None:
    for loss in losses:
        streams.complain(f"not carried: {streams.one_line(loss)}\n")


def with_registry(args: Args, work: Callable[[Any], Any]) -> int:
    """Run a function with the providers of this configuration."""
    environ = dict(os.environ)
    settings = load_settings(args)

    async def main() -> int:
        async with ProviderRegistry(settings, config.home(environ), environ) as registry:
            code: int = await work(registry)
            return code

    return anyio.run(main)
