"""`serve`: the control plane as a host, for programs in any language."""

from __future__ import annotations

import os
from pathlib import Path

from backplane.cli import streams
from backplane.cli.parser import Options, Parser, add_config

EXAMPLE = """
backplane serve < orders.jsonl
ssh build-machine backplane serve
backplane serve --engine postgresql://me@db/work --content /mnt/content
"""


def parser(name: str) -> Parser:
    """The options of `serve`."""
    made = Parser(
        f"backplane {name}",
        "Speak the sidecar protocol on stdin and stdout: each `run` that comes in is a run of this "
        "control plane. contracts/sidecar.md is the protocol, contracts/clients/ has clients.",
        EXAMPLE,
        _serve,
    )
    add_config(made)
    queue = made.add_argument_group("a queue in place of this machine").add_argument
    queue("--engine", metavar="URL", help="hand each run to a queue: sqlite:///FILE or postgresql://…")
    queue("--content", metavar="PLACE", help="folder or URL that all machines share (beside the SQLite file)")
    queue("--label", metavar="L", default="default", help="which workers may take its orders (default)")
    queue("--priority", metavar="N", type=int, help="1 goes first; without one before all that have one")
    made.belong_to("--engine", "--content", "--label", "--priority")
    return made


def _is_read_only(path: Path) -> bool:
    """Whether a folder, or the nearest one above it that is there, lies on a file system that cannot be written."""
    there = next((one for one in (path, *path.parents) if one.exists()), None)
    return there is not None and bool(os.statvfs(there).f_flag & os.ST_RDONLY)


def _serve(options: Options) -> int:
    import tempfile
    from contextlib import ExitStack

    from backplane import config
    from backplane.serve import stdio

    if streams.is_terminal(streams.STDIN):
        streams.complain("serve reads messages of the protocol from stdin; end it with Ctrl-D\n")
    streams.require_descriptors()
    environ, cwd = dict(os.environ), streams.folder()
    settings = config.load(Path(options.config) if options.config else None, environ, cwd)
    make = None
    if options.engine is not None:
        from functools import partial

        from backplane.cli.queue import find_content, open_engine
        from backplane.serve.queue import Queue, QueueServer

        content = find_content(options)  # What is wrong with it is said now, and not in the middle of an order.
        queue = Queue(lambda: (open_engine(options), content), options.label, options.priority)
        make = partial(QueueServer, queue=queue)
    with ExitStack() as opened:
        home = config.home_path(environ)
        if _is_read_only(home):
            # As in the sandbox of another control plane, which keeps the receipts that it is sent.
            aside = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="backplane-serve-")))
            streams.complain(f"{home} is read-only here: these runs are recorded in {aside} until serve ends\n")
        else:
            aside = config.home(environ)
        try:
            number, left_behind = stdio.main(settings, aside, environ, make)
        except BrokenPipeError as error:
            raise streams.ReaderGone from error
    for line in left_behind:
        streams.complain(streams.one_line(line) + "\n")
    return 0 if number is None else 128 + number
