"""`mcp`: run, receipts and validate for agents, over the Model Context Protocol."""

from __future__ import annotations

from backplane.cli import streams
from backplane.cli.parser import Options, Parser, add_config

EXAMPLE = """
backplane mcp --root ~/project
"""


def parser(name: str) -> Parser:
    """The options of `mcp`."""
    made = Parser(
        f"backplane {name}",
        "Be a server of the Model Context Protocol on stdin and stdout, with the tools run, receipts and validate. "
        "An agent starts it by this command.",
        EXAMPLE,
        _mcp,
    )
    add_config(made)
    made.add_argument("--root", metavar="DIR", help="the folder in which runs may work (.)")
    return made


def _mcp(options: Options) -> int:
    import os
    import stat
    from pathlib import Path

    import anyio

    from backplane import __version__, config
    from backplane.errors import ConfigError
    from backplane.serve import mcp

    if streams.is_terminal(streams.STDIN):
        streams.complain("mcp reads messages of the protocol from stdin; end it with Ctrl-D\n")
    streams.require_descriptors()
    environ, cwd = dict(os.environ), streams.folder()
    root = cwd / (options.root or ".")
    if not os.path.isdir(root):
        raise ConfigError("config_invalid", f"--root {options.root!r} is no folder", hint="name a folder that is there")
    file = cwd / options.config if options.config else None
    config.load(file, environ, cwd)
    server = mcp.McpSession(root, Path(file) if file else None, environ, __version__)
    # A stray print of a library would be a broken message: the protocol keeps stdout to itself.
    stdout = os.dup(1)
    os.dup2(2, 1)
    mode = os.fstat(stdout).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):  # A terminal's description is shared with the shell.
        os.set_blocking(stdout, False)
    number = anyio.run(server.serve, 0, stdout)
    return 0 if number is None else 128 + number
