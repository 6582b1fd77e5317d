"""Reads the parts of an order for all agents: conversation, settings, MCP servers, prompt, images, schema, limits.

`start.AgentStart` has these facts for an agent with a program of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from backplane.agents.rows import KEY_PROXY, McpServer
from backplane.contract import conversation as said
from backplane.contract import pictures
from backplane.contract.canonical import Json
from backplane.dialects import ir
from backplane.dialects.history import neutral
from backplane.errors import BackendError, ConfigError
from backplane.upstream.cost import Price, micros

if TYPE_CHECKING:
    from backplane.agents.structured import AnswerSchema
    from backplane.host import Given

T = TypeVar("T")

ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
"""Pattern of a conversation's id, which becomes part of a path."""

# The conversation -----------------------------------------------------------------------------------------------------


class Continuation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The conversation that an order asks for: a kept one, a resumed one, or a fork."""

    keep: bool = False
    resume: str | None = None
    fork: str | None = None

    @property
    def wanted(self) -> str | None:
        """Id of the conversation to resume or fork; None without one."""
        return self.resume or self.fork

    @property
    def kept(self) -> bool:
        """True if the conversation is kept after the run."""
        return self.keep or self.wanted is not None


def read_conversation(run: Given) -> Continuation:
    """Read which conversation the order requests. Raises ConfigError: `config_invalid`."""
    said = run.order.abp("session")
    try:
        asked = msgspec.convert({} if said is None else said, Continuation)
        if asked.resume is not None and asked.fork is not None:
            raise ValueError("resume and fork exclude each other")
        wrong = [id for id in (asked.resume, asked.fork) if id is not None and not ID.fullmatch(id)]
        if wrong:
            raise ValueError(f"{wrong[0][:80]!r} is no id of a conversation")
    except ValueError as error:
        fix = 'one of {"keep": true}, {"resume": ID}, {"fork": ID}'
        raise ConfigError("config_invalid", f"config.vendor.abp.session: {error}", hint=fix) from error
    return asked


def behind_key_proxy() -> bool:
    """Return True if model requests go through the control plane's proxy, which then also enforces the budget."""
    return KEY_PROXY in os.environ


def asked_at(base_url: str | None) -> str | None:
    """Return the address for model requests: the control plane's proxy if that has the key, else `base_url`."""
    proxy = os.environ.get(KEY_PROXY)
    return base_url if proxy is None or base_url is None else proxy + urlsplit(base_url).path


_VERSION: Final = re.compile(r"/v\d\w*/?\Z")


def without_version(base_url: str | None) -> str | None:
    """Return an address without the version at its end, for a program that adds one itself."""
    return None if base_url is None else _VERSION.sub("", base_url)


def require_price(run: Given, prices: object, model: str = "the model") -> None:
    """Refuse a budget if the model has no price. Raises ConfigError: `config_invalid`."""
    if run.order.config.max_budget_usd is not None and prices is None:
        fact = f"max_budget_usd cannot be held: what {model} costs is not known"
        raise ConfigError("config_invalid", fact, hint="options = {prices = {input = …, output = …}}, in dollars")


# The rest of the order ------------------------------------------------------------------------------------------------


def hook_events(run: Given) -> set[Json]:
    """Return the events of the order's hooks; a `post_tool` hook sees results before the model does."""
    return {row.get("event") for row in run.order.abp("hooks") or () if isinstance(row, dict)}


def own_settings(run: Given, agent: str, known: Collection[str]) -> dict[str, Any]:
    """Return the order's settings for this agent, all of them texts; `system` includes the order's system prompt.

    Raises:
        ConfigError: `config_invalid`.
    """
    own, place = run.order.config.vendor.get(agent, {}), f"config.vendor.{agent}"
    fix = f"known are {', '.join(known)}" if known else "leave it out"
    if not isinstance(own, dict):
        raise ConfigError("config_invalid", f"{place} is no object", hint=fix)
    for name, value in own.items():
        if name not in known:
            raise ConfigError("config_invalid", f"{place} has no setting {name[:80]!r}", hint=fix)
        if value is not None and not isinstance(value, str):
            raise ConfigError("config_invalid", f"{place}.{name} is no text")
    system = [words for words in (own.get("system"), run.order.abp("system")) if words]
    return {**own, "system": "\n\n".join(system)} if system else dict(own)


