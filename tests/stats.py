"""Prints the shape of the code: lines a room, longest files and functions, doubles, public names, tests to package.

For people to read; `test_architecture.py` fails on the doubles alone. Standard library only, run by `xtask.py stats`;
`--walk` adds the numbers of `walk.py`, which runs the package.
"""

from __future__ import annotations

import ast
import runpy
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN = 10
SIBLINGS = ("agents", "dialects")
"""Rooms with one file or folder a vendor; put two side by side and only the vendor differs."""


def sources(folder: str) -> dict[Path, str]:
    """Return file → text, below a folder of the project; a file's own name works too."""
    top = ROOT / folder
    paths = [top] if top.is_file() else sorted(top.rglob("*.py"))
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}


def count(text: str) -> int:
    return len(text.splitlines())


def functions(texts: dict[Path, str]) -> Iterator[tuple[int, str]]:
    """Yield length in lines and place of every function, its docstring left out."""
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                length = body[-1].end_lineno - body[0].lineno + 1 if body and body[-1].end_lineno else 0
                yield length, f"{path}:{node.lineno} {node.name}"


def doubles(texts: dict[Path, str]) -> dict[str, list[str]]:
    """Return the type names that are defined more than once, with their places.

    Vendors' siblings count once: the rooms below `agents/`, with what they have in common, and the dialects.
    """
    places: dict[str, list[str]] = defaultdict(list)
    homes: dict[str, set[str]] = defaultdict(set)
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
                homes[node.name].add(path.parts[1] if path.parts[1] in SIBLINGS else f"{path}:{node.lineno}")
    return {name: places[name] for name in sorted(places) if len(homes[name]) > 1}


def public_names() -> list[str]:
    tree = ast.parse((ROOT / "backplane" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            value = getattr(node, "value", None)
            return [ast.unparse(item) for item in getattr(value, "elts", [])]
    return []


def rooms(texts: dict[Path, str]) -> dict[str, int]:
    lines: dict[str, int] = defaultdict(int)
    for path, text in texts.items():
        lines[path.parts[1] if len(path.parts) > 2 else path.stem] += count(text)
    return dict(sorted(lines.items(), key=lambda item: -item[1]))


def print_list(title: str, rows: list[str]) -> None:
    print(f"\n{title}")
    print("\n".join(f"  {row}" for row in rows) if rows else "  none")


def main() -> int:
    """Print everything; always 0."""
    package, hosts, tests = sources("backplane"), sources("hosts"), sources("tests")
    ours = package | hosts
    total = {name: sum(map(count, texts.values())) for name, texts in (("package", package), ("tests", tests))}
    print_list("lines a room", [f"{lines:6}  {room}" for room, lines in rooms(package).items()])
    print_list("lines a host", [f"{lines:6}  {host}" for host, lines in rooms(hosts).items()])
    longest = sorted(((count(text), str(path)) for path, text in ours.items()), reverse=True)
    print_list("longest files", [f"{lines:6}  {path}" for lines, path in longest[:SHOWN]])
    lengths = sorted(functions(ours), reverse=True)
    print_list("longest functions", [f"{lines:6}  {place}" for lines, place in lengths[:SHOWN]])
    print_list("type names defined twice", [f"{name}: {', '.join(found)}" for name, found in doubles(ours).items()])
    print_list("sums", [
        f"package {total['package']} lines, hosts {sum(map(count, hosts.values()))}, tests {total['tests']}",
        f"tests to package {total['tests'] / max(1, total['package']):.2f}",
        f"functions: {len(lengths)}, median {statistics.median([n for n, _ in lengths] or [0]):.0f} lines, "
        f"p90 {sorted(n for n, _ in lengths)[len(lengths) * 9 // 10] if lengths else 0}",
        f"public names: {len(public_names())}",
    ])  # fmt: skip
    if sys.argv[1:] == ["--walk"]:
        # Only here is the package itself needed, and what it is built on.
        runpy.run_path(str(ROOT / "tests" / "walk.py"), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
