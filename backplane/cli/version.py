"""`version`: which program this is."""

from __future__ import annotations

from typing import TypedDict

from backplane import __version__
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.contract.version import CONTRACT_VERSION


class Version(TypedDict):
    """Which program this is, and the contract that its hosts and clients speak."""

    contract: str
    python: str
    version: str


HELP = "Print the version."
EXAMPLE = "backplane version --json"


def options(p: Parser) -> None:
    add.json(p, "the versions of backplane, contract and Python as one JSON object", "cli_version")


def run(args: Args) -> int:
    if args.json:
        import platform

        streams.write_record(Version(contract=CONTRACT_VERSION, python=platform.python_version(), version=__version__))
    else:
        streams.write(f"backplane {__version__}  (contract {CONTRACT_VERSION})\n")
    return 0
