"""`schema`: print a JSON Schema."""

from __future__ import annotations

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, wrong_words
from backplane.errors import ConfigError
from backplane.schemas import build

HELP = "Print a JSON Schema, or the names of all schemas."
EXAMPLE = "backplane schema work_order"


def options(p: Parser) -> None:
    add.value(p, "name", metavar="NAME", nargs="?", help="name of the schema (default: list all names)")


def run(args: Args) -> int:
    if args.name is None:
        streams.write("".join(f"{name}\n" for name in build.names()))
        return 0
    try:
        schema = build.load_schema(args.name)
    except ConfigError as error:
        raise wrong_words(error.message, f"`backplane schema` lists all {len(build.names())} schemas") from error
    streams.write_bytes(schema)
    return 0
