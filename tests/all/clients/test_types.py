"""Types that a stock generator makes from `schemas/`, and the Node client's own, put before the TypeScript compiler."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backplane import resources

HERE = Path(__file__).parent
CONTRACTS = resources.find("contracts")
EXAMPLES = CONTRACTS / "examples"
TOOLS = ("json-schema-to-typescript@15.0.4", "typescript@5.9.3")
COMPILE_S_MAX = 100
TSC = (
    "--noEmit",
    "--strict",
    "--exactOptionalPropertyTypes",
    "--target",
    "es2022",
    "--module",
    "nodenext",
    "--lib",
    "es2022,dom",
)

REFUSED = ("order_without_task", "order_with_a_wrong_lane", "answer_undecided")
"""Bad examples whose fault a type can see."""


@pytest.fixture
def tools(npm_programs: Callable[..., Path]) -> Path:
    """The folder with the generator's and the compiler's programs."""
    return npm_programs(*TOOLS)


def complaints(tools: Path, folder: Path, *files: str) -> str:
    ran = subprocess.run(
        [str(tools / "tsc"), *TSC, *files], cwd=folder, capture_output=True, text=True, timeout=COMPILE_S_MAX
    )
    return ran.stdout + ran.stderr


def assignments() -> Iterator[tuple[str, str]]:
    """Schema and TypeScript line of every example, the bad ones with the promise that they are refused."""
    for path in sorted(EXAMPLES.glob("*/*.json")):
        if path.parent.name != "bad":
            yield path.parent.name, json.dumps(json.loads(path.read_bytes()))
    for name in REFUSED:
        bad = json.loads((EXAMPLES / "bad" / f"{name}.json").read_bytes())
        yield bad["schema"], "// @ts-expect-error\n  " + json.dumps(bad["document"])


def test_generated_types_take_every_example_and_the_node_client_has_the_types_it_says(
    tools: Path, tmp_path: Path
) -> None:
    words = [str(tools / "json2ts"), "-i", str(resources.find("schemas")), "-o", str(tmp_path / "types")]
    made = subprocess.run(words, capture_output=True, text=True, timeout=COMPILE_S_MAX)
    assert (made.returncode, made.stderr) == (0, "")
    lines, seen = [], set()
    for number, (schema, text) in enumerate(assignments()):
        title = "".join(word.capitalize() for word in schema.split("_"))
        if schema not in seen:
            lines.append(f"import type {{ {title} }} from './types/{schema}.js';")
            seen.add(schema)
        expected, newline, value = text.rpartition("\n")
        lines.append(f"{expected}{newline}export const example{number}: {title} = {value.strip()};")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "examples.ts").write_text("\n".join(lines), encoding="utf-8")
    for path in (HERE / "use.mts", CONTRACTS / "clients" / "backplane.d.mts"):
        shutil.copy(path, tmp_path)
    assert complaints(tools, tmp_path, "examples.ts", "use.mts") == ""
    assert seen == {path.stem for path in resources.find("schemas").glob("*.json")}
