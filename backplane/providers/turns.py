"""Composes the order of a turn: settings that the host heeds become members, others words; losses are listed.

Pure: a session and the abilities of its host come in, an order and the losses come out.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from backplane.contract.canonical import Json
from backplane.contract.conversation import (
    AgentMessage,
    Image,
    Message,
    MessageToolCall,
    SessionFile,
    SessionTurn,
    ToolResultMessage,
    UserMessage,
    calls_of,
    unresolved,
)
from backplane.contract.envelope import Hello
from backplane.contract.pictures import IMAGES_BYTES_MAX
from backplane.contract.unknown import explain
from backplane.contract.work import Lane, Mode, PolicyProfile, RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import ConfigError, require_type
from backplane.policy.paths import CHANGE_NOTHING
from backplane.policy.rules import tool_names
from backplane.providers.reading import CUT_OFF, PREFIX, text_of
from backplane.providers.tools import Tool, Toolset
from backplane.runtime.approvals import OnAsk
from backplane.runtime.hooks import Hook
from backplane.runtime.options import check_callbacks

SESSION: Final = "session/1"
INTERRUPT: Final = "interrupt/1"


class SessionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a session: model, tools, folder, and how the agent works.

    A resumed session keeps its own model, prompt, limits, folder, mode and lane where None is given.

    Attributes:
        model: None is the backend's own choice.
        max_tokens: most tokens of one answer of the model; None leaves it to the provider.
        temperature: the model's sampling temperature; None leaves it to the provider.
        system_prompt: instructions for the whole conversation.
        tools: functions, whose annotations are the schema and whose docstrings the description, or `ToolDefinition`s.
        session_id: a saved session to resume.
        initial_prompt: sent as the first turn, before anything else.
        max_turns: turns of the model in one turn of the session.
        max_budget_usd: US dollars that each turn may spend; a provider that cannot keep to it refuses the turn.
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
        save: keep the session in the state folder, so that another process can resume it.

    Raises:
        ConfigError: `config_invalid`, a member has a wrong type or value.
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
        if isinstance(self.root, str | os.PathLike):
            msgspec.structs.force_setattr(self, "root", os.path.expanduser(os.fspath(self.root)))
        for field in msgspec.structs.fields(SessionConfig):
            if field.name not in ("tools", "policy", "on_ask", "hooks"):
                kind: Any = str | None if field.name == "root" else field.type
                shaped(getattr(self, field.name), kind, f"SessionConfig.{field.name}")
        check_callbacks(None if self.on_ask == "stream" else self.on_ask, self.hooks)
        require_type(self.tools, Sequence, "`tools`", "a list of functions or ToolDefinition values")
        Toolset(self.tools)


KEPT: Final = (
    *("model", "system_prompt", "max_tokens", "temperature", "max_turns", "max_budget_usd"),
    *("root", "mode", "lane"),
)
"""Members of a `SessionConfig` that are saved in a session's file; None leaves the saved value."""

T = TypeVar("T")


def shaped(value: object, kind: type[T], what: str, hint: str | None = None) -> T:
    """Check a value of the calling program and return it as a `kind`. Raises ConfigError: `config_invalid`."""
    try:
        plain = msgspec.to_builtins(value, builtin_types=(bytes,))
        msgspec.json.encode(plain)  # A text with half of a surrogate pair cannot be written anywhere.
        return msgspec.convert(plain, kind)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        fact = explain(error, kind) if isinstance(error, msgspec.ValidationError) else str(error)
        raise ConfigError("config_invalid", f"{what}: {fact}", hint=hint) from error


class Abilities(msgspec.Struct, frozen=True):
    """Abilities that a host announced in its hello."""

    heeds: frozenset[str] = frozenset()
    extensions: frozenset[str] = frozenset()
    levels: dict[str, Any] = {}
    reads: bool = True
    """True if words beside the task reach a model; a host that heeds no context may run the task as a command."""
    host: str | None = None
    """The host's own name: `claude`, `codex`, `api`, …; None before its hello."""

    def keeps_in(self, mode: str) -> bool:
        """Return True if the host keeps conversations in this mode; those in the folder itself are lost with a copy."""
        restricted = isinstance(self.levels.get("session_resume"), dict)
        return "session" in self.heeds and SESSION in self.extensions and (mode == "pass_through" or not restricted)

    @property
    def forks(self) -> bool:
        """True if the host can continue a copy of a conversation that it keeps."""
        return self.levels.get("session_fork") in ("native", "emulated")


def abilities(hello: Hello) -> Abilities:
    """Read a hello; a host that does not announce what it heeds counts as heeding only the order's words."""
    heeds = () if hello.heeds is msgspec.UNSET else hello.heeds
    reads = hello.heeds is msgspec.UNSET or "context" in heeds
    return Abilities(frozenset(heeds), frozenset(hello.extensions), hello.capabilities, reads, hello.backend.id)


