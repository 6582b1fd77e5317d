"""Vendors' JSON, read into the neutral form and written from it: requests, responses, streams.

`DIALECTS` is the table; every module in it has the same names. There is no translation from one vendor to another,
only through `ir`. Nothing here does I/O.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

from backplane.contract import events
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent
from backplane.dialects import _audit, framing
from backplane.dialects._events import end_events
from backplane.dialects._stream import Accumulator
from backplane.errors import TranslationError
from backplane.ir import Answer, Ended, Loss, Stopped, StreamEvent, StreamFailed, Translated

DIALECTS: Final[dict[str, str]] = {
    "openai": "backplane.dialects.openai",
    "claude": "backplane.dialects.claude",
    "gemini": "backplane.dialects.gemini",
    "codex": "backplane.dialects.codex",
    "kimi": "backplane.dialects.kimi",
    "copilot": "backplane.dialects.copilot",
}
"""Dialect → its module, loaded on first use. A seventh is one more row and one more file."""

Kind = Literal["request", "response"]
Policy = Literal["allow", "warn", "fail"]

__all__ = [
    "DIALECTS",
    "Kind",
    "Policy",
    "StreamTranslation",
    "check_losses",
    "dialect",
    "end_events",
    "loss_event",
    "read_stream",
    "sum_stream",
    "translate",
    "unread",
]


def dialect(name: str) -> Any:
    """Return a dialect's module.

    Raises:
        TranslationError: `dialect_unknown`.
    """
    if name not in DIALECTS:
        raise TranslationError("dialect_unknown", f"no dialect {name!r}", hint=f"there are {', '.join(DIALECTS)}")
    return importlib.import_module(DIALECTS[name])


def translate(
    document: Json, source: str, target: str, kind: Kind = "request", policy: Policy = "warn", *, audit: bool = True
) -> Translated[Json]:
    """Translate one request or response.

    Args:
        audit: also translate back, and name what did not return; without it only what the dialects report.
        policy: `warn` returns the losses, `allow` leaves them out, `fail` raises when there are material ones.

    Raises:
        TranslationError: `dialect_unknown`; `dialect_mapping_failed`, the document is not of the source's dialect;
            `mapping_unsupported_capability` or `ir_invalid`, its meaning would break; `mapping_lossy_conversion`
            by the policy.
    """
    written, losses = _through(document, source, target, kind)
    if audit and source != target and policy != "allow":
        losses += _unnamed(document, written, losses, source, target, kind)
    check_losses(losses, policy)
    return Translated(written, () if policy == "allow" else losses)


def _through(document: Json, source: str, target: str, kind: Kind) -> tuple[Json, tuple[Loss, ...]]:
    reader, writer = dialect(source), dialect(target)
    if kind == "request":
        read = reader.to_ir(document)
        written = writer.from_ir(read.value)
    else:
        read = reader.response_to_ir(document)
        written = writer.response_from_ir(read.value)
    losses = (*read.losses, *written.losses) if source != target else written.losses
    return written.value, losses


def _unnamed(
    document: Json, written: Json, losses: tuple[Loss, ...], source: str, target: str, kind: Kind
) -> tuple[Loss, ...]:
    try:
        back, _ = _through(written, target, source, kind)
    except TranslationError:  # what is refused on the way back was reported on the way there
        return ()
    return _audit.unnamed(document, written, back, losses, source, target)


def check_losses(losses: Sequence[Loss], policy: Policy) -> None:
    """Hold losses against a policy.

    Raises:
        TranslationError: `mapping_lossy_conversion`, the policy is `fail` and something material was lost.
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
    """One stream from one vendor's chunks into another's, chunk by chunk.

    Args:
        source: dialect of the chunks that come.
        target: dialect of the chunks that are wanted.

    Raises:
        TranslationError: `dialect_unknown`.
    """

    _began = False
    _has_end = False
    """The source said how it ended."""

    def __init__(self, source: str, target: str) -> None:
        self.reader = dialect(source).StreamReader()
        self.writer = dialect(target).StreamWriter(source)

    def feed(self, chunk: Json) -> list[Json]:
        """Return the chunks that say what this one said; often one, sometimes none."""
        found = self.reader.read(chunk)
        self._began = self._began or bool(found)
        self._has_end = self._has_end or any(_says_how(event) for event in found)
        return self._write(found)

    def finish(self) -> list[Json]:
        """Return what the end of the stream adds; call it once. That of a cut stream is a loss, made up here."""
        if self._began and not self._has_end:
            reason = "the stream was over before it said how; the target's end is made up"
            self.writer.ledger.synthesise("", "cut", reason)
            self._has_end = True
        return self._write(self.reader.finish())

    def _write(self, found: list[StreamEvent]) -> list[Json]:
        return [chunk for event in found for chunk in self.writer.write(event)]

    @property
    def losses(self) -> tuple[Loss, ...]:
        """What was lost so far."""
        return (*getattr(self.reader, "losses", ()), *self.writer.ledger.losses)


def _says_how(event: StreamEvent) -> bool:
    """Whether this tells how an answer ended."""
    return isinstance(event, Stopped | StreamFailed) or (isinstance(event, Ended) and event.answer is not None)


def sum_stream(chunks: Iterable[Json], source: str) -> Translated[Answer]:
    """Add a vendor's chunks up to its answer; `response_from_ir` writes it as the vendor's response.

    Raises:
        TranslationError: `dialect_unknown`.
    """
    reader, total = dialect(source).StreamReader(), Accumulator(source)
    for chunk in chunks:
        for event in reader.read(chunk):
            total.add(event)
    for event in reader.finish():
        total.add(event)
    return Translated(total.answer(), tuple(getattr(reader, "losses", ())))


def read_stream(data: bytes, source: str) -> list[Json]:
    """Cut a whole stream into its chunks, whatever framing it came in."""
    reader = framing.Detecting(is_named=source == "copilot")
    return [*reader.feed(data), *reader.finish()]


def unread(events: int, source: str, target: str) -> Loss:
    """The loss of a stream's events that are no JSON, which its framing has passed over and counted."""
    reason = f"{events} of the stream's events could not be read as JSON"
    return Loss(path="", dialect=source, target=target, kind="dropped", code="fallback", reason=reason)


def loss_event(loss: Loss, now: str) -> AgentEvent:
    """Say a loss as an agent event, so that it lands in the receipt."""
    body: dict[str, Json] = {
        "path": loss.path, "dialect": loss.dialect, "target": loss.target, "kind": loss.kind, "code": loss.code,
        "reason": loss.reason,
    }  # fmt: skip
    if loss.size_chars is not None:
        body["size_chars"] = loss.size_chars
    return events.carry("loss", body, ts=now, message=f"{loss.kind} {loss.path or '/'}: {loss.reason}")
