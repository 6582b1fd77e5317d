"""Reads the paths and URLs that a tool's call touches from its input, and makes paths comparable.

It only works on text and reads no file: the caller resolves links first. `rules` decides what is allowed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Final

import msgspec

from backplane.contract.canonical import Json

PATH_BYTES_MAX: Final = 4096
"""Maximum length of a path, of a file or a URL, as in Linux; a longer one is malformed, so that the call is denied."""

PLACES_MAX: Final = 4096
"""Maximum members of a tool's input, and paths and URLs in it; a call with more, such as a large patch, is denied."""

_DEPTH_MAX: Final = 16
"""Maximum nesting of a tool's input; deeper input is denied. Real inputs have paths at level two."""


class ComparablePath(msgspec.Struct, frozen=True):
    """A path in the form in which paths and globs are compared."""

    path: str
    """Path relative to the root, `.` for the root itself; a path outside the root is absolute.

    A path below a home folder, such as `~/x`, stays as it is. Without a root, a relative path stays relative.
    """
    outside: bool


def locate(path: str, root: str | None = None, cwd: str | None = None) -> ComparablePath | None:
    """Normalise a path, and find whether it is inside the root, without reading any file.

    Args:
        path: relative to `cwd`, or absolute.
        root: the absolute folder of the workspace; without it every absolute path is outside.
        cwd: the agent's working folder, absolute or relative to the root; None is the root.

    Returns:
        The path; None if it cannot name a file: it is empty, has a NUL, or is longer than `PATH_BYTES_MAX`.
    """
    if not path or "\0" in path or too_long(path):
        return None
    if path[0] == "~" and (path == "~" or "/" in path):
        # Many tools expand it to a home folder, and a folder named `~` in a workspace is rare.
        return ComparablePath(path, True)
    base = root if root is not None and root.startswith("/") else None
    full = path if path[0] == "/" else f"{cwd}/{path}" if cwd else path
    if full[0] != "/" and base is not None:
        full = f"{base}/{full}"
    if full[0] == "/":
        place = _below(fold(full, absolute=True), base)
    else:
        parts = fold(full, absolute=False)
        place = ComparablePath("/".join(parts) or ".", parts[:1] == [".."])
    return None if too_long(place.path) else place


def too_long(path: str) -> bool:
    """Return whether a path, of a file or of a URL, is over `PATH_BYTES_MAX`."""
    return len(path) * 4 > PATH_BYTES_MAX and len(path.encode("utf-8", "surrogatepass")) > PATH_BYTES_MAX


def _below(parts: list[str], base: str | None) -> ComparablePath:
    start = _parts_of_root(base) if base is not None else None
    if start is None or parts[: len(start)] != start:
        return ComparablePath("/" + "/".join(parts), True)
    return ComparablePath("/".join(parts[len(start) :]) or ".", False)


@functools.lru_cache(maxsize=64)
def _parts_of_root(root: str) -> list[str]:
    """Fold a root once for all paths below it."""
    return fold(root, absolute=True)


