"""Reads tokens and outputs of tools from Gemini CLI's own file of a conversation, and moves the file to resume it.

The protocol has no output or exit code of a command, and only one sum of tokens for a turn. The agent writes both to a
JSON Lines file before its next model request. It resumes a conversation only in the folder where it began, and not
within the same minute. It reads folder and time from the file's path and name, so `claim` moves and renames the file.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from pathlib import Path
from typing import Any, Final

import msgspec

from backplane.agents.events import is_count, mapping, mappings
from backplane.agents.reader import counts_of
from backplane.dialects.ir import TokenCounts

READ_BYTES_MAX: Final = 8 * 1024 * 1024
"""Maximum bytes per read of the file, the rest follows at the next read; a longer line is not reported."""
_ID_CHARS: Final = 8
"""Characters of a conversation's id in its file's name."""
_DAY_S: Final = 86_400
_TRAILER: Final = re.compile(r"\n(Exit Code|Signal|Error|Background PIDs|Process Group PGID): ([^\n]*)\Z")
_WRAPPED: Final = re.compile(r"\A<untrusted_context>\n(.*)\n</untrusted_context>\Z", re.DOTALL)


class Output(msgspec.Struct, frozen=True):
    """Output of a tool, as the model got it."""

    text: str
    exit_code: int | None = None
    """Exit code of a command; None if it is unknown."""


class Record:
    """The record of one conversation.

    Args:
        home: the agent's folder, `.gemini`.
    """

    def __init__(self, home: Path) -> None:
        self.home, self.id = home, ""
        self._path: Path | None = None
        self._place = 0
        self._counted: set[str] = set()
        self._has_tokens = False
        self.requests: list[TokenCounts] = []
        """Tokens of requests that are not reported yet."""
        self._words: list[str] = []
        self.is_unended = False
        """True if the last answer has text but no tokens, and an earlier one had tokens: its stream broke."""
        self.outputs: dict[str, Output] = {}
        """Call's id → output of a tool that is not reported yet."""

    # Reading ----------------------------------------------------------------------------------------------------------

    def skip(self) -> None:
        """Skip the present content of the file, which belongs to an earlier run."""
        self._path = self._find()
        self._place = self._path.stat().st_size if self._path is not None else 0

    def read(self) -> None:
        """Read the lines added since the last call."""
        self._path = self._path or self._find()
        if self._path is None:
            return
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                data = file.read(READ_BYTES_MAX)
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == READ_BYTES_MAX else b"")
        self._place += len(whole)
        for line in whole.splitlines():
            # The agent writes all calls again with each further call; results are in lines of their own.
            if b'"toolCalls":' not in line:
                self._take(line)

    @property
    def is_broken(self) -> bool:
        """True if it has no text of an answer since the last call of `words`, or its last answer is unfinished."""
        return self._path is not None and (self.is_unended or not any(self._words))

    def words(self) -> str:
        """Return the recorded text of the model since the last call."""
        words, self._words = "".join(self._words), []
        return words

    def _find(self) -> Path | None:
        found = self._files(self.id)
        return found[-1] if found else None

    def _files(self, id: str) -> list[Path]:
        """Return the conversation's files, largest last; the agent may leave empty files beside the complete one."""
        found = self.home.glob(f"tmp/*/chats/session-*-{id[:_ID_CHARS]}.jsonl")
        return sorted(found, key=lambda path: path.stat().st_size)

    def _take(self, line: bytes) -> None:
        try:
            said = mapping(msgspec.json.decode(line))
        except (ValueError, RecursionError):
            return
        if said.get("type") == "gemini" and str(said.get("id")) not in self._counted:
            self._counted.add(str(said.get("id")))
            self._count(mapping(said.get("tokens")), has_words=bool(said.get("content")))
            self._words += [said["content"]] if isinstance(said.get("content"), str) else []
        for part in mappings(said.get("content")) if said.get("type") == "user" else ():
            answer = mapping(part.get("functionResponse"))
            self.outputs[str(answer.get("id"))] = read_output(str(answer.get("name")), mapping(answer.get("response")))

    def _count(self, tokens: dict[str, Any], *, has_words: bool) -> None:
        usage = counts_of([tokens], _COUNTERS) if is_count(tokens.get("input")) else TokenCounts()
        self.is_unended = has_words and not usage.output and self._has_tokens
        self._has_tokens = self._has_tokens or bool(usage.output)
        self.requests.append(usage)

    # Resuming ---------------------------------------------------------------------------------------------------------

    def claim(self, id: str, root: str) -> None:
        """Move a conversation's file to where the agent looks for it when it works in the folder `root`."""
        *empty, path = self._files(id)
        for one in empty:
            one.unlink()
        place = f"c-{id[:_ID_CHARS]}"
        for folder in ("tmp", "history"):
            (self.home / folder / place / "chats").mkdir(parents=True, exist_ok=True)
            (self.home / folder / place / ".project_root").write_text(root, encoding="utf-8")
        listed = self.home / "projects.json"
        known = mapping(msgspec.json.decode(listed.read_bytes()) if listed.exists() else {})
        listed.write_bytes(msgspec.json.encode({**known, "projects": {**mapping(known.get("projects")), root: place}}))
        # Name it a day earlier: within the minute in its name, the agent takes it for a new conversation.
        then = time.strftime("%Y-%m-%dT%H-%M", time.gmtime(time.time() - _DAY_S))
        path.rename(self.home / "tmp" / place / "chats" / f"session-{then}-{id[:_ID_CHARS]}.jsonl")

    def copy(self, id: str) -> str:
        """Copy a conversation; return the copy's id."""
        made, path = str(uuid.uuid4()), self._files(id)[-1]
        name = path.name.replace(id[:_ID_CHARS], made[:_ID_CHARS])
        path.with_name(name).write_bytes(path.read_bytes().replace(id.encode(), made.encode()))
        return made


def home_of(config: str | None) -> Path:
    """Return the agent's folder: below our configuration folder, or the user's own if `config` is None."""
    base = os.environ.get("GEMINI_CLI_HOME") or os.path.expanduser("~") if config is None else f"{config}/home"
    return Path(base, ".gemini")


def read_output(tool: str, response: dict[str, Any]) -> Output:
    """Read a tool's result: its text, and the exit code if the tool is a command."""
    text = response.get("error", response.get("output"))
    words = text if isinstance(text, str) else msgspec.json.encode(text).decode()
    if tool != "run_shell_command" or "error" in response:
        return Output(words)
    inner = _WRAPPED.match(words)
    words = inner[1] if inner is not None else words
    told: dict[str, str] = {}
    while (line := _TRAILER.search(words)) is not None:
        told[line[1]], words = line[2], words[: line.start()]
    code = told.get("Exit Code", "" if "Signal" in told else "0")
    words = words.removeprefix("Output: ")
    return Output("" if words == "(empty)" else words, int(code) if code.lstrip("-").isdigit() else None)


_COUNTERS: Final = {
    "input": ("input",), "output": ("output", "thoughts"), "cache_read": ("cached",), "reasoning": ("thoughts",),
}  # fmt: skip
