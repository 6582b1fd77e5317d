"""`init`: a first `backplane.toml`, from what is ready on this machine."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, wrong, wrong_words
from backplane.runtime import backends

if TYPE_CHECKING:
    from backplane.runtime.backends import BackendStatus

POLICIES: Final = {
    "default": "git's hooks and configuration are not written",
    "strict": "the same, no keys or .env files are read, and no network beyond the model",
    "ci": "as strict, and the agent has no tool to ask a person",
}

FALLBACK: Final = "shell"
"""Backend if no agent is ready: it needs no key and no network."""

SCRIPTED: Final = (FALLBACK, "mock")
"""Backends that no agent is behind."""


HELP = "Write a first backplane.toml in this folder: the default backend and the default policy."
EXAMPLE = "backplane init\nbackplane init --backend shell --policy ci --yes"


def options(p: Parser) -> None:
    add.value(p, "-b", "--backend", metavar="NAME", help="use this backend, and do not ask for one")
    p.add_argument("--policy", choices=tuple(POLICIES), help="use this policy, and do not ask for one")
    add.flag(p, "-y", "--yes", help="ask nothing: take the first ready backend and the policy `default`")


def run(args: Args) -> int:
    path = streams.folder() / config.FILE_NAME
    if os.path.lexists(path):
        raise wrong(f"{path} already exists", f"edit it, then run: backplane validate {path}")
    asks = not args.yes and streams.is_interactive()
    if not asks and not args.yes:
        raise wrong("no terminal to ask questions on", "backplane init --yes")
    found = backends.known(config.Settings(), dict(os.environ))
    backend = args.backend or (_asked_backend(found) if asks else _ready(found)[0])
    if backend not in {status.id for status in found}:
        there = ", ".join(status.id for status in found)
        raise wrong_words(f"no backend {backend!r}", f"choose one of: {there}")
    policy = args.policy or (_asked_policy() if asks else "default")
    text = _text(backend, policy)
    streams.write(text)
    if asks and _line(f"write this to {streams.one_line(path)}? [Y/n] ").lower() not in ("", "y", "yes"):
        streams.write("nothing was written\n")
        return 1
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise wrong(f"{path} cannot be written: {error.strerror}", "change to a folder that is writable") from error
    streams.write(f'written: {streams.one_line(path)}; next: backplane run "…", backplane doctor\n')
    return 0


def _ready(found: list[BackendStatus]) -> list[str]:
    """The backends that are ready, agents first."""
    ready = [status.id for status in found if status.ready]
    agents = [id for id in ready if id not in SCRIPTED]
    return agents + [id for id in SCRIPTED if id in ready]


def _asked_backend(found: list[BackendStatus]) -> str:
    ready = _ready(found)
    streams.write(f"ready here: {', '.join(ready)}\n")
    for status in found:
        if not status.ready and status.fix:
            streams.write(f"  {status.id}: {streams.one_line(status.fix)}\n")
    return _line(f"backend for orders that name none [{ready[0]}]: ") or ready[0]


def _asked_policy() -> str:
    for name, about in POLICIES.items():
        streams.write(f"  {name:<8} {about}\n")
    while (word := _line("policy [default]: ") or "default") not in POLICIES:
        streams.write(f"choose one of: {', '.join(POLICIES)}\n")
    return word


def _line(prompt: str) -> str:
    streams.write(prompt)
    line = sys.stdin.readline()
    if not line:
        raise KeyboardInterrupt
    return line.strip()


def _text(backend: str, policy: str) -> str:
    return (
        "# What `backplane` does where an order says nothing. Every setting: backplane schema configuration\n"
        f'default_backend = "{backend}"\n'
        f'policy = "{policy}"\n'
        "\n"
        "[limits]\n"
        "run_s = 3600 # a whole run, in seconds\n"
    )
