"""Shared parts of the `sessions` commands."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from backplane import config
from backplane.cli import asking, streams, terminal
from backplane.cli import options as add
from backplane.cli.command import Args, Parser, load_settings
from backplane.contract.conversation import SessionFile, UserMessage
from backplane.contract.events import RunCompleted, RunStarted
from backplane.providers import ProviderRegistry, Session, SessionConfig, TurnOutcome, store


def read(home: Any, name: str) -> SessionFile:
    """Read the session with this id, beginning of an id, or `last`."""
    return store.read(store.path_of(home, store.find(home, name)))


def with_registry(args: Args, work: Callable[[Any], Awaitable[int]]) -> int:
    """Run a function with the providers of this configuration."""
    environ = dict(os.environ)
    settings = load_settings(args)

    async def main() -> int:
        async with ProviderRegistry(settings, config.home(environ), environ) as registry:
            return await work(registry)

    return anyio.run(main)


def keep(args: Args, make: Callable[[Any], Awaitable[Session]]) -> int:
    """Save the session that a function makes from the providers, and print its id."""

    async def work(registry: Any) -> int:
        async with await make(registry) as session:
            await session.save()
            streams.write(f"{session.id}\n")
            print_losses(session.losses)
        return 0

    return with_registry(args, work)


def turn_options(p: Parser) -> None:
    """Add the options of one turn."""
    add.session_id(p)
    add.on_ask(p)
    add.value(
        p, "--policy", metavar="FILE",
        help="tighten the session's policy with this policy: a JSON file, or a built-in policy (default, strict or ci)",
    )  # fmt: skip
    add.config(p)


async def resumed(registry: ProviderRegistry, id: str, wish: SessionConfig, backend: str | None = None) -> Session:
    """Continue a stored session, with its own backend if none is named."""
    file = read(registry.plane.home, id)
    return await registry.get(backend or file.provider).resume(file.id, wish)


def send(args: Args, words: str | UserMessage, backend: str | None = None, model: str | None = None) -> int:
    """Send one message to a stored session, and print what comes; return 1 if the turn failed."""
    answers = asking.callback(asking.chosen_way(args.on_ask), lambda: "", dict(os.environ))

    async def work(registry: Any) -> int:
        wish = SessionConfig(model=model, policy=args.policy, on_ask=answers)
        async with await resumed(registry, args.id, wish, backend) as session:
            print_losses(session.losses)
            end = await show_turn(session, words, terminal.Terminal(terminal.look(plain=True), None))
            return 1 if end.stop_reason == "error" else 0

    return with_registry(args, work)


async def show_turn(session: Session, words: str | UserMessage, shown: terminal.Terminal) -> TurnOutcome:
    """Send one message, draw its events, and return the last one; losses and a failure go to stderr."""
    before, end = session.losses, None
    async for event in session.send_message(words):
        if isinstance(event, TurnOutcome):
            end = event
        else:
            is_frame = isinstance(event, RunStarted | RunCompleted)
            shown.add("" if is_frame else shown.look.event(event), [event])
        if shown.is_full:
            streams.write(shown.frame())
    assert end is not None
    shown.add(shown.look.end_line() + ("" if end.stop_reason == "end_turn" else f"ended: {end.stop_reason}\n"))
    streams.write(shown.clear())
    if end.error is not None:
        streams.error(end.error.cause)
    print_losses(tuple(loss for loss in session.losses if loss not in before))
    return end


def print_losses(losses: tuple[str, ...]) -> None:
    for loss in losses:
        streams.complain(f"not carried over: {streams.one_line(loss)}\n")
