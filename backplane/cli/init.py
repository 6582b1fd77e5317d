"""`init`: a first `backplane.toml`, from what is ready on this machine."""

from __future__ import annotations

import os
from typing import Final

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, wrong, wrong_words
from backplane.runtime import readiness

SCRIPTED: Final = ("shell", "mock")
"""Backends without an agent: they need no key and no network."""

HELP = "Write a backplane.toml into this folder, with a default backend, a policy and a time limit."
EXAMPLE = "backplane init\nbackplane init --backend shell --policy ci"

TEXT: Final = """\
# Defaults for all orders. `backplane schema configuration` describes every setting.
# Ready on this machine: {ready}. The others: backplane backends
default_backend = "{backend}"
# default: the agent cannot write git's hooks and configuration; strict: it also cannot read keys or .env files, and
# can connect to its model's service only; ci: as strict, and the agent has no tool to ask a person
policy = "{policy}"

[limits]
run_s = 3600 # a whole run, in seconds
"""


def options(p: Parser) -> None:
    add.value(p, "-b", "--backend", metavar="NAME", help="use this backend (default: the first ready agent)")
    names = config.SHIPPED_POLICIES
    p.add_argument("--policy", choices=names, default="default", help="use this built-in policy (default: default)")


def run(args: Args) -> int:
    path = streams.folder() / config.FILE_NAME
    if os.path.lexists(path):
        raise wrong(f"{path} already exists", f"edit it, then run: backplane validate {path}")
    found = {status.id: status for status in readiness.known(config.Settings(), os.environ)}
    ready = sorted((id for id in found if found[id].ready), key=lambda id: (id in SCRIPTED, id != SCRIPTED[0]))
    backend = args.backend or ready[0]
    if backend not in found:
        raise wrong_words(f"no backend {backend!r}", f"choose one of: {', '.join(found)}")
    text = TEXT.format(ready=", ".join(ready), backend=backend, policy=args.policy)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise wrong(f"{path} cannot be written: {error.strerror}", "cd to a folder you can write to") from error
    streams.write(text)
    streams.write(f'written: {streams.one_line(path)}; next: backplane run "…", backplane doctor\n')
    return 0
