"""Hand-written translations and the loss that each must name, by somebody who had not seen the code.

A row of `loss_cases.jsonl`: `lost` if a loss must name `path`, `equal` if none may and the target says it at `says`,
`refused` if the meaning would break. Additions that a target requires do not count.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane.dialects import translate
from backplane.dialects.ir import Loss
from backplane.errors import TranslationError

FILE = Path(__file__).with_name("loss_cases.jsonl")
CASES: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]


def ids(case: dict[str, Any]) -> str:
    return f"{case['source']}-{case['target']}-{case['kind']}: {case['name']}"


def is_near(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


def at(document: Any, pointer: str) -> Any:
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        document = document[int(key)] if isinstance(document, list) else document[key]
    return document


def is_right(case: dict[str, Any], losses: Sequence[Loss]) -> bool:
    """Return True if the losses are those that the case expects."""
    paths = [loss.path for loss in losses if loss.kind != "synthesised"]
    is_named = any(is_near(path, case["path"]) for path in paths)
    wanted: str = case["expect"]
    return is_named == (wanted == "lost")


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_translation_names_what_it_loses(case: dict[str, Any]) -> None:
    given = (case["document"], case["source"], case["target"], case["kind"])
    if case["expect"] == "refused":
        with pytest.raises(TranslationError):
            translate(*given)
        return
    done = translate(*given)
    assert is_right(case, done.losses), done.losses
    if "says" in case:
        pointer, value = case["says"]
        assert at(done.value, pointer) == value


def test_a_loss_that_is_left_out_turns_the_table_red() -> None:
    lost = [case for case in CASES if case["expect"] == "lost"]
    assert len(lost) > 80
    for case in lost:
        done = translate(case["document"], case["source"], case["target"], case["kind"])
        kept = [loss for loss in done.losses if not is_near(loss.path, case["path"]) or loss.kind == "synthesised"]
        assert not is_right(case, kept), msgspec.to_builtins(kept)


def test_the_table_has_every_pair_and_both_kinds() -> None:
    names = ("openai", "codex", "claude", "gemini", "kimi", "copilot")
    pairs = {(case["source"], case["target"]) for case in CASES}
    assert pairs == {(one, other) for one in names for other in names if one != other}
    assert {case["kind"] for case in CASES} == {"request", "response"}
    assert len(CASES) >= 120
