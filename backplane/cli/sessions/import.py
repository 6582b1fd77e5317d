"""`sessions import`: read a conversation from a file, or from a vendor's program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backplane.cli import options as add
from backplane.cli import sessions
from backplane.cli.command import Args, Parser
from backplane.providers import store

HELP = "Read a conversation from a file or from a vendor's program, and print its new id."
EXAMPLE = """
backplane sessions import session.json
backplane sessions import --from VENDOR last --backend mine
"""


def options(p: Parser) -> None:
    add.value(
        p, "file", metavar="FILE",
        help="file that `sessions show --json` wrote; with --from: a path, the vendor's id of the session, or `last`",
    )  # fmt: skip
    add.value(p, "--from", metavar="VENDOR", dest="vendor", help="read a conversation stored by this vendor's program")
    add.value(
        p, "-b", "--backend", metavar="NAME",
        help="continue on this backend (default: the backend named in the file, or the vendor's own)",
    )  # fmt: skip
    add.config(p)


def run(args: Args) -> int:
    async def load(registry: Any) -> Any:
        if args.vendor is not None:
            return await registry.get(args.backend or args.vendor).import_session(args.vendor, args.file)
        file = store.read(Path(args.file))
        return await registry.get(args.backend or file.provider).load(args.file)

    return sessions.keep(args, load)
