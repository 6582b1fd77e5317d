"""What an order asks of an agent that was started: its words, its shape, its limits, and what was said before it.

How an agent is told any of it is its own module's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backplane.agents.order import Continuation, read_conversation
from backplane.agents.rows import AgentRow
from backplane.contract import conversation as said
from backplane.contract import pictures
from backplane.contract.canonical import Json
from backplane.dialects import ir
from backplane.dialects.history import neutral
from backplane.errors import BackendError, ConfigError
from backplane.upstream.cost import Price, micros, read_price

if TYPE_CHECKING:
    from backplane.agents.structured import AnswerSchema
    from backplane.host import Given

CONTEXT_BYTES_MAX: Final = 1024 * 1024
"""Snippets of an order that travel in the prompt."""
AGAIN: Final = "This does not satisfy the JSON Schema:\n{fault}\nAnswer with the corrected JSON value alone."
"""To an agent that answers in words."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an order asks of any agent; what it asks of one vendor's alone is given to that agent beside it."""

    prompt: Json
    """The first words: a text, or blocks of a message."""
    silence_s: int = 0
    """How long the agent may say nothing while no tool runs; 0 where it is not watched."""
    conversation: Continuation = Continuation()
    shape: AnswerSchema | None = None
    """Of the answer."""
    again: str = AGAIN
    """Said to an answer of another shape; `{fault}` is what is wrong with it."""
    labels: Mapping[str, str] = {}
    """Words by which the agent names a failure → the contract's code."""
    price: Price | None = None
    """As configured; None where nothing is."""
    budget_micros: int | None = None
    """None where there is no budget, or the agent holds it itself; so for the turns."""
    turns_max: int | None = None


def budget_of(run: Given) -> int | None:
    """The order's budget in millionths of a dollar."""
    usd = run.order.config.max_budget_usd
    return None if usd is None else micros(Decimal(str(usd)))


def price_from(prices: Mapping[str, Any] | None) -> Price | None:
    """The price that a backend's options name. Raises ConfigError: `config_invalid`."""
    return None if prices is None else read_price(prices, "options.prices")


def shape_of(run: Given) -> AnswerSchema | None:
    """The shape that the answer has to have. Raises ConfigError: `config_invalid`."""
    schema = run.order.abp("output_schema")
    if schema is None:
        return None
    from backplane.agents.structured import AnswerSchema  # `jsonschema` takes 60 ms, and few orders have a shape.

    return AnswerSchema(schema)


SAMPLING: Final = ("max_tokens", "temperature")


def sampling_of(run: Given) -> dict[str, Any]:
    """The order's own parameters of the model, `config.vendor.abp.sampling`. Raises ConfigError: `config_invalid`."""
    asked = run.order.abp("sampling") or {}
    if not isinstance(asked, dict) or not set(asked) <= set(SAMPLING):
        fix = f"it has {' and '.join(SAMPLING)}"
        raise ConfigError("config_invalid", "config.vendor.abp.sampling cannot be read", hint=fix)
    return dict(asked)


def read_history(run: Given) -> tuple[ir.Message, ...]:
    """What was said before this order, `config.vendor.abp.history`; calls without a result get one that says so.

    Raises:
        ConfigError: `config_invalid`.
    """
    try:
        messages = msgspec.convert(run.order.abp("history") or (), tuple[said.Message, ...])
    except msgspec.ValidationError as error:
        fix = "a list of messages, see contracts/sessions.md"
        raise ConfigError("config_invalid", f"config.vendor.abp.history: {error}", hint=fix) from error
    return neutral(messages)


def read_images(run: Given) -> tuple[said.Image, ...]:
    """The pictures that go with the task, `config.vendor.abp.images`. Raises ConfigError: `config_invalid`."""
    rows = run.order.abp("images")
    if not rows:
        return ()
    try:
        return pictures.checked(msgspec.convert(rows, tuple[said.Image, ...]))
    except msgspec.ValidationError as error:
        fact = f"config.vendor.abp.images: {error}"
        raise ConfigError("config_invalid", fact, hint="a list of {media_type, data} in Base64, or {url}") from error


def snippets(run: Given) -> list[str]:
    """The order's snippets in words. Raises BackendError: `backend_context_length`."""
    parts = [f"Context, {snippet.name}:\n{snippet.content}" for snippet in run.order.context.snippets]
    if sum(len(part.encode()) for part in parts) > CONTEXT_BYTES_MAX:
        raise BackendError("backend_context_length", f"the order's snippets are over {CONTEXT_BYTES_MAX} bytes")
    return parts


def prompt_of(run: Given) -> str:
    """The first words to the agent: snippets, names of files, the task. Raises BackendError."""
    files = run.order.context.files
    named = [f"Files to look at first: {', '.join(files)}"] if files else []
    return "\n\n".join([*snippets(run), *named, run.order.task])


def image_blocks(run: Given, block: Callable[[str, str], Json]) -> list[Json]:
    """The pictures that go with the task, as blocks of a message.

    Args:
        block: makes one of a picture's type and its Base64.

    Raises:
        BackendError: `capability_unsupported`, a picture by its address.
        ConfigError: `config_invalid`.
    """
    images = read_images(run)
    if any(image.url is not None for image in images):
        fact = "this agent takes no picture by its address"
        raise BackendError("capability_unsupported", fact, hint="give the picture itself")
    return [block(str(image.media_type), str(image.data)) for image in images]


def shown(words: str, images: list[Json]) -> Json:
    """The first words as they are, or as blocks of a message with the pictures behind them."""
    return [{"type": "text", "text": words}, *images] if images else words


def spec_in_words(run: Given, row: AgentRow, block: Callable[[str, str], Json]) -> RunSpec:
    """The order for an agent that is asked, and answers, in words: it is told the shape, and limits are counted by us.

    Args:
        block: as `image_blocks` takes it.

    Raises:
        BackendError: `backend_context_length`, or see `image_blocks`.
        ConfigError: `config_invalid`.
    """
    shape = shape_of(run)
    words = "\n\n".join([prompt_of(run), *([shape.request()] if shape is not None else [])])
    return RunSpec(
        prompt=shown(words, image_blocks(run, block)),
        silence_s=row.silence_s,
        conversation=read_conversation(run),
        shape=shape,
        price=price_from(row.prices),
        labels=row.labels,
        budget_micros=budget_of(run),
        turns_max=run.order.config.max_turns,
    )