def fold(path: str, *, absolute: bool) -> list[str]:
    """Return a path's parts without `.` and `..`; a relative path may keep leading `..`."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part == ".." and absolute:
            continue
        elif part not in ("", "."):
            parts.append(part)
    return parts


def comparable_glob(pattern: str, root: str, *, outside: bool = True) -> str | None:
    """Convert a glob to the form of paths from `locate`, so that it can match one.

    Args:
        root: the folder of the workspace; if it is not absolute, an absolute pattern counts as outside.
        outside: True if paths outside of the root are compared, too, as absolute ones.

    Returns:
        The converted glob; the same text if it has that form already; None if it can match no path.
    """
    if pattern in (".", "**/"):
        return pattern
    if pattern.startswith(("~/", "$HOME/", "${HOME}/")):
        return None
    absolute, base = pattern.startswith("/"), fold(root, absolute=True) if root.startswith("/") else [""]
    parts = fold(pattern, absolute=absolute)
    if parts[:1] == [".."]:
        return None
    if absolute and parts[: len(base)] == base:
        absolute, parts = False, parts[len(base) :]
    return ("/" if absolute and outside else "") + "/".join(parts or ["**"])


class ToolShape(msgspec.Struct, frozen=True):
    """The use that a tool makes of the paths and URLs of its input."""

    reads: bool = False
    writes: bool = False
    connects: bool = False
    names_place: bool = False
    """True if the input must contain a path or URL; a call without one is malformed."""
    patch: bool = False
    """True if a text of the input may be a patch, which contains paths."""
    free_text: bool = False
    """True if a text of the input may contain URLs between other words."""
    members: tuple[str, ...] = ()
    """Members with paths whose names do not have one of the usual endings, such as `path`."""


TOOLS: Final[dict[str, ToolShape]] = {
    "read_file": ToolShape(reads=True, names_place=True),
    "write_file": ToolShape(writes=True, names_place=True),
    "edit_file": ToolShape(reads=True, writes=True, names_place=True),
    "multi_edit": ToolShape(reads=True, writes=True, names_place=True),
    "apply_patch": ToolShape(reads=True, writes=True, names_place=True, patch=True),
    "list_files": ToolShape(reads=True),
    "glob": ToolShape(reads=True),
    "grep": ToolShape(reads=True, members=("glob", "include")),
    "bash": ToolShape(),
    "web_fetch": ToolShape(connects=True, names_place=True, free_text=True),
    "web_search": ToolShape(connects=True),
}
"""Neutral tool name → shape. `bash` has none: the text of a command does not show which files or hosts it uses."""

CHANGE_NOTHING: Final = frozenset(
    {"read_file", "read", "grep", "glob", "list_files", "ls", "web_fetch", "web_search", "ask_user"}
)
"""Tools that change no file; every other tool may."""

SPELLINGS: Final[dict[str, str]] = {
    "Read": "read_file",
    "Write": "write_file",
    "Edit": "edit_file",
    "MultiEdit": "multi_edit",
    "LS": "list_files",
    "Glob": "glob",
    "Grep": "grep",
    "Bash": "bash",
    "WebFetch": "web_fetch",
    "WebSearch": "web_search",
}
"""Second spelling of a tool's name, as in the examples of the capability list → neutral name."""

SECOND_SPELLINGS: Final[dict[str, str]] = {neutral: spelling for spelling, neutral in SPELLINGS.items()}

SHELLS: Final = frozenset({
    *("Shell", "shell", "local_shell", "run_shell_command", "run_command", "run_terminal_cmd", "run_in_terminal"),
    *("execute_command", "exec_command", "Terminal", "terminal"),
})  # fmt: skip
"""Names that other agents have for a tool that runs a command line: rules on `bash` apply to them, too."""


class Touched(msgspec.Struct, frozen=True):
    """The paths and URLs of one tool call, unchanged."""

    paths: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    unreadable: str | None = None
    """Why the input cannot be read completely; None if it can."""


_PATH_ENDINGS: Final = ("path", "paths", "file", "files", "filename", "filenames", "dir", "directory", "folder")
_URL_ENDINGS: Final = ("url", "urls", "uri", "uris", "href", "endpoint")
_FILE_URL: Final = re.compile(r"file:(?://[^/?#]*)?([^?#]*)", re.IGNORECASE)
_URL_IN_TEXT: Final = re.compile(r"\b(?:https?|wss?|ftp|file):/{0,2}[^\s<>\"'`]+", re.IGNORECASE)
_AFTER_A_URL: Final = ".,;:!?)]}"
_PATCH_PATH: Final = re.compile(
    r"^(?:[ \t]*\*\*\* (?:(?:Add|Update|Delete) File|Move to): (?P<plain>.+?)"
    r"|(?:---|\+\+\+|(?:rename|copy) (?:from|to)) (?P<git>.+?)|diff --git (?P<twice>.+?))\s*$",
    re.MULTILINE,
)
"""The lines of a patch with a path. Programs that read the first form ignore blanks before it."""
_ESCAPE: Final = re.compile(r"\\([0-7]{3}|.)")
_ESCAPED: Final = {"a": "\a", "b": "\b", "t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r"}


