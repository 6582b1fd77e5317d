"""The neutral form: frozen values whose parts are read back as they were made."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest

from backplane.dialects import ir

KINDS = [kind for _, kind in inspect.getmembers(ir, inspect.isclass) if issubclass(kind, ir.Node)]


def test_values_do_not_change() -> None:
    text = ir.Text(text="x")
    with pytest.raises(AttributeError):
        text.text = "y"  # type: ignore[misc]
    assert msgspec.structs.replace(text, text="y").text == "y"


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_says_where_it_was_read_and_keeps_what_it_cannot_say(kind: type[ir.Node]) -> None:
    fields = {field.name for field in msgspec.structs.fields(kind)}
    assert {"at", "ext"} <= fields
    assert kind.__doc__


def test_what_a_target_requires_is_an_addition_and_no_material_loss() -> None:
    def loss(kind: Any, code: str) -> ir.Loss:
        return ir.Loss(path="/a", dialect="a", target="b", kind=kind, code=code, reason="r")

    assert not loss("synthesised", "required").is_material
    assert all(loss("dropped", code).is_material for code in ir.LOSS_CODES)
