"""One turn of a session as an order: what a host heeds has its own place, the rest is words, each loss is named.

Pure: a session and the hello of its host come in, an order and the losses come out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from backplane.contract.canonical import Json
from backplane.contract.choices import explain
from backplane.contract.conversation import (
    AgentMessage,
    Image,
    Message,
    MessageToolCall,
    SessionTurn,
    ToolResultMessage,
    UserMessage,
    unresolved,
)
from backplane.contract.envelope import Hello
from backplane.contract.pictures import IMAGES_BYTES_MAX
from backplane.contract.work import Lane, Mode, PolicyProfile, RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import BackendError, ConfigError
from backplane.policy.paths import CHANGE_NOTHING
from backplane.policy.rules import tool_names, with_defaults
from backplane.providers.reading import PREFIX, text_of
from backplane.providers.tools import Tool, ToolDefinition
from backplane.runtime.approvals import OnAsk
from backplane.runtime.hooks import Hook

SESSION: Final = "session/1"
INTERRUPT: Final = "interrupt/1"
INPUT: Final = "input/1"


class SessionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a session: model, tools, folder, and how the agent works.

    A saved session that is gone on with has its own model, prompt, limits, folder, mode and lane where None is given.

    Attributes:
        model: None is the backend's own choice.
        max_tokens: of one answer of the model.
        temperature: of the model; None is its own.
        system_prompt: instructions for the whole conversation.
        tools: functions, whose annotations are the schema and whose docstrings the description, or `ToolDefinition`s.
        session_id: a saved session to go on with.
        initial_prompt: sent as the first turn, before anything else.
        max_turns: turns of the model in one turn of the session.
        max_budget_usd: US dollars that each turn may spend; a provider that cannot hold it refuses the turn.
        root: the folder to work on; None is one of the session's own, empty at its start and gone at its end.
        mode: `staged` (None) works in a copy of the folder, `pass_through` in the folder itself.
        lane: `workspace_first` (None) **writes the result of each complete turn into the folder**, where the next turn
            finds it, except one with a finding of its order's `fail_on`, which `losses` names. `patch_first` leaves
            the folder as it is: each turn's result is its patch, for `ControlPlane.apply`, and the next turn begins
            without it.
        policy: a profile, the name of a shipped one, or the path of a file; None is the configured one.
        on_ask: answers approvals, a plain or `async` function from `Approval` to `Decision`; `stream` has them wait for
            `Session.answer` while the stream is read; None leaves them to their defaults.
        hooks: asked before tools run and after.
        save: keep the session in the state folder, so that another process can go on with it.
    """

    model: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    system_prompt: str | None = None
    tools: Sequence[Tool] = ()
    session_id: str | None = None
    initial_prompt: str | None = None
    max_turns: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_budget_usd: Annotated[float, msgspec.Meta(ge=0)] | None = None
    root: str | os.PathLike[str] | None = None
    mode: Mode | None = None
    lane: Lane | None = None
    policy: PolicyProfile | str | None = None
    on_ask: OnAsk | Literal["stream"] | None = None
    hooks: Sequence[Hook] = ()
    save: bool = True

    def __post_init__(self) -> None:
        """Check the members; `~` in `root` is the home folder. Raises ConfigError: `config_invalid`."""
        if isinstance(self.root, str | os.PathLike):
            msgspec.structs.force_setattr(self, "root", os.path.expanduser(os.fspath(self.root)))
        for field in msgspec.structs.fields(SessionConfig):
            if field.name not in _OF_PROGRAM:
                shaped(getattr(self, field.name), _PATH.get(field.name, field.type), f"SessionConfig.{field.name}")
        for name, (kinds, fix) in _LISTS.items():
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ConfigError("config_invalid", f"SessionConfig.{name} is no list", hint=fix)
            wrong = [one for one in value if not isinstance(one, kinds)]
            if wrong:
                raise ConfigError("config_invalid", f"SessionConfig.{name} has {wrong[0]!r:.80}", hint=fix)
        if self.on_ask not in (None, "stream") and not callable(self.on_ask):
            raise ConfigError(
                "config_invalid", "SessionConfig.on_ask is no function", hint='one from an Approval, or "stream"'
            )


KEPT: Final = (
    *("model", "system_prompt", "max_tokens", "temperature", "max_turns", "max_budget_usd"),
    *("root", "mode", "lane"),
)
"""Members that are saved in a session's file; None leaves the saved value."""

_OF_PROGRAM: Final = ("tools", "policy", "on_ask", "hooks")
"""Members that hold functions, or are read later."""

_PATH: Final[dict[str, Any]] = {"root": str | None}

_LISTS: Final[dict[str, tuple[Any, str]]] = {
    "tools": ((ToolDefinition, Callable), "functions, or ToolDefinition values"),
    "hooks": (Hook, "values of backplane.Hook"),
}

