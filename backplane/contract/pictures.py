"""Checks the pictures of a task, whose type is found from their bytes, not from a name."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Final

import msgspec

from backplane.contract.conversation import Image
from backplane.errors import ConfigError

IMAGE_BYTES_MAX: Final = 5 * 1024 * 1024
"""Maximum size of one picture before Base64; services of models refuse larger ones."""
IMAGES_BYTES_MAX: Final = 9 * 1024 * 1024
"""Maximum size of all pictures of one order before Base64, so that the order fits into a line of 16 MiB."""

_BEGINNINGS: Final = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
_TAKEN: Final = "PNG, JPEG, GIF and WebP are taken"


def media_type_of(data: bytes) -> str | None:
    """Return the media type of a picture, found from its first bytes; None if it is not an accepted type."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for beginning, kind in _BEGINNINGS.items() if data.startswith(beginning)), None)


def image_from(data: bytes, name: str = "the picture") -> Image:
    """Return the picture with a file's bytes.

    Args:
        name: name of the picture for errors.

    Raises:
        ConfigError: `config_invalid`, the type is not accepted, or the picture is larger than `IMAGE_BYTES_MAX`.
    """
    kind = media_type_of(data)
    if kind is None:
        raise ConfigError("config_invalid", f"{name} is no picture that a model takes", hint=_TAKEN)
    if len(data) > IMAGE_BYTES_MAX:
        raise ConfigError("config_invalid", f"{name} is over {IMAGE_BYTES_MAX} bytes", hint="show a smaller one")
    return Image(media_type=kind, data=base64.b64encode(data).decode())


def checked(images: Iterable[Image]) -> tuple[Image, ...]:
    """Return the pictures with their media types, found from their bytes; a picture with a URL is not changed.

    Raises:
        ConfigError: `config_invalid`, a picture is not accepted or has the wrong type, or all are too large together.
    """
    made, size = list[Image](), 0
    for number, image in enumerate(images, 1):
        name = f"picture {number}"
        if (image.data is None) == (image.url is None):
            raise ConfigError("config_invalid", f"{name} has to have `data` or `url`, one of the two")
        if image.data is not None:
            image = _checked(image, image.data, name)
            size += len(image.data or "") * 3 // 4
        made.append(image)
    if size > IMAGES_BYTES_MAX:
        raise ConfigError("config_invalid", f"the pictures are over {IMAGES_BYTES_MAX} bytes", hint="show fewer")
    return tuple(made)


def _checked(image: Image, text: str, name: str) -> Image:
    try:
        found = image_from(base64.b64decode(text, validate=True), name)
    except (binascii.Error, ValueError) as error:
        raise ConfigError("config_invalid", f"{name} is no Base64: {error}") from error
    if image.media_type not in (None, found.media_type):
        fact = f"{name} is {found.media_type}, and is said to be {image.media_type}"
        raise ConfigError("config_invalid", fact, hint="leave media_type out, or correct it")
    return msgspec.structs.replace(image, media_type=found.media_type)