class Native(msgspec.Struct, frozen=True):
    """A conversation that the provider itself keeps."""

    id: str
    system: str | None = None
    """The system prompt that the conversation began with; None if there was none."""
    is_copied: bool = False
    """True if the next turn continues a copy of the conversation."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """One turn, from which `compose` makes an order."""

    file: SessionFile
    """The session; if its last turn has no stop reason, that is the turn to compose."""
    message: UserMessage
    can: Abilities
    native: Native | None = None
    names: frozenset[str] = frozenset()
    """Names of the session's functions."""

    @property
    def turns(self) -> tuple[SessionTurn, ...]:
        """The earlier turns."""
        return tuple(turn for turn in self.file.turns[self.file.cleared :] if turn.stop_reason is not None)

    @property
    def leaves_patches(self) -> bool:
        """True if the changes of earlier turns stay in their patches."""
        return (self.file.mode, self.file.lane) == ("staged", "patch_first")


def compose(wanted: Wanted) -> tuple[WorkOrder, tuple[str, ...]]:
    """Return the order of one turn, without folder, policy and functions, and what is dropped or emulated in it."""
    file, heeds, losses, images = wanted.file, wanted.can.heeds, list[str](), list[Image]()
    sealed = [turn for turn in wanted.turns if turn.receipt_sha256 is not None]
    last = {"run_id": sealed[-1].run_id, "receipt_sha256": sealed[-1].receipt_sha256} if sealed else {}
    own: dict[str, Json] = {"parent": {"session": file.id, **last}}
    words = [*_system(wanted, own, losses), *_history(wanted, own, losses, images), wanted.message.content]
    images += wanted.message.images
    if images and "images" in heeds:
        own["images"] = msgspec.to_builtins(images)
    elif images:
        losses.append(NO_IMAGES)
    asked = {name: value for name in _SETTINGS if (value := getattr(file, name)) is not None}
    losses += [f"dropped: {name}, the provider has no such setting" for name in asked if _SETTINGS[name] not in heeds]
    taken: dict[str, Any] = {name: value for name, value in asked.items() if _SETTINGS[name] in heeds}
    if sampling := {name: taken.pop(name) for name in ("max_tokens", "temperature") if name in taken}:
        own["sampling"] = sampling
    if wanted.leaves_patches and any(turn.run_id for turn in wanted.turns):
        losses.append(UNSEEN)
    # A budget is never dropped: a host that does not heed it refuses the order.
    config = RuntimeConfig(vendor={"abp": own}, max_budget_usd=file.max_budget_usd, **taken)
    order = WorkOrder("\n\n".join(words), lane=file.lane, workspace=WorkspaceSpec(mode=file.mode), config=config)
    return order, tuple(losses)


_SETTINGS: Final = {"max_tokens": "sampling", "temperature": "sampling", "model": "model", "max_turns": "max_turns"}
"""Setting of a session → the word in a hello's `heeds` for a host that obeys it."""


def _system(wanted: Wanted, own: dict[str, Json], losses: list[str]) -> list[str]:
    """Put the system prompt into the order's own members, or return it as words for a new conversation."""
    system = wanted.file.system_prompt
    if not system:
        return []
    if "system" in wanted.can.heeds:
        own["system"] = system
        return []
    if not wanted.can.reads:
        losses.append("dropped: system_prompt, the provider does what the task says and reads nothing else")
        return []
    losses.append("emulated: system_prompt, it is said in the user's words")
    return [f"Instructions for this whole conversation:\n{system}"] if wanted.native is None else []


UNSEEN: Final = "dropped: files that earlier turns changed, which stay in the turns' patches (lane patch_first)"
"""Loss of a session whose turns leave their changes in patches; the caller may have applied them."""

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
    """Put the history into the order's own members, or return it as words and add its pictures to `images`."""
    can, native = wanted.can, wanted.native
    question = _questions(wanted) if can.reads else []
    if can.keeps_in(wanted.file.mode):
        way = "fork" if native is not None and native.is_copied else "resume"
        own["session"] = {"keep": True} if native is None else {way: native.id}
    if native is not None or not any(turn.messages for turn in wanted.turns):
        return question
    if not can.reads and "history" not in can.heeds:
        losses.append("dropped: history, the provider does what the task says and reads nothing else")
        return []
    messages = _messages(wanted, losses)
    if "history" in can.heeds:
        own["history"] = msgspec.to_builtins(messages)
        return question
    losses.append("emulated: history, it is said in the user's words")
    if any(isinstance(message, AgentMessage) and _bare(message) != message for message in messages):
        losses.append("dropped: thinking and signatures of earlier turns, as their history is said in words")
    pictures = [image for message in messages if isinstance(message, UserMessage) for image in message.images]
    size = sum(len(image.data or "") for image in (*pictures, *wanted.message.images)) * 3 // 4
    fitting = [image for image in pictures if size <= IMAGES_BYTES_MAX and image.data is not None]
    if fitting != pictures:
        losses.append("dropped: pictures of earlier turns that are by address, or together too large")
    unknown = {call.id for call in unresolved(messages)}
    record = [_shown(message, unknown, fitting, images) for message in messages]
    return [*question, "\n".join(["What was said before in this conversation, as a record:", *record])]


