"""`serve`: the control plane as a host, for programs in any language."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, load_settings
from backplane.serve import stdio

if TYPE_CHECKING:
    from backplane.runtime.plane import ControlPlane


def _is_read_only(path: Path) -> bool:
    """Return True if a folder, or its nearest existing parent, is on a read-only file system."""
    there = next((one for one in (path, *path.parents) if os.path.exists(one)), None)
    return there is not None and bool(os.statvfs(there).f_flag & os.ST_RDONLY)


HELP = """Speak the sidecar protocol on stdin and stdout: each `run` message starts a run.
contracts/sidecar.md describes the protocol, and contracts/clients/ contains clients for it."""
EXAMPLE = """
backplane serve < orders.jsonl
ssh build-machine backplane serve
backplane serve --engine postgresql://me@db/work --content /mnt/content
"""


def options(p: Parser) -> None:
    add.config(p)
    queue = p.add_argument_group("run the orders through a queue instead of on this machine")
    add.queue(queue, content=True)
    add.value(queue, "--label", metavar="LABEL", help="label of the workers that run the orders (default: default)")
    add.priority(queue)
    p.only_with |= dict.fromkeys(("--content", "--label", "--priority"), "--engine")


def _queue_server(args: Args, opened: ExitStack) -> Callable[[ControlPlane, int], stdio.Server]:
    """Return a function that makes the server of a queue."""
    from backplane.scale.engine import check_label, check_priority
    from backplane.scale.place import QueuePlace
    from backplane.scale.serve import QueueServer

    check_priority(args.priority)
    label, place = check_label(args.label or "default"), QueuePlace(args.engine, args.content)
    content, engine = place.contents(), place.open()
    opened.callback(engine.close)
    return partial(QueueServer, engine=engine, content=content, label=label, priority=args.priority)


def run(args: Args) -> int:
    if streams.is_terminal(streams.STDIN):
        streams.complain("serve reads protocol messages from stdin; end the input with Ctrl-D\n")
    environ = dict(os.environ)
    settings = load_settings(args)
    with ExitStack() as opened:
        make = _queue_server(args, opened) if args.engine is not None else None
        home = config.home_path(environ)
        if _is_read_only(home):
            # As in the sandbox of another control plane, which keeps the receipts that it is sent.
            aside = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="backplane-serve-")))
            streams.complain(f"{home} is read-only: runs are stored in {aside}, and are removed when serve ends\n")
        else:
            aside = config.home(environ)
        try:
            number, left_behind = stdio.main(settings, aside, environ, make)
        except BrokenPipeError as error:
            raise streams.ReaderGone from error
    for line in left_behind:
        streams.note(line)
    return 0 if number is None else 128 + number
