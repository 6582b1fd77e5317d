"""`acp`: backplane as an agent of the Agent Client Protocol, for editors."""

from __future__ import annotations

import os
from pathlib import Path

import anyio

from backplane import __version__
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.serve import acp

HELP = """Serve the Agent Client Protocol (ACP) on stdin and stdout. Configure this command as an agent of your editor:
every backend is a mode of its sessions, the agent works in the editor's folder, and each prompt has a receipt."""
EXAMPLE = "backplane acp --backend mine"


def options(p: Parser) -> None:
    add.value(p, "-b", "--backend", metavar="NAME", help="backend of new sessions (default: the configured one)")
    add.value(p, "--policy", metavar="FILE", help="JSON policy file, or a built-in policy: default, strict or ci")
    add.config(p)


def run(args: Args) -> int:
    if streams.is_terminal(streams.STDIN):
        streams.complain("acp reads ACP messages from stdin; end the input with Ctrl-D\n")
    environ, cwd = dict(os.environ), streams.folder()
    file = cwd / args.config if args.config else None
    agent = acp.AcpAgent(Path(file) if file else None, environ, __version__, backend=args.backend, policy=args.policy)
    agent.check(cwd)
    number = anyio.run(agent.serve, 0, streams.protocol_output())
    return 0 if number is None else 128 + number
