"""`mcp`: run, receipts and validate for agents, over the Model Context Protocol."""

from __future__ import annotations

import os
from pathlib import Path

import anyio

from backplane import __version__, config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, wrong
from backplane.serve import mcp

HELP = """Serve the Model Context Protocol (MCP) on stdin and stdout, with the tools run, receipts and validate.
Configure this command as an MCP server of your agent."""
EXAMPLE = "backplane mcp --root ~/project"


def options(p: Parser) -> None:
    add.value(p, "-C", "--root", metavar="DIR", help="let runs work in this folder (default: the current one)")
    add.config(p)


def run(args: Args) -> int:
    if streams.is_terminal(streams.STDIN):
        streams.complain("mcp reads MCP messages from stdin; end the input with Ctrl-D\n")
    environ, cwd = dict(os.environ), streams.folder()
    root = cwd / (args.root or ".")
    if not os.path.isdir(root):
        raise wrong(f"--root {args.root!r} is not a folder", "name an existing folder")
    file = cwd / args.config if args.config else None
    config.load(file, environ, cwd)
    server = mcp.McpSession(root, Path(file) if file else None, environ, __version__)
    number = anyio.run(server.serve, 0, streams.protocol_output())
    return 0 if number is None else 128 + number
