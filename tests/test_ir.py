"""The neutral form: frozen values whose parts are read back as they were made."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from backplane import ir

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


def test_slots_are_not_shared_between_values() -> None:
    first, second = ir.Text(text="a"), ir.Text(text="b")
    first.ext["x"] = {}
    assert second.ext == {}


def test_what_changes_only_its_form_is_not_material() -> None:
    def loss(code: str) -> ir.Loss:
        return ir.Loss(path="/a", dialect="a", target="b", kind="dropped", code=code, reason="r")

    assert not loss("shape").is_material
    assert all(loss(code).is_material for code in ir.LOSS_CODES if code != "shape")


def test_a_value_can_be_written_as_json_for_reading() -> None:
    message = ir.Message(role="user", parts=(ir.Text(text="hi", at="/0"),))
    plain = msgspec.json.decode(msgspec.json.encode(message))
    assert plain["parts"][0]["text"] == "hi"