def server_rows(
    run: Given,
    configured: Collection[Mapping[str, Any]],
    *,
    local: Mapping[str, Json] = {},
    remote: Mapping[str, Json] = {},
    headers: str = "headers",
    timed: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return the MCP servers of configuration and order, in the form of an agent's MCP client: name → members.

    Args:
        local: members to add to a server with a command.
        remote: members to add to a server with an address.
        headers: the agent's name for the member `headers`.
        timed: True to keep the member `tool_ms`, which no vendor's client has.

    Raises:
        ConfigError: `config_invalid`, a row cannot be read.
    """
    not_theirs = {"name"} if timed else {"name", "tool_ms"}
    ordered = run.order.abp("mcp_servers") or ()
    if not isinstance(ordered, list | tuple):
        raise ConfigError("config_invalid", "config.vendor.abp.mcp_servers is no list")
    made: dict[str, dict[str, Any]] = {}
    for row in (*configured, *ordered):
        try:
            named = msgspec.convert(row, McpServer)
        except msgspec.ValidationError as error:
            fix = "it has name; command, args and env, or url and headers"
            raise ConfigError("config_invalid", f"an MCP server cannot be read: {error}", hint=fix) from error
        if not named.name or not {"command", "url"} & set(row):
            raise ConfigError("config_invalid", "an MCP server has no name, or neither command nor url")
        theirs = {headers if key == "headers" else key: row[key] for key in row if key not in not_theirs}
        made[named.name] = {**(remote if "url" in row else local), **theirs}
    return made


def toml(text: str) -> str:
    """Return a text as a TOML string; every JSON string is one."""
    return msgspec.json.encode(text).decode()


# The input of an agent ------------------------------------------------------------------------------------------------

CONTEXT_BYTES_MAX: Final = 1024 * 1024
"""Maximum bytes of an order's snippets, all together; more is refused with `backend_context_length`."""
AGAIN: Final = "This does not satisfy the JSON Schema:\n{fault}\nAnswer with the corrected JSON value alone."
"""Request to correct an answer, for an agent that answers in text."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An order in the form for the run of any agent."""

    prompt: Json
    """The first message: a text, or blocks."""
    silence_s: int = 0
    """Seconds that the agent may be silent while no tool runs; 0 for no limit."""
    conversation: Continuation = Continuation()
    shape: AnswerSchema | None = None
    """Schema that the answer must match; None without one."""
    again: str = AGAIN
    """Message to the agent if its answer does not match the schema; `{fault}` is the mismatch."""
    labels: Mapping[str, str] = {}
    """Agent's name for a failure → the contract's code."""
    price: Price | None = None
    """Configured price of the model; None without one."""
    budget_micros: int | None = None
    """Budget in millionths of a dollar; None without one, or if the agent itself enforces it."""
    turns_max: int | None = None
    """Maximum model requests; None without a limit, or if the agent itself enforces it."""


def budget_of(run: Given) -> int | None:
    """Return the order's budget in millionths of a dollar; None without one."""
    usd = run.order.config.max_budget_usd
    return None if usd is None else micros(Decimal(str(usd)))


def shape_of(run: Given) -> AnswerSchema | None:
    """Return the schema that the answer must match; None without one. Raises ConfigError: `config_invalid`."""
    schema = run.order.abp("output_schema")
    if schema is None:
        return None
    from backplane.agents.structured import AnswerSchema  # Importing `jsonschema` takes 60 ms; few orders need it.

    return AnswerSchema(schema)


def sampling_of(run: Given) -> dict[str, Any]:
    """Return the order's model parameters, `config.vendor.abp.sampling`. Raises ConfigError: `config_invalid`."""
    asked = run.order.abp("sampling") or {}
    if not isinstance(asked, dict) or not set(asked) <= {"max_tokens", "temperature"}:
        fact = "config.vendor.abp.sampling cannot be read"
        raise ConfigError("config_invalid", fact, hint="it has max_tokens and temperature")
    return dict(asked)


def read_history(run: Given) -> tuple[ir.Message, ...]:
    """Read the messages before this order, `config.vendor.abp.history`; a call without a result gets a placeholder.

    Raises:
        ConfigError: `config_invalid`.
    """
    return neutral(_read(run, "history", tuple[said.Message, ...], "a list of messages, see contracts/sessions.md"))


def read_images(run: Given) -> tuple[said.Image, ...]:
    """Read the images of the task, `config.vendor.abp.images`. Raises ConfigError: `config_invalid`."""
    fix = "a list of {media_type, data} in Base64, or {url}"
    return pictures.checked(_read(run, "images", tuple[said.Image, ...], fix))


def _read(run: Given, name: str, kind: type[T], fix: str) -> T:
    """Read a list in `config.vendor.abp`. Raises ConfigError: `config_invalid`."""
    try:
        return msgspec.convert(run.order.abp(name) or (), kind)
    except msgspec.ValidationError as error:
        raise ConfigError("config_invalid", f"config.vendor.abp.{name}: {error}", hint=fix) from error


def snippets(run: Given) -> list[str]:
    """Return the order's snippets as texts for the prompt. Raises BackendError: `backend_context_length`."""
    parts = [f"Context, {snippet.name}:\n{snippet.content}" for snippet in run.order.context.snippets]
    if sum(len(part.encode()) for part in parts) > CONTEXT_BYTES_MAX:
        raise BackendError("backend_context_length", f"the order's snippets are over {CONTEXT_BYTES_MAX} bytes")
    return parts


def prompt_of(run: Given) -> str:
    """Return the prompt: snippets, names of files, the task. Raises BackendError."""
    files = run.order.context.files
    named = [f"Files to look at first: {', '.join(files)}"] if files else []
    return "\n\n".join([*snippets(run), *named, run.order.task])


def with_images(run: Given, words: str, block: Callable[[str, str], Json]) -> Json:
    """Return the prompt; as blocks of a message if the order has images.

    Args:
        block: returns the block for an image's media type and Base64 data.

    Raises:
        BackendError: `capability_unsupported`, an image is given by its URL.
        ConfigError: `config_invalid`.
    """
    images = read_images(run)
    if any(image.url is not None for image in images):
        fact = "this agent takes no picture by its address"
        raise BackendError("capability_unsupported", fact, hint="give the picture itself")
    blocks = [block(str(image.media_type), str(image.data)) for image in images]
    return [{"type": "text", "text": words}, *blocks] if blocks else words
