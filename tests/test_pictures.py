"""Pictures that go with a task: taken by what they are, bounded, and shown in words where an agent is told a record."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from backplane.cli import main
from backplane.contract.conversation import AgentMessage, Image, SessionTurn, UserMessage
from backplane.contract.pictures import IMAGE_BYTES_MAX, checked, image_from, media_type_of
from backplane.contract.work import WorkOrder
from backplane.errors import ConfigError
from backplane.providers import store
from backplane.providers.turns import Abilities, Wanted, compose
from tests.all.vendors.cases import PICTURE

KINDS = {
    "image/png": PICTURE,
    "image/jpeg": b"\xff\xd8\xff\xe0rest",
    "image/gif": b"GIF89a\1\0\1\0",
    "image/webp": b"RIFF\0\0\0\0WEBPVP8 ",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_what_its_bytes_say(kind: str) -> None:
    image = image_from(KINDS[kind])
    assert (image.media_type, base64.b64decode(image.data or "")) == (kind, KINDS[kind])
    assert checked([Image(data=image.data)]) == (image,)


@pytest.mark.parametrize("data", [b"", b"\x89PN", b"%PDF-1.7", b"<svg/>", b"RIFF\0\0\0\0WAVE", b"BM\0\0"])
def test_what_is_no_picture_is_none(data: bytes) -> None:
    assert media_type_of(data) is None
    with pytest.raises(ConfigError, match=r"a\.png is no picture") as refused:
        image_from(data, "a.png")
    assert "PNG, JPEG, GIF and WebP" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ([Image()], "picture 1 has to have `data` or `url`"),
        ([Image(data="aa", url="https://a")], "one of the two"),
        ([image_from(PICTURE), Image(data="not base64")], "picture 2 is no Base64"),
        ([Image(data=base64.b64encode(PICTURE).decode(), media_type="image/gif")], "is image/png, and is said to be"),
        ([Image(data=base64.b64encode(b"GIF89a" + bytes(IMAGE_BYTES_MAX)).decode())], "picture 1 is over"),
        ([image_from(PICTURE + bytes(IMAGE_BYTES_MAX - len(PICTURE)))] * 2, "the pictures are over"),
    ],
)
def test_a_picture_that_cannot_be_taken_is_refused_by_its_number(images: list[Image], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked(images)


def handed(
    *said: UserMessage, images: tuple[Image, ...] = (), heeds: tuple[str, ...] = ("context", "images")
) -> tuple[WorkOrder, tuple[str, ...]]:
    """The order and its losses for an agent that keeps no history of others, after these messages."""
    turns = [
        SessionTurn(run_id=None, provider="p", stop_reason="end_turn", messages=(one, AgentMessage(content="yes")))
        for one in said
    ]
    file, message = store.new_file("q", turns=tuple(turns)), UserMessage(content="and now?", images=images)
    return compose(Wanted(file=file, message=message, can=Abilities(frozenset(heeds))))


def test_pictures_of_earlier_turns_go_to_an_agent_that_is_told_a_record() -> None:
    red, blue = image_from(PICTURE), image_from(KINDS["image/gif"])
    made = handed(UserMessage(content="look", images=(red,)), UserMessage(content="well?"), images=(blue,))
    assert [row["media_type"] for row in made[0].abp("images")] == ["image/png", "image/gif"]
    assert "User: look (picture 1 of this message)" in made[0].task
    assert made[1] == ("emulated: history, it is said in the user's words",)


def test_pictures_that_no_agent_is_shown_are_listed() -> None:
    far, large = Image(url="https://a"), image_from(PICTURE + bytes(IMAGE_BYTES_MAX - len(PICTURE)))
    for shown in ((far,), (large, large)):
        made = handed(UserMessage(content="look", images=shown))
        assert made[0].abp("images") is None
        assert "dropped: pictures of earlier turns that are by address, or together too large" in made[1]
    blind = handed(UserMessage(content="look", images=(image_from(PICTURE),)), heeds=("context",))
    assert blind[0].abp("images") is None
    assert "dropped: images, the provider takes none" in blind[1]


def test_an_option_shows_a_picture_with_an_order(
    backplane_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(PICTURE)
    (tmp_path / "b.png").write_text("a text")
    given = {"task": "look", "config": {"vendor": {"abp": {"images": [{"url": "https://a"}]}}}}
    (tmp_path / "order.json").write_text(json.dumps(given))
    assert main(["run", "--order", "order.json", "--image", "a.png", "--backend", "mock", "--dry-run", "--json"]) == 0
    out = capfd.readouterr().out
    assert out.index("https://a") < out.index(base64.b64encode(PICTURE).decode())
    assert main(["run", "look", "--image", "a.png", "--backend", "shell"]) == 4
    for words in (["run", "look", "--backend", "mock"], ["chat", "--backend", "mock"]):
        assert main([*words, "--image", "b.png"]) == 2
