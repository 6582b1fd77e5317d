"""Breaks one operator or compared number in each of forty files and says which breaks the tests find.

`python tests/mutants.py [--files 40] [--seed 1] [--core] [--all]` in a clean checkout: a file is changed in place and
put back. First the test files that import the module run, then those of its room; with `--core` also the rest of the
core, with `--all` the room's files below `tests/all`. What was found is kept in `.cache/mutants.json`, so a run that
was stopped goes on. Exit code 1 where fewer were found than `--wanted`.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / ".cache" / "mutants.json"
LINES_MIN = 60
"""A shorter file has little that could be broken."""
RUN_S_MAX = 900
TIMES = re.compile(r"_(s|ms|ns)\b|_(S|MS|NS)(_MAX|_MIN)?\b|monotonic|deadline|timeout|since")
"""A line about time: half a second more is not to be found, and not what this is about."""
EQUIVALENT: dict[tuple[str, str], str] = {
    ("backplane/process/aio.py", "if self._registered or self._loop is not None:"): "a loop removes no reader twice",
}
"""File and changed line → why nothing can differ; another place of the file is taken instead."""
SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one file: what stands from `start` to `end` becomes `new`."""

    file: str
    line: int
    start: int
    end: int
    new: str

    def changed(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]

    def shown(self, text: str) -> str:
        return self.changed(text).splitlines()[self.line - 1].strip()


def mutants(file: str, text: str) -> Iterator[Mutant]:
    """Yield every change of a file that this program can make."""
    lines = text.splitlines(keepends=True)
    # Columns of the parser count bytes.
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def between(left: ast.expr, right: ast.expr, operator: type[ast.AST]) -> Iterator[Mutant]:
        old, new = SWAPS.get(operator, ("", ""))
        start, end = place(left.end_lineno or 0, left.end_col_offset or 0), place(right.lineno, right.col_offset)
        found = re.search(rf"(?<![\w<>=!]){re.escape(old)}(?![\w<>=!])", text[start:end]) if old else None
        if found:
            line = text.count("\n", 0, start + found.start()) + 1
            yield Mutant(file, line, start + found.start(), start + found.end(), new)

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from between(node.left, node.comparators[0], type(node.ops[0]))
            number = node.comparators[0]
            if isinstance(number, ast.Constant) and type(number.value) is int:
                start = place(number.lineno, number.col_offset)
                end = place(number.lineno, number.end_col_offset or 0)
                yield Mutant(file, number.lineno, start, end, str(number.value + 1))
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], type(node.op))
        elif isinstance(node, ast.BinOp) and not any(map(_is_text, (node.left, node.right))):
            yield from between(node.left, node.right, type(node.op))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def chosen(count: int, seed: int) -> list[Mutant]:
    """Return so many changes, one a file, the same ones for the same seed and text."""
    dice = random.Random(seed)
    paths = [path for path in sorted(ROOT.glob("backplane/**/*.py")) if "_share" not in path.parts]
    dice.shuffle(paths)
    found: list[Mutant] = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(ROOT))
        lines = text.splitlines()
        places = [one for one in mutants(name, text) if not TIMES.search(lines[one.line - 1])]
        dice.shuffle(places)
        if len(lines) < LINES_MIN:
            continue
        for one in places:
            why = EQUIVALENT.get((name, one.shown(text)))
            if why is None:
                found.append(one)
                break
            print(f"equivalent  {name}:{one.line}  {one.shown(text)}  ({why})")
        if len(found) == count:
            break
    return found


def steps(mutant: Mutant, core: bool, all_: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield the test files to run, nearest first, each once."""
    module = mutant.file.removesuffix(".py").replace("/", ".")
    room, _, name = module.rpartition(".")
    tests = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py")}
    near = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(room)} import [^\n]*\b{name}\b")
    in_room = re.compile(rf"\b{re.escape('.'.join(module.split('.')[:2]))}\b")
    whole = {file for file in tests if file.startswith("tests/all/")}
    kinds = [
        ("module", [file for file, text in tests.items() if near.search(text) and file not in whole]),
        ("room", [file for file, text in tests.items() if in_room.search(text) and file not in whole]),
        ("core", [file for file in tests if file not in whole] if core else []),
        ("all", [file for file in whole if in_room.search(tests[file])] if all_ else []),
    ]
    seen: set[str] = set()
    for kind, files in kinds:
        if rest := sorted(set(files) - seen):
            yield kind, rest
        seen.update(files)


def run(files: list[str]) -> str | None:
    """Return the first test that fails, None where all pass."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--numprocesses=2"]
    try:
        done = subprocess.run(
            [*words, *files], cwd=ROOT, capture_output=True, text=True, timeout=RUN_S_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {RUN_S_MAX} s"
    if done.returncode in (0, 5):
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (lines or (done.stdout + done.stderr).strip().splitlines()[-1:] or ["pytest failed"])[0][:150]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wanted", type=int, default=30)
    parser.add_argument("--core", action="store_true", help="also the rest of the core, for what is not found")
    parser.add_argument("--all", action="store_true", help="also the room's files below tests/all")
    options = parser.parse_args()
    KEPT.parent.mkdir(exist_ok=True)
    known = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    found = 0
    for mutant in chosen(options.files, options.seed):
        path = ROOT / mutant.file
        text = path.read_text(encoding="utf-8")
        shown = mutant.shown(text)
        kept = known.setdefault(f"{mutant.file}: {shown}", {"passed": [], "by": None})
        for kind, files in steps(mutant, options.core, options.all):
            if kept["by"] is not None or kind in kept["passed"]:
                continue
            began = time.monotonic()
            try:
                path.write_text(mutant.changed(text), encoding="utf-8")
                failed = run(files)
            finally:
                path.write_text(text, encoding="utf-8")
            kept["s"] = round(kept.get("s", 0) + time.monotonic() - began)
            if failed is None:
                kept["passed"].append(kind)
            else:
                kept["by"] = f"{kind}: {failed}"
            KEPT.write_text(json.dumps(known, indent=1))
        found += kept["by"] is not None
        verdict = f"found     {kept['by']}" if kept["by"] else f"SURVIVED  {', '.join(kept['passed'])}"
        print(f"{mutant.file}:{mutant.line}  {shown}\n  {kept.get('s', 0)} s  {verdict}", flush=True)
    print(f"{found} of {options.files} found; {options.wanted} wanted")
    return int(found < options.wanted)


if __name__ == "__main__":
    sys.exit(main())
