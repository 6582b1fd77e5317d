"""Reads vendors' JSON (requests, responses, streams) into the neutral form, and writes it from there.

In the readers, `at` is the JSON pointer to the value that is read, and `rest` is a copy of an object from which each
member is removed as it is read; what is left of it stays native, in `ext`. In the writers, `notes` collects the losses.

`DIALECTS` is the table; each file in it ends with its `Dialect`. Vendors are translated to each other only through
`ir`. Nothing here does I/O.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from backplane.contract import events
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.contract.unknown import nearest_name
from backplane.dialects import framing
from backplane.dialects.agent_events import end_events
from backplane.dialects.common import kind_of, spelled_at
from backplane.dialects.diff import REASONS, code_of, differences, is_named
from backplane.dialects.ir import Answer, Kept, Loss, StreamFailed, Translated
from backplane.dialects.streams import Accumulator
from backplane.errors import TranslationError

DIALECTS: Final[dict[str, str]] = {
    "openai": "backplane.dialects.openai",
    "claude": "backplane.dialects.claude",
    "gemini": "backplane.dialects.gemini",
    "codex": "backplane.dialects.codex",
    "kimi": "backplane.dialects.kimi",
    "copilot": "backplane.dialects.copilot",
}
"""Dialect → its module, loaded on first use. A new dialect is one more row and one more file."""

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind = Literal["request", "response"]
LossPolicy = Literal["allow", "warn", "fail"]

__all__ = [
    "DIALECTS",
    "Kind",
    "LossPolicy",
    "StreamTranslation",
    "check_losses",
    "dialect",
    "end_events",
    "loss_event",
    "read_stream",
    "sum_stream",
    "translate",
    "unnamed_losses",
    "unread",
]


def dialect(name: str) -> Any:
    """Return the dialect with this name, from the table or from another wheel.

    Raises:
        TranslationError: `dialect_unknown`.
    """
    if name not in DIALECTS:
        return _plugged(name)
    return importlib.import_module(DIALECTS[name]).DIALECT


GROUP: Final = "backplane.dialects"
"""Group of the entry points of dialects in other wheels; each entry point is a `Dialect`."""


@cache
def entries() -> tuple[EntryPoint, ...]:
    """Return the entry points of dialects in other wheels; cached, because the search for them takes 14 ms."""
    from importlib.metadata import entry_points  # Slow: it imports `email`. No shipped dialect needs it.

    return tuple(entry_points(group=GROUP))


def _plugged(name: str) -> Any:
    found = [entry for entry in entries() if entry.name == name]
    if len(found) != 1:
        there = sorted({*DIALECTS, *(entry.name for entry in entries())})
        fact = f"two wheels bring a dialect {name!r}" if found else f"no dialect {name!r}"
        near = nearest_name(name, there) if not found else None
        meant = f"did you mean {near}? " if near else ""
        raise TranslationError("dialect_unknown", fact, hint=f"{meant}there are {', '.join(there)}")
    try:
        made = found[0].load()
    except Exception as error:  # Third-party code can raise anything.
        fact = f"the dialect {name!r} cannot be loaded: {type(error).__name__}: {error}"
        raise TranslationError("dialect_unknown", fact[:400], hint="correct or remove its wheel") from error
    if not (callable(getattr(made, "to_ir", None)) and callable(getattr(made, "from_ir", None))):
        fact = f"the dialect {name!r} of a wheel is none: {made!r:.80}"
        raise TranslationError("dialect_unknown", fact, hint="it needs what `backplane.dialects.vendor` has")
    return made


def translate(
    document: Json, source: str, target: str, kind: Kind = "request", policy: LossPolicy = "warn"
) -> Translated[Json]:
    """Translate one request or response.

    Args:
        policy: `warn` returns the losses, `allow` does not search for any, `fail` raises if there are material ones.

    Raises:
        TranslationError: `dialect_unknown`; `dialect_mapping_failed`, the document is not of the source's dialect;
            `mapping_unsupported_capability` or `ir_invalid`, its meaning would change; `mapping_lossy_conversion`
            by the policy.
    """
    reader, writer = dialect(source), dialect(target)
    if kind == "request":
        read = reader.to_ir(document)
        written = writer.from_ir(read.value)
    else:
        read = reader.response_to_ir(document)
        written = writer.response_from_ir(read.value)
    if source == target or policy == "allow":
        return Translated(written.value, () if policy == "allow" else written.losses)
    losses: tuple[Loss, ...] = tuple(
        msgspec.structs.replace(loss, path=spelled_at(loss.path, document, reader.aliases))
        for loss in (*read.losses, *written.losses)
    )
    losses = ordered((*losses, *unnamed_losses(document, written.value, reader, writer, losses, kind)))
    check_losses(losses, policy)
    return Translated(written.value, losses)


def unnamed_losses(
    document: Json, written: Json, reader: Any, writer: Any, named: Sequence[Loss], kind: Kind = "request"
) -> Iterator[Loss]:
    """Yield a loss for each value that is not equal after translation back from the target, unless `named` has it."""
    if kind == "request":
        back = reader.from_ir(writer.to_ir(written).value).value
    else:
        back = reader.response_from_ir(writer.response_to_ir(written).value).value
    paths = {loss.path for loss in named}
    # A loss for an added value does not cover a value that is missing at the same path.
    missing = {loss.path for loss in named if loss.kind != "synthesised"}
    for place, how in differences(reader.normal(document), reader.normal(back)):
        at = spelled_at(place, document, reader.aliases)
        if not is_named(at, paths if how == "synthesised" else missing):
            code = "required" if how == "synthesised" else code_of(at, how)
            yield Loss(path=at, dialect=reader.NAME, target=writer.NAME, kind=how, code=code, reason=REASONS[how])


def ordered(losses: Iterable[Loss]) -> tuple[Loss, ...]:
    """Return losses, each once, material ones first."""
    once: dict[tuple[str, str, str], Loss] = {}
    for loss in losses:
        once.setdefault((loss.path, loss.kind, loss.code), loss)
    return tuple(sorted(once.values(), key=lambda loss: not loss.is_material))


def check_losses(losses: Sequence[Loss], policy: LossPolicy) -> None:
    """Raise an error if a policy does not allow losses.

    Raises:
        TranslationError: `mapping_lossy_conversion`, the policy is `fail` and a loss is material.
    """
    material = [loss for loss in losses if loss.is_material]
    if policy == "fail" and material:
        first = material[0]
        raise TranslationError(
            "mapping_lossy_conversion",
            f"{len(material)} losses; the first is {first.path or '/'}: {first.reason}",
            hint="allow losses, or take out what the target cannot say",
            evidence="; ".join(f"{loss.path} {loss.kind} {loss.code}" for loss in material),
        )


class StreamTranslation:
    """Translates one stream chunk by chunk; if source and target are equal, chunks are returned unchanged.

    Args:
        source: dialect of the chunks to translate.
        target: dialect of the translated chunks.

    Raises:
        TranslationError: `dialect_unknown`.
    """

    def __init__(self, source: str, target: str) -> None:
        self.reader = dialect(source).StreamReader()
        self.writer = dialect(target).StreamWriter(source)
        self._count = 0
        self._began = False
        self.is_finished = False
        self._losses: dict[tuple[str, str, str], Loss] = {}
        self._at_end: tuple[Loss, ...] | None = None

    def feed(self, chunk: Json) -> list[Json]:
        """Translate a chunk; return the target's chunks, often one, sometimes none."""
        found = self.reader.read(chunk)
        if found:
            self._began = self._began or any(type(event) is not Kept for event in found)
        if self._is_home and not self.writer.sum.has_ended:
            self.writer.sum.add_all(found)
            out = [chunk] if type(chunk) is dict else []
        else:
            out = [made for event in found for made in self.writer.write(event)]
        if self.writer.ledger.losses or self.reader.losses:
            self._name(chunk)
        self._count += 1
        return out

    def finish(self, *, done: bool = False) -> list[Json]:
        """Return the chunks of the stream's end; call it once. An empty stream is a failure.

        Args:
            done: True if the stream ended with `[DONE]` (`framing.Detecting.is_done`), so that it was not cut.
        """
        noted = len(self.reader.losses)
        rest = self.reader.finish(done=done)
        if self._began and self._is_home:
            del self.reader.losses[noted:]  # Written in its own dialect, the stream loses nothing.
            self.writer.sum.add_all(rest)
            self.writer.lose_cut()
            out: list[Json] = self.writer.fail_cut()
        else:
            empty = [] if self._began else [StreamFailed("the stream holds no answer", "stream_empty")]
            out = [made for event in (*empty, *rest) for made in self.writer.write(event)]
        self._began = self.is_finished = True
        self._name(None)
        return out

    @property
    def _is_home(self) -> bool:
        return bool(self.writer.ledger.is_home)

    def _name(self, chunk: Json) -> None:
        """Store the new losses, each once, with the chunk that caused it."""
        for loss in (*self.reader.losses, *self.writer.ledger.losses):
            key = (loss.code, loss.reason, "" if loss.path[1:].isdecimal() else loss.path)
            if key not in self._losses:
                said: dict[str, Any] = (
                    {} if chunk is None else {"chunk": self._count, "chunk_type": kind_of(chunk, self.reader.tag)}
                )
                said["path"] = loss.path or ("" if chunk is None else f"/{self._count}")
                self._losses[key] = msgspec.structs.replace(loss, target=self.writer.ledger.target, **said)
        self.reader.losses.clear()
        self.writer.ledger.losses.clear()

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The losses so far, each with its first chunk; after the end of the stream also those of the whole answer."""
        if self._at_end is None and self.is_finished:
            self._at_end = tuple(self._compared())
        return (*self._losses.values(), *(self._at_end or ()))

    def _compared(self) -> Iterator[Loss]:
        """Yield the losses of the answer that the chunks form, unless a chunk already has the loss."""
        source, target = self.writer.ledger.source, self.writer.ledger.target
        if self._is_home or self.writer.sum.failure is not None or not self.writer.sum.stops:
            return
        try:
            document = dialect(source).response_from_ir(self.writer.sum.answer()).value
            losses = translate(document, source, target, "response").losses
        except TranslationError:  # The chunks of a faulty stream may form no valid answer.
            return
        said = {(loss.code, loss.reason) for loss in self._losses.values()}
        paths = {loss.path for loss in self._losses.values()}
        yield from (loss for loss in losses if (loss.code, loss.reason) not in said and not is_named(loss.path, paths))


def sum_stream(chunks: Iterable[Json], source: str, *, done: bool = False) -> Translated[Answer]:
    """Return the answer that a vendor's chunks form; `response_from_ir` writes it as the vendor's response.

    Args:
        done: True if the stream ended with `[DONE]`.

    Raises:
        TranslationError: `dialect_unknown`.
    """
    reader, total = dialect(source).StreamReader(), Accumulator(source)
    for chunk in chunks:
        total.add_all(reader.read(chunk))
    total.add_all(reader.finish(done=done))
    return Translated(total.answer(), tuple(reader.losses))


def read_stream(data: bytes, source: str) -> list[Json]:
    """Return the chunks of a whole stream; its framing is detected."""
    reader = framing.Detecting(is_named=source == "copilot")
    return [*reader.feed(data), *reader.finish()]


def unread(events: int, source: str, target: str) -> Loss:
    """Return the loss for a stream's events that are no JSON, which its framing skipped and counted."""
    reason = f"{events} of the stream's events could not be read as JSON"
    return Loss(path="", dialect=source, target=target, kind="dropped", code="fallback", reason=reason)


def loss_event(loss: Loss, now: str) -> AgentEvent:
    """Return a loss as an agent event, so that the receipt has it."""
    fields = ((name, getattr(loss, name)) for name in loss.__struct_fields__)
    body: dict[str, Json] = {name: value for name, value in fields if value is not None}
    return events.carry("loss", body, ts=now, message=f"{loss.kind} {loss.path or '/'}: {loss.reason}")