def _messages(wanted: Wanted, losses: list[str]) -> list[Message]:
    """Return the history for this provider, each call with a unique id, as some hosts number calls anew each turn."""
    taken, messages = set[str](), list[Message]()
    for number, turn in enumerate(wanted.turns):
        calls = {call.id for call in calls_of(turn.messages)}
        renamed = {id: f"{id}-turn-{number + 1}" for id in calls & taken}
        taken |= {*calls, *renamed.values()}
        messages += [_carried(turn, message, renamed, wanted, losses) for message in turn.messages]
    return messages


def _carried(
    turn: SessionTurn, message: Message, renamed: Mapping[str, str], wanted: Wanted, losses: list[str]
) -> Message:
    """Return a message for this provider; only the provider and model that made a signature get it back."""
    if isinstance(message, UserMessage):
        if not message.images or "images" in wanted.can.heeds:
            return message
        losses.append(NO_IMAGES)
        return replace(message, images=())
    if isinstance(message, ToolResultMessage):
        return replace(message, tool_call_id=renamed.get(message.tool_call_id, message.tool_call_id))
    if (turn.provider, turn.model) != (wanted.file.provider, wanted.file.model):
        if (bare := _bare(message)) != message:
            losses.append(f"dropped: thinking and signatures, which only the model of {turn.provider} can read")
        message = bare
    elif any(not part.is_proven for part in message.thinking) and "history" in wanted.can.heeds:
        losses.append("dropped: thinking without a signature")
    names = {name: PREFIX + name for name in wanted.names}
    calls = (
        replace(call, id=renamed.get(call.id, call.id), name=names.get(call.name, call.name))
        for call in message.tool_calls
    )
    return replace(message, tool_calls=tuple(calls))


def _bare(message: AgentMessage) -> AgentMessage:
    """Return a message without thinking and signatures."""
    calls = tuple(replace(call, signature=None) for call in message.tool_calls)
    return replace(message, tool_calls=calls, signature=None, thinking=())


def _questions(wanted: Wanted) -> list[str]:
    """Return the questions to the model about calls whose changes are not in the folder or that have no result."""
    # The provider's own conversation has the older questions.
    turns = wanted.turns[-1:] if wanted.native is not None else wanted.turns
    lost = [call for turn in turns if wanted.leaves_patches or not turn.carried for call in _changes(turn)]
    found = ((NOT_CARRIED, lost), (QUESTION, _unanswered(wanted)))
    return ["\n".join([words, *map(_shown_call, calls)]) for words, calls in found if calls]


def _unanswered(wanted: Wanted) -> list[MessageToolCall]:
    """Return the calls without a result, back to the last complete turn, which has settled the earlier ones."""
    calls: list[MessageToolCall] = []
    for turn in reversed(wanted.turns):
        was_cut = turn.stop_reason in CUT_OFF
        if was_cut or turn.provider != wanted.file.provider:
            calls = [*unresolved(turn.messages), *calls]
        if not was_cut:
            break
    return calls


def _changes(turn: SessionTurn) -> list[MessageToolCall]:
    """Return the calls of a turn that have a result and may have changed files."""
    done = [call for call in calls_of(turn.messages) if call not in unresolved(turn.messages)]
    return [call for call in done if CHANGE_NOTHING.isdisjoint(tool_names(call.name))]


def _shown(message: Message, unknown: Collection[str], fitting: Collection[Image], images: list[Image]) -> str:
    if isinstance(message, UserMessage):
        words = [f"User: {message.content}"]
        for image in message.images:
            if image in fitting:
                images.append(image)
                words.append(f"(picture {len(images)} of this message)")
        return " ".join(words)
    if isinstance(message, ToolResultMessage):
        return f"{'Error' if message.is_error else 'Result'} of {message.tool_call_id}: {message.content}"
    said = [f"Assistant: {message.content}"] if message.content else []
    calls = [_shown_call(call) + " (no result was recorded)" * (call.id in unknown) for call in message.tool_calls]
    return "\n".join([*said, *calls])


def _shown_call(call: MessageToolCall) -> str:
    return f"Call {call.id}: {call.name} {text_of(call.arguments)}"
