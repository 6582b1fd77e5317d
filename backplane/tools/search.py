"""Finds files by name and lines by pattern, among the files that may be read.

Names are matched in linear time. A pattern for lines can take for ever, so a child (`_grep.py`) applies it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio.to_thread

from backplane.errors import PolicyError
from backplane.policy.globs import Globs, compile_globs
from backplane.process.programs import run_program
from backplane.tools.places import ToolRefused, Tree
from backplane.tools.results import CallResult, shortened

FOUND_MAX: Final = 1000
"""Most file names in one answer."""

MATCHES_MAX: Final = 200
"""Most matching lines in one answer."""

ENTRIES_MAX: Final = 200_000
"""Most files that one call looks at: more than most repositories have, and under a second of work."""

GREP_S_MAX: Final = 20.0
"""Most seconds for a search through lines; large repositories take two."""


async def glob(tree: Tree, input: dict[str, Any]) -> CallResult:
    """Return the names of the files under a folder that match a pattern."""
    names, whole = await _find(tree, input.get("path", "."), _compiled(input["pattern"]))
    if not names:
        return CallResult("no files found" if whole else f"no files found among the first {ENTRIES_MAX}")
    # A name that is not UTF-8 is shown by its bytes; it cannot be sent back.
    text = "\n".join(names[:FOUND_MAX]).encode("utf-8", "backslashreplace").decode()
    if len(names) > FOUND_MAX or not whole:
        text += f"\n[{len(names)}{'' if whole else ' or more'} files; narrow the pattern]"
    return CallResult(shortened(text))


async def grep(tree: Tree, input: dict[str, Any], env: Mapping[str, str]) -> CallResult:
    """Return the lines that match a regular expression, as `file:line:text`."""
    names, whole = await _find(tree, input.get("path", "."), _compiled(input.get("glob", "*")))
    asked = {
        "root": tree.root,
        "files": names,
        "pattern": input["pattern"],
        "ignore_case": input.get("ignore_case", False),
        "matches_max": MATCHES_MAX,
    }
    script = str(Path(__file__).with_name("_grep.py"))
    done = await run_program(
        (sys.executable, "-I", "-S", script),
        env=env,
        cwd=tree.root,
        timeout_s=GREP_S_MAX,
        stdin=json.dumps(asked).encode(),  # msgspec refuses a name that is not UTF-8.
    )
    if done.timed_out:
        raise ToolRefused(f"the search took over {GREP_S_MAX:g} s; use a simpler pattern or narrow the path")
    if done.exit.code != 0:
        raise ToolRefused(done.output.strip() or f"the search failed: {done.exit.describe()}")
    note = "" if whole else f"\n[only the first {ENTRIES_MAX} files were looked at]"
    return CallResult(shortened(done.output.rstrip("\n") or "no matches") + note)


def _compiled(pattern: str) -> Globs:
    try:
        return compile_globs([pattern])
    except PolicyError as error:
        raise ToolRefused(error.message) from error


async def _find(tree: Tree, start: str, wanted: Globs) -> tuple[list[str], bool]:
    """Return the matching files, relative to the root and sorted, and whether all were looked at.

    Raises:
        ToolRefused: the start is absent, outside the workspace, or may not be read.
    """
    # A thread cannot be stopped; its work is bounded, and a cancelled call does not wait for it.
    return await anyio.to_thread.run_sync(functools.partial(_look, tree, start, wanted), abandon_on_cancel=True)


def _look(tree: Tree, start: str, wanted: Globs) -> tuple[list[str], bool]:
    place = tree.find(start)
    top = os.path.join(tree.root, place)
    if os.path.isfile(top):
        if (denied := tree.may_read(place)) is not None:
            raise ToolRefused(f"policy_denied: {denied}")
        return [place], True
    if not os.path.isdir(top):
        raise ToolRefused(f"{start} is no file or folder")
    found: list[str] = []
    for count, name in enumerate(_files(top)):
        if count >= ENTRIES_MAX:
            return sorted(found), False
        path = name if place == "." else f"{place}/{name}"
        with suppress(PolicyError):  # A path that is too long to be judged is not shown.
            if wanted.matches(name) is not None and tree.may_read(path) is None:
                found.append(path)
    return sorted(found), True


def _files(top: str) -> Iterator[str]:
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(name for name in folders if name != ".git")
        inner = os.path.relpath(folder, top)
        for name in files:
            path = os.path.join(folder, name)
            # Links are left out; their targets are found at their own places.
            if os.path.isfile(path) and not os.path.islink(path):
                yield name if inner == "." else f"{inner}/{name}"
