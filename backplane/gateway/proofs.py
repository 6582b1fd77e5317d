"""Keeps proofs: signed or encrypted thinking of a service, for clients whose interface has no place for it.

Such a service expects the thinking back, unchanged, beside the tool call that followed it. It is kept in memory under
that call's id, and put into the client's next request to the same service.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backplane.dialects.common import kind_of
from backplane.gateway.frames import encode
from backplane.gateway.kept import KeptStore


class Proofs:
    """A bounded store: account (see `Exchange`) and call id → the call's proof as JSON."""

    def __init__(self) -> None:
        self.rows: KeptStore[tuple[str, str], bytes] = KeptStore()

    def keep(self, account: str, dialect: str, answer: Any) -> None:
        """Keep the proofs in an answer.

        Args:
            answer: a whole answer in the JSON of `dialect`.
        """
        found = _READERS[dialect](answer) if dialect in _READERS else {}
        for call_id, proof in found.items():
            data = encode(proof)
            self.rows.keep((account, call_id), data, len(data))

    def restore(self, account: str, dialect: str, request: dict[str, Any]) -> dict[str, Any]:
        """Return a request with the proofs of its calls put back; another account's proofs are not used."""
        if not self.rows or dialect not in _WRITERS:
            return request
        return _WRITERS[dialect](request, lambda call_id: self._find(account, call_id))

    def _find(self, account: str, call_id: Any) -> Any:
        data = self.rows.find((account, str(call_id)))
        return None if data is None else msgspec.json.decode(data)


# The place of proofs in each dialect ----------------------------------------------------------------------------------


def _read_claude(answer: Any) -> dict[str, Any]:
    blocks = [block for block in _items(answer, "content") if block.get("type") in ("thinking", "redacted_thinking")]
    first = next((block for block in _items(answer, "content") if block.get("type") == "tool_use"), None)
    return {} if first is None or not blocks else {str(first.get("id")): blocks}


def _write_claude(request: dict[str, Any], find: Any) -> dict[str, Any]:
    messages = []
    for message in _items(request, "messages"):
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, list):
            calls = (block.get("id") for block in content if kind_of(block) == "tool_use")
            proof = next(filter(None, map(find, calls)), None)
            if proof is not None:
                rest = [block for block in content if kind_of(block) not in ("thinking", "redacted_thinking")]
                message = {**message, "content": [*proof, *rest]}
        messages.append(message)
    return {**request, "messages": messages}


def _read_gemini(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for candidate in _items(answer, "candidates"):
        for part in _items(candidate.get("content"), "parts"):
            call = part.get("functionCall")
            if isinstance(call, dict) and call.get("id") and part.get("thoughtSignature"):
                found[str(call["id"])] = part["thoughtSignature"]
    return found


def _write_gemini(request: dict[str, Any], find: Any) -> dict[str, Any]:
    def part_of(part: dict[str, Any]) -> dict[str, Any]:
        call = part.get("functionCall")
        proof = find(call.get("id")) if isinstance(call, dict) else None
        return part if proof is None else {**part, "thoughtSignature": proof}

    contents = [
        {**content, "parts": [part_of(part) for part in _items(content, "parts")]}
        for content in _items(request, "contents")
    ]
    return {**request, "contents": contents}


def _read_codex(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    waiting: list[Any] = []
    for item in _items(answer, "output"):
        if item.get("type") == "reasoning":
            if item.get("encrypted_content"):
                waiting.append(item)
        elif item.get("call_id") and waiting:
            found[str(item["call_id"])], waiting = waiting, []
    return found


def _write_codex(request: dict[str, Any], find: Any) -> dict[str, Any]:
    items: list[Any] = []
    given = request.get("input")
    for item in given if isinstance(given, list) else ():
        is_call = kind_of(item) in ("function_call", "custom_tool_call")
        proof = find(item.get("call_id")) if is_call else None
        items += [*(proof or ()), item]
    return {**request, "input": items} if items else request


def _read_chat(answer: Any) -> dict[str, Any]:
    for choice in _items(answer, "choices"):
        message = choice.get("message") or {}
        calls = _items(message, "tool_calls")
        thinking = {name: message[name] for name in ("reasoning_content", "reasoning_details") if message.get(name)}
        if calls and thinking:
            return {str(calls[0].get("id")): thinking}
    return {}


def _write_chat(request: dict[str, Any], find: Any) -> dict[str, Any]:
    messages = []
    for message in _items(request, "messages"):
        calls = (call.get("id") for call in _items(message, "tool_calls"))
        proof = next(filter(None, map(find, calls)), None)
        messages.append(message if proof is None else {**message, **proof})
    return {**request, "messages": messages}


_READERS: Final = {
    "claude": _read_claude, "gemini": _read_gemini, "codex": _read_codex,
    "openai": _read_chat, "kimi": _read_chat, "copilot": _read_chat,
}  # fmt: skip
_WRITERS: Final = {
    "claude": _write_claude, "gemini": _write_gemini, "codex": _write_codex,
    "openai": _write_chat, "kimi": _write_chat, "copilot": _write_chat,
}  # fmt: skip


def _items(value: Any, name: str) -> list[dict[str, Any]]:
    found = value.get(name) if isinstance(value, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
