"""Finds out whether the pieces of an answer must be taken back, because its whole message differs. Pure."""

from __future__ import annotations

from typing import Final

from backplane.contract.events import AgentEvent, AssistantDelta, AssistantMessage, Carried, Warned, carry

CHARS_MAX: Final = 4 * 1024 * 1024
"""Number of characters of an answer that are compared with its message: a line of 16 MiB holds as many of four bytes.
Of a longer answer, only the length of the rest is compared."""

BROKEN: Final = "broken_stream"
OTHER: Final = "other_words"
"""Why pieces are taken back: their stream broke (`BROKEN`), or the whole message differs from them (`OTHER`)."""

_WORDS: Final = {BROKEN: "the stream broke", OTHER: "the whole message has other words than its pieces"}


class Deltas:
    """Keeps the pieces since the last message, or since pieces were taken back."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._chars = 0

    def take(self, event: AgentEvent) -> int:
        """Take the next event; return the number of characters to take back before it is shown."""
        if isinstance(event, AssistantDelta):
            if self._chars < CHARS_MAX:
                self._pieces.append(event.text)
            self._chars += len(event.text)
            return 0
        if isinstance(event, AssistantMessage):
            return 0 if self._are(event.text) else self._clear()
        if isinstance(event, Warned | Carried) and taken_back(event):
            self._clear()
        return 0

    def _are(self, text: str) -> bool:
        """Return whether the message repeats the pieces; if so, remove the pieces."""
        if self._chars and not (self._chars == len(text) and text.startswith("".join(self._pieces))):
            return False
        self._clear()
        return True

    def _clear(self) -> int:
        chars, self._pieces, self._chars = self._chars, [], 0
        return chars


def take_back(reason: str, chars: int, *, ts: str) -> AgentEvent:
    """Return the event that takes back all pieces since the last message, which have `chars` characters."""
    words = f"{_WORDS[reason]}: {chars} characters of the answer are taken back"
    return carry("retry", {"reason": reason, "taken_back": chars}, ts=ts, message=words)


def taken_back(event: AgentEvent) -> int:
    """Return how many characters an event takes back; 0 for any other event."""
    body = event.ext.get("retry") if isinstance(event.ext, dict) else None
    chars = body.get("taken_back") if isinstance(body, dict) else None
    return chars if isinstance(chars, int) and not isinstance(chars, bool) and chars > 0 else 0