T = TypeVar("T")


def shaped(value: object, kind: type[T], what: str, hint: str | None = None) -> T:
    """Return a value that a program gave, where it has the shape it should have.

    Raises:
        ConfigError: `config_invalid`, it has another.
    """
    try:
        plain = msgspec.to_builtins(value, builtin_types=(bytes,))
        msgspec.json.encode(plain)  # A text with half of a surrogate pair cannot be written anywhere.
        return msgspec.convert(plain, kind)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        fact = explain(error, kind) if isinstance(error, msgspec.ValidationError) else str(error)
        raise ConfigError("config_invalid", f"{what}: {fact}", hint=hint) from error


class Abilities(msgspec.Struct, frozen=True):
    """Abilities that a host announced in its hello."""

    heeds: frozenset[str]
    extensions: frozenset[str]
    levels: dict[str, Any]
    reads: bool = True
    """Words beside the task reach a model: a host that heeds no context may take the task for a command."""
    host: str | None = None
    """The host's own name: `claude`, `codex`, `api`, …"""

    @property
    def keeps(self) -> bool:
        """True if the host keeps conversations itself."""
        return "session" in self.heeds and SESSION in self.extensions

    def keeps_in(self, mode: str) -> bool:
        """Return True if it keeps them in this mode: one that is stored with its folder is lost with a copy of it."""
        return self.keeps and (mode == "pass_through" or not isinstance(self.levels.get("session_resume"), dict))

    @property
    def forks(self) -> bool:
        """True if it can go on with a copy of a conversation."""
        return self.keeps and self.levels.get("session_fork") in ("native", "emulated")


def abilities(hello: Hello) -> Abilities:
    """Read a hello; a host that does not say what it heeds is taken to heed nothing but the order's words."""
    heeds = () if hello.heeds is msgspec.UNSET else hello.heeds
    reads = hello.heeds is msgspec.UNSET or "context" in heeds
    return Abilities(frozenset(heeds), frozenset(hello.extensions), hello.capabilities, reads, hello.backend.id)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one turn's order."""

    config: Any
    words: str
    images: tuple[Image, ...] = ()
    """Shown with them."""
    can: Abilities
    provider: str
    turns: tuple[SessionTurn, ...] = ()
    """The earlier turns."""
    native: str | None = None
    """Id of the host's own conversation to go on with."""
    forks: bool = False
    system_told: str | None = None
    """The system prompt that the host's own conversation has, in the user's words."""
    parent: Json = None
    tools: Json = None
    """The row of the server of the session's functions."""
    names: frozenset[str] = frozenset()
    """Names of these functions."""
    root: str
    policy: PolicyProfile
    fresh: bool = False
    """Calls without a result are asked about: this turn comes after one that was cut off."""


class Composed(msgspec.Struct, frozen=True):
    order: WorkOrder
    losses: tuple[str, ...]


def compose(wanted: Wanted) -> Composed:
    """Make the order of one turn.

    Raises:
        BackendError: `capability_unsupported`, the session has tools and the host takes no MCP servers.
    """
    losses: list[str] = []
    heeds, config = wanted.can.heeds, wanted.config
    if wanted.tools is not None and "mcp_servers" not in heeds:
        fact = f"{wanted.provider!r} takes no tools of the program"
        raise BackendError("capability_unsupported", fact, hint="leave `tools` empty, or choose another provider")
    own: dict[str, Json] = {"parent": wanted.parent} if wanted.parent is not None else {}
    images = list[Image]()
    words = [*_system(wanted, own, losses), *_history(wanted, own, losses, images), wanted.words]
    images += wanted.images
    if images and "images" in heeds:
        own["images"] = msgspec.to_builtins(images)
    elif images:
        losses.append(NO_IMAGES)
    sampling = {"max_tokens": config.max_tokens, "temperature": config.temperature}
    asked = {name: value for name, value in sampling.items() if value is not None}
    if asked and "sampling" in heeds:
        own["sampling"] = asked
    losses += [] if "sampling" in heeds else [f"dropped: {name}, the provider has no such setting" for name in asked]
    given = {"model": config.model, "max_turns": config.max_turns}
    for name, value in list(given.items()):
        if value is not None and name not in heeds:
            losses.append(f"dropped: {name}, the provider has no such setting")
            given[name] = None
    if (config.mode, config.lane) == ("staged", "patch_first") and any(turn.run_id for turn in wanted.turns):
        losses.append(UNSEEN)
    if wanted.tools is not None:
        own["mcp_servers"] = [wanted.tools]
    order = WorkOrder(
        "\n\n".join(words),
        lane=config.lane,
        workspace=WorkspaceSpec(root=wanted.root, mode=config.mode),
        policy=wanted.policy,
        # A budget is never dropped: a host that does not heed it refuses the order.
        config=RuntimeConfig(vendor={"abp": own} if own else {}, max_budget_usd=config.max_budget_usd, **given),
    )
    return Composed(order, tuple(losses))


