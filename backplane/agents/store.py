"""Conversations that vendors' own programs keep on this machine, read as data.

A store is only read, within bounds, and links in it are not followed; nothing in it is run. A record of a kind that a
reader has no word for is counted and listed. Each vendor's form is known to `VENDOR/store.py` alone.
"""

from __future__ import annotations

import fnmatch
import importlib
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from backplane.agents.events import mapping
from backplane.contract.canonical import Json
from backplane.contract.conversation import (
    AgentMessage,
    Image,
    Message,
    MessageToolCall,
    ThinkingBlock,
    ToolResultMessage,
    UserMessage,
)
from backplane.dialects import dialect, ir
from backplane.errors import ConfigError, TranslationError

STORES: Final[dict[str, str]] = {name: f"backplane.agents.{name}.store" for name in ("claude", "codex")}
"""Vendor → its module. A third is one more name and one more file."""

FILE_BYTES_MAX: Final = 512 * 1024 * 1024
"""Of one conversation's file or database: Claude Code keeps each request beside what was said, some 150 KB a turn."""

ENTRIES_MAX: Final = 100_000
"""Names of a store that are looked at for the newest conversation: years of work have some thousands."""

LAST: Final = "last"


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as its vendor's program kept it."""

    vendor: str
    id: str
    """The vendor's own."""
    root: str | None = None
    """Folder that it worked on."""
    model: str | None = None
    messages: tuple[Message, ...] = ()
    losses: tuple[str, ...] = ()
    """What was there and is not among the messages, told once each."""


class StoredHead(msgspec.Struct, frozen=True):
    """What a conversation says of itself."""

    id: str
    root: str | None
    model: str | None


class VendorStore(msgspec.Struct, frozen=True, kw_only=True):
    """The form in which one vendor's program stores conversations."""

    home: tuple[str, ...]
    """The variable that names its folder, the folder below the user's home without that, and what is below either."""
    files: tuple[str, ...]
    """Patterns of a conversation's path below its folder."""
    id_of: Callable[[Path], str]
    """The id that a conversation's path names."""
    read: Callable[[Path, Talk], StoredHead]
    """Reads one into a talk. Raises ConfigError: `config_invalid`."""

    def folder(self, environ: Mapping[str, str]) -> Path:
        """Return the folder of the store."""
        variable, default, *below = self.home
        named = environ.get(variable)
        return Path(named or Path(environ.get("HOME") or os.path.expanduser("~"), default), *below)

    def find(self, home: Path, id: str) -> Path | None:
        """Return the newest conversation whose id begins so."""
        # What is named may be the folder around the store.
        found = files(home, *self.files) or files(home, *self.home[2:], *self.files)
        return next((path for path in found if self.id_of(path).startswith(id)), None)


def store_of(vendor: str, fact: str) -> VendorStore:
    """Load what is known of a vendor's store.

    Args:
        fact: told of a vendor that is not known, with `{}` for its name.

    Raises:
        ConfigError: `config_invalid`, it is not known.
    """
    if vendor not in STORES:
        raise ConfigError("config_invalid", fact.format(repr(vendor[:40])), hint=f"one of: {', '.join(STORES)}")
    store: VendorStore = importlib.import_module(STORES[vendor]).STORE
    return store


def read_stored(vendor: str, name: str, environ: Mapping[str, str]) -> Stored:
    """Read a conversation from a vendor's store.

    Args:
        vendor: of `STORES`.
        name: `last`, the beginning of an id, or the path of a file, of a store, or of a folder in it.

    Raises:
        ConfigError: `config_invalid`, there is none, it is too long, or a version wrote it that is not known.
    """
    store, talk = store_of(vendor, "no store of {} can be read"), Talk()
    place = _place(vendor, store, name, environ)
    head, messages = store.read(place, talk), talk.messages
    if not messages:
        raise ConfigError("config_invalid", f"{place}: nothing was said in it", hint="name another conversation")
    return Stored(vendor=vendor, id=head.id, root=head.root, model=head.model, messages=messages, losses=talk.losses)


def _place(vendor: str, store: VendorStore, name: str, environ: Mapping[str, str]) -> Path:
    path = Path(name)
    if name != LAST and not path.is_dir() and (os.sep in name or path.is_file()):
        return path
    home = path if name != LAST and path.is_dir() else store.folder(environ)
    wanted = "" if name == LAST or home == path else name
    found = store.find(home, wanted)
    if found is None:
        fact = f"{home} has no conversation" + (f" that begins with {wanted[:80]!r}" if wanted else "")
        hint = f"give the path of a conversation's file; {vendor} keeps them in {store.folder(environ)} here"
        raise ConfigError("config_invalid", fact, hint=hint)
    return found


