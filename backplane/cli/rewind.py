"""`rewind`: list a run's checkpoints, or restore the workspace to one."""

from __future__ import annotations

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.apply import state_folder, write_files
from backplane.cli.command import Args, Parser, open_store
from backplane.runtime.results import kept, rewind_result
from backplane.workspace.checkpoints import Checkpoint

HELP = "Restore a run's workspace to one of the run's checkpoints. Without NAME, list the checkpoints."
EXAMPLE = """
backplane rewind last
backplane rewind last before-the-tests
backplane rewind 3f2a start --check
"""


def options(p: Parser) -> None:
    add.run_id(p)
    add.value(p, "name", metavar="NAME", nargs="?", help="id of a checkpoint, or `start`")
    add.flag(p, "--check", help="only report whether the workspace could be restored")
    add.json(p, "one JSON object per checkpoint, one per line", "cli_checkpoints")


def _line(one: Checkpoint) -> str:
    own_id, at, tree = map(streams.one_line, (one.id, one.at[:19], one.tree))
    return f"{own_id:<5} {at}Z  {streams.count(one.files, 'file'):>12}  before a tool  tree {tree}"


def run(args: Args) -> int:
    if args.name is None:
        with open_store() as store:
            made = kept(store.load(args.run))
        none = "the only checkpoint is `start`; `run --checkpoints` stores more"
        streams.write_rows(made, _line, none, as_json=args.json)
        return 0
    write_files(rewind_result(state_folder(), args.run, args.name, check=args.check), is_check=args.check)
    return 0