def _system(wanted: Wanted, own: dict[str, Json], losses: list[str]) -> list[str]:
    system, told = wanted.config.system_prompt or None, wanted.system_told
    if "system" in wanted.can.heeds:
        own.update({"system": system} if system else {})
        return []
    if not wanted.can.reads:
        dropped = "dropped: system_prompt, the provider does what the task says and reads nothing else"
        losses += [dropped] if system else []
        return []
    losses += ["emulated: system_prompt, it is said in the user's words"] if system else []
    if system == told:
        return []
    # The provider's own conversation has the earlier words for good.
    losses += [REPLACED] if told else []
    if system is None:
        return [f"The instructions for this whole conversation that were given earlier no longer hold:\n{told}"]
    return [f"Instructions for this whole conversation{', in place of the earlier ones' if told else ''}:\n{system}"]


REPLACED: Final = "emulated: a change of system_prompt, the earlier one stays in the conversation and is revoked there"

UNSEEN: Final = "dropped: files that earlier turns changed, which stay in the turns' patches (lane patch_first)"
"""Unless the caller has applied them."""

NO_IMAGES: Final = "dropped: images, the provider takes none"

NOT_CARRIED: Final = (
    "The folder that you work in may lack what earlier turns changed. The results of the calls below are recorded, and "
    "their changes were not carried over to this folder: look first, and make again what is missing and still wanted."
)

QUESTION: Final = (
    "First, a question about what went before: no result was recorded of the calls below, so whether they ran is "
    "unknown. Find out by looking, and do not repeat any of them before you know that it did not run."
)


def _history(wanted: Wanted, own: dict[str, Json], losses: list[str], images: list[Image]) -> list[str]:
    """Put the history into the order's own members, or return it as words; then its pictures go to `images`."""
    said = [(turn, message) for turn in wanted.turns for message in turn.messages]
    question = _questions(wanted) if wanted.can.reads else []
    if wanted.can.keeps_in(wanted.config.mode):
        own["session"] = {"fork" if wanted.forks else "resume": wanted.native} if wanted.native else {"keep": True}
    if wanted.native or not said:
        return question
    messages = [_carried(turn, message, wanted, losses) for turn, message in said]
    if "history" in wanted.can.heeds:
        own["history"] = msgspec.to_builtins(messages)
        return question
    if not wanted.can.reads:
        losses.append("dropped: history, the provider does what the task says and reads nothing else")
        return []
    messages = _fitting(messages, wanted.images, losses)
    losses.append("emulated: history, it is said in the user's words")
    losses += ["dropped: thinking of earlier turns"] if any(_thinks(message) for message in messages) else []
    proven = any(isinstance(one, AgentMessage) and without_proofs(one) != one for one in messages)
    losses += ["dropped: proofs of words and calls, which are said in the user's words"] if proven else []
    unknown = {call.id for call in unresolved(tuple(messages))}
    record = [_shown(message, unknown, images) for message in messages]
    return [*question, "\n".join(["What was said before in this conversation, as a record:", *record])]


def _questions(wanted: Wanted) -> list[str]:
    """Return what the model has to find out before it goes on: lost changes, and calls whose end is unknown."""
    # A conversation that the host keeps was given the older ones already.
    turns = wanted.turns[-1:] if wanted.native else wanted.turns
    in_patches = (wanted.config.mode, wanted.config.lane) == ("staged", "patch_first")
    lost = [call for turn in turns if in_patches or not turn.carried for call in _changes(turn)]
    cut = unresolved(wanted.turns[-1].messages) if wanted.turns and wanted.fresh else ()
    asked = ((NOT_CARRIED, lost), (QUESTION, cut))
    return ["\n".join([words, *map(_shown_call, calls)]) for words, calls in asked if calls]


def _changes(turn: SessionTurn) -> Iterator[MessageToolCall]:
    """Yield the calls of a turn that have a result and may have changed files."""
    open_calls = {call.id for call in unresolved(turn.messages)}
    for message in turn.messages:
        for call in message.tool_calls if isinstance(message, AgentMessage) else ():
            if call.id not in open_calls and CHANGE_NOTHING.isdisjoint(tool_names(call.name)):
                yield call


def _fitting(messages: list[Message], more: Sequence[Image], losses: list[str]) -> list[Message]:
    """Return the messages without pictures that no agent is shown: those by address, or all if too large together."""
    images = [image for message in messages if isinstance(message, UserMessage) for image in message.images]
    fits = sum(len(image.data or "") for image in (*images, *more)) * 3 // 4 <= IMAGES_BYTES_MAX
    kept = [image for image in images if fits and image.data is not None]
    if kept == images:
        return messages
    losses.append("dropped: pictures of earlier turns that are by address, or together too large")
    return [
        replace(one, images=tuple(image for image in one.images if image in kept))
        if isinstance(one, UserMessage)
        else one
        for one in messages
    ]