def touched(shape: ToolShape, value: Json) -> Touched:
    """Return the paths and URLs of a tool's input, at any level."""
    paths: list[str] = []
    urls: list[str] = []
    for count, (name, leaf) in enumerate(_leaves(value, "", 0)):
        if count >= PLACES_MAX:
            return Touched(unreadable=f"the input has more than {PLACES_MAX} members")
        if leaf is _TOO_DEEP:
            return Touched(unreadable=f"the input nests deeper than {_DEPTH_MAX}")
        plain = name.lower().replace("_", "").replace("-", "")
        is_path = plain.endswith(_PATH_ENDINGS) or name in shape.members
        if not isinstance(leaf, str):
            if is_path and leaf is not None and not isinstance(leaf, bool) and (shape.reads or shape.writes):
                return Touched(unreadable=f"{name} is not a text")
        elif is_path:
            paths.append(leaf)
        elif plain.endswith(_URL_ENDINGS):
            urls.append(leaf)
        elif shape.patch:
            paths += patch_paths(leaf)
        elif shape.free_text:
            urls += [url.rstrip(_AFTER_A_URL) for url in _URL_IN_TEXT.findall(leaf)]
    return _sorted_out(paths, urls)


def _sorted_out(paths: list[str], urls: list[str]) -> Touched:
    files = [(url, _FILE_URL.fullmatch(url.strip())) for url in urls]
    local = [_percent_decoded(match[1]) for _, match in files if match is not None]
    remote = tuple(url for url, match in files if match is None and not url.lower().startswith("data:"))
    if len(paths) + len(urls) > PLACES_MAX:
        return Touched(unreadable=f"the call names more than {PLACES_MAX} places")
    return Touched(tuple(paths + local), remote)


_TOO_DEEP: Final = object()


def _leaves(value: Json, name: str, depth: int) -> Iterator[tuple[str, Json]]:
    if depth > _DEPTH_MAX:
        yield name, _TOO_DEEP
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, key, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item, name, depth + 1)
    else:
        yield name, value


def below(root: str, input: Json) -> Json:
    """Return a tool's input with the paths in its top members made relative to the root, if they lie below it."""
    if not isinstance(input, dict) or not root.startswith("/"):
        return input
    start = root.rstrip("/") + "/"

    def short(name: str, value: Json) -> Json:
        plain = name.lower().replace("_", "").replace("-", "")
        is_below = isinstance(value, str) and plain.endswith(_PATH_ENDINGS) and value.startswith(start)
        return value[len(start) :] if is_below else value

    return {name: short(name, value) for name, value in input.items()}


def patch_paths(text: str) -> list[str]:
    """Return the paths of a patch in git's form or the `*** Update File:` form, without `/dev/null`."""
    found: dict[str, None] = {}
    for line in _PATCH_PATH.finditer(text):
        if line["plain"]:
            found[line["plain"]] = None
        else:
            found.update(dict.fromkeys(_git_names(line["git"] or _one_of_two(line["twice"]))))
    found.pop("/dev/null", None)
    return list(found)


def _one_of_two(names: str) -> str:
    """Return the name of a `diff --git` line with two equal names, an empty file's only mention; else an empty text."""
    old, new = names[: len(names) // 2], names[len(names) // 2 + 1 :]
    return new if old == new or old.lstrip('"')[1:] == new.lstrip('"')[1:] else ""


def _git_names(path: str) -> Iterator[str]:
    """Yield every path that a name in git's form may mean, with and without a prefix such as `a/`."""
    quoted = path.split("\t")[0]
    name = quoted.strip('"')
    for spelled in (name, unescaped(name)) if quoted.startswith('"') else (name,):
        first, _, rest = spelled.partition("/")
        if first and rest:
            yield rest  # Without its prefix, which can be any name.
        if spelled and not (rest and first in ("a", "b")):
            yield spelled


def unescaped(name: str) -> str:
    """Return a name without git's escapes: bytes in octal, and those of C."""

    def plain(escape: re.Match[str]) -> str:
        code = escape[1]
        return chr(int(code, 8) & 0xFF) if len(code) == 3 else _ESCAPED.get(code, code)

    spelled = _ESCAPE.sub(plain, name)
    try:
        return spelled.encode("latin-1").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # The name has letters beyond Latin-1, so it has no octal bytes.
        return spelled


def _percent_decoded(text: str) -> str:
    raw = re.sub(rb"%([0-9A-Fa-f]{2})", lambda found: bytes([int(found[1], 16)]), text.encode())
    return raw.decode("utf-8", "surrogateescape")
