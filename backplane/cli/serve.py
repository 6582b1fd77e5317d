"""`serve`: the control plane as a host, for programs in any language."""

from __future__ import annotations

from backplane.cli import streams
from backplane.cli.parser import Options, Parser, add_config

EXAMPLE = """
backplane serve < orders.jsonl
ssh build-machine backplane serve
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
    return made


def _serve(options: Options) -> int:
    import os
    from pathlib import Path

    from backplane import config
    from backplane.serve import stdio

    if streams.is_terminal(streams.STDIN):
        streams.complain("serve reads messages of the protocol from stdin; end it with Ctrl-D\n")
    streams.require_descriptors()
    environ, cwd = dict(os.environ), streams.folder()
    settings = config.load(Path(options.config) if options.config else None, environ, cwd)
    try:
        number, left_behind = stdio.main(settings, config.home(environ), environ)
    except BrokenPipeError as error:
        raise streams.ReaderGone from error
    for line in left_behind:
        streams.complain(streams.one_line(line) + "\n")
    return 0 if number is None else 128 + number