def _carried(turn: SessionTurn, message: Message, wanted: Wanted, losses: list[str]) -> Message:
    """A message as this provider may have it: proofs go back to who made them alone."""
    if isinstance(message, UserMessage) and message.images and "images" not in wanted.can.heeds:
        losses.append(NO_IMAGES)
        return replace(message, images=())
    if not isinstance(message, AgentMessage):
        return message
    thinking = message.thinking
    if (turn.provider, turn.model) != (wanted.provider, wanted.config.model):
        if any(part.is_proven for part in thinking):
            losses.append(f"dropped: signatures of thinking, which only {turn.provider} can read")
        if thinking:
            losses.append("dropped: thinking of another provider or model")
        thinking, bare = (), without_proofs(message)
        if bare != message:
            losses.append(f"dropped: proofs of words and calls, which only {turn.provider} can read")
        message = bare
    elif any(not part.is_proven for part in thinking) and "history" in wanted.can.heeds:
        losses.append("dropped: thinking without a signature")
    calls = tuple(
        replace(call, name=PREFIX + call.name) if call.name in wanted.names else call for call in message.tool_calls
    )
    return replace(message, thinking=thinking, tool_calls=calls)


def without_proofs(message: AgentMessage) -> AgentMessage:
    """The same without the proofs of its words and calls; thinking is left as it is."""
    calls = tuple(replace(call, signature=None) for call in message.tool_calls)
    return replace(message, tool_calls=calls, signature=None)


def _thinks(message: Message) -> bool:
    return isinstance(message, AgentMessage) and bool(message.thinking)


def _shown(message: Message, unknown: Collection[str], images: list[Image]) -> str:
    if isinstance(message, UserMessage):
        images += message.images
        first = len(images) - len(message.images) + 1
        shown = [f"(picture {number} of this message)" for number in range(first, len(images) + 1)]
        return " ".join([f"User: {message.content}", *shown])
    if isinstance(message, ToolResultMessage):
        return f"{'Error' if message.is_error else 'Result'} of {message.tool_call_id}: {message.content}"
    said = [f"Assistant: {message.content}"] if message.content else []
    calls = [_shown_call(call) + " (no result was recorded)" * (call.id in unknown) for call in message.tool_calls]
    return "\n".join([*said, *calls])


def _shown_call(call: MessageToolCall) -> str:
    return f"Call {call.id}: {call.name} {text_of(call.arguments)}"


def tightened(base: PolicyProfile, turn: PolicyProfile) -> PolicyProfile:
    """Return a session's policy with what a later one forbids beside it, which cannot allow more.

    Raises:
        ConfigError: `config_invalid`, the later one allows what the session's does not.
    """
    merged: dict[str, tuple[str, ...]] = {}
    base = with_defaults(base)  # What counts in a session that was given no policy.
    for name in PolicyProfile.__struct_fields__:
        ours: tuple[str, ...] = getattr(base, name)
        theirs: tuple[str, ...] = getattr(turn, name)
        if not name.startswith("allow"):
            merged[name] = (*ours, *(rule for rule in theirs if rule not in ours))
            continue
        more = [rule for rule in theirs if ours and rule not in ours]
        if more:
            fact = f"the policy has {more[0]!r} in {name}, and the session's has not"
            raise ConfigError("config_invalid", fact, hint="a policy that is given later only tightens the session's")
        merged[name] = theirs or ours
    return PolicyProfile(**merged)


def going_on(kept: PolicyProfile, given: PolicyProfile | None, configured: PolicyProfile | None) -> PolicyProfile:
    """Return the policy of a resumed session: the kept policy, tightened by the given or else the configured one.

    A configured rule that allows more than the session's policy is left out, as it was when the session began.

    Raises:
        ConfigError: `config_invalid`, the given policy allows more, or the configured one has no rule in common with
            the kept one.
    """
    if given is not None or configured is None:
        return kept if given is None else tightened(kept, given)
    shared: dict[str, tuple[str, ...]] = {}
    for name in PolicyProfile.__struct_fields__:
        if not name.startswith("allow") or not (ours := getattr(kept, name)) or not getattr(configured, name):
            continue
        shared[name] = tuple(rule for rule in getattr(configured, name) if rule in ours)
        if not shared[name]:  # An empty list would allow everything.
            fact = f"{name} of the session's policy and of the configured one have nothing that both allow"
            raise ConfigError("config_invalid", fact, hint="go on with --policy, which stands for the configured one")
    return tightened(kept, replace(configured, **shared))