def files(folder: Path, *parts: str) -> list[Path]:
    """Return the files at a path of patterns below a folder, the last written first; links are left out.

    Raises:
        ConfigError: `config_invalid`, there are over `ENTRIES_MAX` names to look at.
    """
    found = [(path.stat().st_mtime_ns, path) for path in _matching(folder, parts, [ENTRIES_MAX])]
    return [path for _, path in sorted(found, reverse=True)]


def _matching(folder: Path, parts: Sequence[str], left: list[int]) -> Iterator[Path]:
    pattern, *rest = parts
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        left[0] -= 1
        if left[0] < 0:
            fact = f"{folder} and its neighbours have over {ENTRIES_MAX} entries"
            raise ConfigError("config_invalid", fact, hint="give the path of the conversation's file")
        if not fnmatch.fnmatchcase(entry.name, pattern):
            continue
        if rest and entry.is_dir(follow_symlinks=False):
            yield from _matching(Path(entry.path), rest, left)
        elif not rest and entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def open_file(path: Path) -> int:
    """Open a regular file for reading; blocking. Raises ConfigError: `config_invalid`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        words = "it is a link" if path.is_symlink() else error.strerror
        raise ConfigError("config_invalid", f"{path}: {words}", hint="name the file itself") from error
    seen = os.fstat(fd)
    if not stat.S_ISREG(seen.st_mode) or seen.st_size > FILE_BYTES_MAX:
        os.close(fd)
        fact = f"{path} is over {FILE_BYTES_MAX} bytes" if stat.S_ISREG(seen.st_mode) else f"{path} is no file"
        raise ConfigError("config_invalid", fact, hint="name a conversation's file")
    return fd


def rows(path: Path, talk: Talk) -> Iterator[dict[str, Any]]:
    """Yield a file's JSON objects, a line each; what is none is listed.

    Raises:
        ConfigError: `config_invalid`, it cannot be read or is too long.
    """
    left = FILE_BYTES_MAX
    with open(open_file(path), "rb") as file:
        # By its bound and not to its end: its program may write on meanwhile.
        while left > 0 and (line := file.readline(left)):
            left -= len(line)
            try:
                row = msgspec.json.decode(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield row
            elif line.strip():
                talk.drop("lines that are no JSON object")


def require_known(path: Path, what: str, version: object, known: str) -> None:
    """Refuse a conversation of a version that the reader was not tried with.

    Args:
        known: how a known one begins.

    Raises:
        ConfigError: `config_invalid`, with the version's name.
    """
    if not isinstance(version, str | int) or not f"{version}.".startswith(known):
        fact = f"{path} was written by {what} {str(version)[:40]}, and {known}x is what is known here"
        raise ConfigError("config_invalid", fact, hint="use a backplane that knows it")


class Talk:
    """What was said, while it is read: blocks of the agent's become one message up to a result or the user's words."""

    def __init__(self) -> None:
        self._made: list[Message] = []
        self._text: list[str] = []
        self._thinking: list[ThinkingBlock] = []
        self._calls: list[MessageToolCall] = []
        self._proof: str | None = None
        self._known: dict[str, str | None] = {}
        """Calls, with their result once it is there."""
        self._dropped: Counter[str] = Counter()

    def user(self, text: str, images: Sequence[Image] = ()) -> None:
        """The user said something."""
        self._flush()
        self._made.append(UserMessage(content=text, images=tuple(images)))

    def think(self, text: str, signature: str | None = None, redacted: str | None = None) -> None:
        """The model thought."""
        if text or signature or redacted:
            self._thinking.append(ThinkingBlock(text=text, signature=signature, redacted=redacted))

    def say(self, text: str, proof: str | None = None) -> None:
        """The agent said something, perhaps with a signature for it."""
        self._text += [text] if text else []
        self._proof = proof or self._proof

    def call(self, id: str, name: str, arguments: Json, signature: str | None = None) -> None:
        """The agent called a tool; a call that stands there twice is one."""
        if id not in self._known:
            self._calls.append(MessageToolCall(id=id, name=name, arguments=arguments, signature=signature))
            self._known[id] = None

    def result(self, id: str, text: str, *, is_error: bool = False) -> None:
        """A tool gave something back; what stands there twice is said once."""
        if id not in self._known or self._known[id] is not None:
            if self._known.get(id) != text:
                self.drop("results without their call" if id not in self._known else "further results of a call")
            return
        self._known[id] = text
        self._flush()
        self._made.append(ToolResultMessage(tool_call_id=id, content=text, is_error=is_error))

    def take(self, name: str, member: str, message: Mapping[str, Any]) -> None:
        """Take a message, or an item, as a request in a dialect has it.

        Args:
            name: of the dialect.
            member: of a request, in which such messages stand.
        """
        try:
            read = dialect(name).to_ir({member: [message]}).value.messages
        except TranslationError:
            self.drop(unknown(message.get("type", message.get("role"))))
            return
        for one in read:
            words, images = [], []
            for part in one.parts:
                if isinstance(part, ir.Text) and one.role == "assistant":
                    self.say(part.text)
                elif isinstance(part, ir.Text):
                    words.append(part.text)
                elif isinstance(part, ir.Thinking):
                    self.think(part.text, part.signature, part.redacted)
                elif isinstance(part, ir.ToolUse):
                    self.call(part.id, part.name, part.input, part.signature)
                elif isinstance(part, ir.ToolOutput):
                    texts = [inner.text for inner in part.content if isinstance(inner, ir.Text)]
                    self.drop("pictures in what tools gave", len(part.content) - len(texts))
                    self.result(part.id, "\n".join(texts), is_error=part.is_error is True)
                elif isinstance(part, ir.Media) and part.kind == "image" and (part.data or part.url):
                    images.append(Image(media_type=part.media_type, data=part.data, url=part.url))
                else:
                    self.drop(unknown(getattr(part, "label", getattr(part, "kind", type(part).__name__))))
            if words or images:
                self.user("\n\n".join(words), images)

    def drop(self, what: str, count: int = 1) -> None:
        """Something is not carried."""
        if count:
            self._dropped[what] += count

    def mark(self) -> int:
        """Return how many messages there are by now."""
        self._flush()
        return len(self._made)

    def cut(self, mark: int, what: str) -> None:
        """Take away what came after a mark."""
        self._flush()
        if len(self._made) > mark:
            self.drop(what, len(self._made) - mark)
        del self._made[mark:]

    def undo(self, prompts: int) -> None:
        """Take back so many words of the user's, and what followed them."""
        self._flush()
        users = [place for place, message in enumerate(self._made) if isinstance(message, UserMessage)]
        if prompts > 0 and users:
            self.cut(users[-min(prompts, len(users))], UNDONE)

    def _flush(self) -> None:
        if self._has_said:
            self._made.append(self._last())
        self._text, self._thinking, self._calls, self._proof = [], [], [], None

    @property
    def _has_said(self) -> bool:
        return bool(self._text or self._thinking or self._calls or self._proof)

    def _last(self) -> AgentMessage:
        text, thinking, calls = "\n\n".join(self._text), tuple(self._thinking), tuple(self._calls)
        return AgentMessage(content=text, thinking=thinking, tool_calls=calls, signature=self._proof)

    def last(self) -> AgentMessage:
        """Return the newest message of the agent; more may still become part of it."""
        if self._has_said:
            return self._last()
        return next((one for one in reversed(self._made) if isinstance(one, AgentMessage)), AgentMessage())

    @property
    def messages(self) -> tuple[Message, ...]:
        self._flush()
        return tuple(self._made)

    @property
    def losses(self) -> tuple[str, ...]:
        return tuple(f"dropped: {count} {what}" for what, count in sorted(self._dropped.items()))


UNDONE: Final = "messages that were taken back in the program itself"
NOTES: Final = "notes of the program to its model"
BELOW: Final = "messages of agents below this one"
SUMMED: Final = "messages before the program's own summary of them"


def unknown(kind: object) -> str:
    """Say what is dropped of a kind that has no reader."""
    return f"records of the kind {str(kind)[:60]!r}"


def text_of(value: Json) -> str:
    """Return a value as text."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def said_of(value: object) -> str | None:
    """Return a text member; None where it is none."""
    return value if isinstance(value, str) else None


def inner(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the object at a path of names; empty where there is none."""
    found: Any = row
    for name in names:
        found = mapping(mapping(found).get(name))
    return mapping(found)
