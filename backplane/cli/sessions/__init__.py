"""Shared parts of the `sessions` commands."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import anyio

from backplane import config
from backplane.cli import asking, streams
from backplane.cli import options as add
from backplane.cli.command import Args, Parser, load_settings
from backplane.cli.talk import Teller
from backplane.contract.conversation import SessionFile, UserMessage
from backplane.providers import ProviderRegistry, SessionConfig, store

ID_CHARS: Final = 8
"""Characters of a session's id in a list; any beginning that only one session has names it."""


def read(home: Any, name: str) -> SessionFile:
    """Read the session with this id, beginning of an id, or `last`."""
    return store.read(store.path_of(home, store.find(home, name)))


def turn_options(p: Parser) -> None:
    """Add the options of one turn."""
    p.add_argument(
        "--on-ask", choices=("deny", "allow", "prompt"),
        help="answer approvals so (default: prompt on a terminal, else deny)",
    )  # fmt: skip
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
        before, teller = session.losses, Teller(streams.write)
        async for event in session.send_message(words):
            teller.tell(event)
        print_losses(tuple(loss for loss in session.losses if loss not in before) or before)
        return 0 if teller.stop_reason not in ("error", None) else 1


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
