"""`apply`: put a run's patch into the workspace it was made for."""

from __future__ import annotations

import os
from pathlib import Path

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser
from backplane.runtime.results import Wish, apply_result
from backplane.runtime.state import StateFolder
from backplane.workspace import Applied

HELP = "Apply a run's patch to the original workspace. If a part does not fit, nothing is changed."
EXAMPLE = "backplane apply last --check\nbackplane apply last\nbackplane apply 3f2a --root ~/project"


def options(p: Parser) -> None:
    add.run_id(p, optional=True)
    add.value(p, "-C", "--root", metavar="DIR", help="apply to this folder (default: the folder of the run)")
    add.value(p, "--at", metavar="NAME", help="apply the state at this checkpoint (default: the final state)")
    add.flag(p, "--check", help="only report whether the patch would apply")
    add.flag(p, "--accept-violations", help="apply the patch even if the run violated its policy")
    add.flag(p, "--merge", help="merge the patch into files that have changed since the run")


def run(args: Args) -> int:
    root = Path(args.root).expanduser() if args.root is not None else None
    wish = Wish(
        at=args.at, root=root, check=args.check, merge=args.merge, accept_violations=args.accept_violations
    )  # fmt: skip
    write_files(apply_result(state_folder(), args.run, wish), is_check=args.check)
    return 0


def state_folder() -> StateFolder:
    """Return this user's state folder."""
    return StateFolder(config.home_path(os.environ))


def write_files(done: Applied, *, is_check: bool) -> None:
    """Print which files were changed, or would be."""
    lines = [done.describe(is_check=is_check), *(f"  {file}" for file in done.files)]
    streams.write_lines(map(streams.one_line, lines), "")
