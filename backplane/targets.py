"""What an action touches: paths and network targets, read from a tool's input and made comparable.

Text goes in, normalised places come out; whether they are allowed is `policy`'s affair. All
of it is lexical: links are followed by whoever has the file system, before asking.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from backplane.contract.canonical import Json
from backplane.errors import PolicyError
from backplane.globs import Globs, compile_globs

PATH_BYTES_MAX: Final = 4096
"""Longest path that is decided, of files and of URLs; Linux takes no longer one."""

URL_CHARS_MAX: Final = 8192
"""Longest target looked at, query included; the usual limit of servers."""

PLACES_MAX: Final = 4096
"""Most paths or targets of one tool call; a patch over more files is not decided but denied."""

_DEPTH_MAX: Final = 16
"""How deep a tool's input is searched. Real inputs nest paths two deep."""

_HOST_CHARS_MAX: Final = 253
"""Longest name in the domain system (RFC 1035)."""


class Place(msgspec.Struct, frozen=True):
    """A path made comparable."""

    path: str
    """Relative to the root, `.` for the root itself; outside of it absolute where that can be known."""
    outside: bool


def locate(path: str, root: str | None = None, cwd: str | None = None) -> Place | None:
    """Fold a path to its shortest form and place it in or outside the root, without looking at any file.

    Args:
        path: relative to `cwd`, or absolute.
        root: the absolute folder of the workspace; without it every absolute path is outside.
        cwd: where the agent stands, absolute or relative to the root; None is the root.

    Returns:
        None for what names no file: empty, with a NUL, or longer than `PATH_BYTES_MAX`.
    """
    if not path or "\0" in path or _too_long(path):
        return None
    if path[0] == "~" and (path == "~" or "/" in path):
        # Many tools expand it to a home folder; a workspace folder of that name is rarer than that.
        return Place(path, True)
    base = root if root is not None and root.startswith("/") else None
    full = path if path[0] == "/" else f"{cwd}/{path}" if cwd else path
    if full[0] != "/" and base is not None:
        full = f"{base}/{full}"
    if full[0] == "/":
        place = _below(_fold(full, absolute=True), base)
    else:
        parts = _fold(full, absolute=False)
        place = Place("/".join(parts) or ".", parts[:1] == [".."])
    return None if _too_long(place.path) else place


def _too_long(path: str) -> bool:
    return len(path) * 4 > PATH_BYTES_MAX and len(path.encode("utf-8", "surrogatepass")) > PATH_BYTES_MAX


def _below(parts: list[str], base: str | None) -> Place:
    base_parts = _fold(base, absolute=True) if base is not None else None
    if base_parts is None or parts[: len(base_parts)] != base_parts:
        return Place("/" + "/".join(parts), True)
    return Place("/".join(parts[len(base_parts) :]) or ".", False)


def _fold(path: str, *, absolute: bool) -> list[str]:
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part == ".." and absolute:
            continue
        elif part not in ("", "."):
            parts.append(part)
    return parts


class Target(msgspec.Struct, frozen=True):
    """The far end of a connection, made comparable. None is not said."""

    host: str
    """Lower case, no trailing dot; IPv4 in four decimal parts, IPv6 in brackets, this machine's own where none is."""
    scheme: str | None = None
    port: int | None = None
    """The scheme's own port where none was written."""
    path: str | None = None
    """Dot segments folded; query and fragment left out."""


_TARGET: Final = re.compile(r"(?:([A-Za-z][A-Za-z0-9+.-]*)://)?([^/?#]*)([^?#]*)")
_AUTHORITY: Final = re.compile(r"(\[[^\]]*\]|[^:\[\]]+)(?::([0-9]*))?")
_UNSAFE: Final = re.compile(r"[\x00-\x20\x7f\\]")
_HOST: Final = re.compile(r"(?!\.)(?:(?!\.\.)[a-z0-9._-]|[^\x00-\x7f])+")
_LEADS_TO: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""The address of no machine → where a connection to it ends."""
_ALSO_WRITTEN: Final = {leads_to: address for address, leads_to in _LEADS_TO.items()}
_PORTS: Final = {"http": 80, "https": 443, "ws": 80, "wss": 443, "ftp": 21, "ssh": 22}


def read_target(text: str) -> Target | None:
    """Read a URL or `host[:port]`; None when two clients could disagree about where it leads.

    Refused for that: percent signs in the host, more than one `@`, backslashes, blanks, control
    characters, a scheme without `//`, a host that another Unicode form would change.
    """
    text = text.strip(" \t\r\n")
    match = _TARGET.match(text)
    if match is None or len(text) > URL_CHARS_MAX or _UNSAFE.search(text):
        return None
    scheme = match[1].lower() if match[1] else None
    authority = match[2]
    if scheme is None and (literal := _ipv6(authority)) is not None:
        return Target(literal)
    if authority.count("@") > 1:
        return None
    parts = _AUTHORITY.fullmatch(authority.rpartition("@")[2])
    if parts is None or (scheme is None and (parts[2] == "" or parts[1].lower() in _PORTS)):
        return None
    host, port = _host(parts[1]), int(parts[2]) if parts[2] else _PORTS.get(scheme or "")
    path = _url_path(match[3]) if scheme is not None or match[3] else None
    if host is None or path == "" or (port is not None and port > 65535) or _too_long(path or ""):
        return None
    return Target(host, scheme, port, path)


def _host(text: str) -> str | None:
    if text.startswith("["):
        return _ipv6(text[1:-1])
    host = text.lower().removesuffix(".")
    if len(host) > _HOST_CHARS_MAX or _HOST.fullmatch(host) is None:
        return None
    if not host.isascii() and not _stable(host):
        return None
    return _ipv4(host) if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", host.rpartition(".")[2]) else host


def _stable(host: str) -> bool:
    # Full-width letters, soft hyphens and ideographic dots become another host on the way to the resolver.
    letters = all(character.isascii() or unicodedata.category(character)[0] in "LMN" for character in host)
    return letters and unicodedata.normalize("NFKC", host) == host


def _ipv6(text: str) -> str | None:
    from ipaddress import AddressValueError, IPv6Address

    try:
        address = IPv6Address(text)
    except AddressValueError:
        return None
    if address.scope_id is not None:
        return None
    host = str(address.ipv4_mapped) if address.ipv4_mapped else f"[{address.compressed}]"
    return _LEADS_TO.get(host, host)


def _ipv4(host: str) -> str | None:
    """Octal, hexadecimal and short forms of an address, as the resolvers read them, in the usual form."""
    values: list[int] = []
    for part in host.split("."):
        if not re.fullmatch(r"0x[0-9a-f]{0,16}|0[0-7]{0,16}|[1-9][0-9]{0,16}", part):
            return None
        base = 16 if part.startswith("0x") else 8 if part.startswith("0") else 10
        values.append(int(part.removeprefix("0x") or "0", base))
    *leading, last = values
    if len(values) > 4 or any(value > 255 for value in leading) or last >= 256 ** (5 - len(values)):
        return None
    number = sum(value << (24 - 8 * place) for place, value in enumerate(leading)) + last
    address = ".".join(str(number >> shift & 255) for shift in (24, 16, 8, 0))
    return _LEADS_TO.get(address, address)


_UNRESERVED_ESCAPE: Final = re.compile(r"%(2[DdEe]|3[0-9]|[46][1-9A-Fa-f]|[57][0-9Aa]|5[Ff]|7[Ee])")
_HIDDEN_DOTS: Final = re.compile(r"(?:^|/|%2f|%5c)\.\.(?:$|/|%2f|%5c)", re.IGNORECASE)


def _url_path(path: str) -> str:
    """Fold a URL's path; the empty string when dots hide behind encoded slashes."""
    plain = _UNRESERVED_ESCAPE.sub(lambda found: chr(int(found[1], 16)), path)
    folded = "/" + "/".join(_fold(plain, absolute=True))
    if _HIDDEN_DOTS.search(folded):
        return ""
    return folded + "/" if plain.endswith("/") and folded != "/" else folded


class NetworkRule(msgspec.Struct, frozen=True):
    """One pattern of a network list; None means any."""

    pattern: str
    hosts: Globs | str
    """A host as a target has it, or a glob whose `*` crosses dots."""
    schemes: Globs | None = None
    port: int | None = None
    paths: Globs | None = None

    @property
    def everything(self) -> bool:
        return self.pattern in ("*", "**")

    def matches(self, target: Target, *, unsaid: bool) -> bool:
        """Whether the target falls under the rule; `unsaid` decides where the target leaves a part open."""
        if isinstance(self.hosts, str):
            here = target.host == self.hosts
        else:
            here = any(_matches(self.hosts, host) for host in _spellings(target.host))
        return (
            here
            and (self.port is None or (unsaid if target.port is None else target.port == self.port))
            and (self.schemes is None or (unsaid if target.scheme is None else _matches(self.schemes, target.scheme)))
            and (self.paths is None or (unsaid if target.path is None else _matches(self.paths, target.path)))
        )


def network_rules(patterns: Sequence[str]) -> tuple[NetworkRule, ...]:
    """Read a whole list, and bound what one look through all of it can cost.

    Raises:
        PolicyError: `policy_invalid`.
    """
    rules = tuple(network_rule(pattern) for pattern in patterns)
    compile_globs([pattern for rule in rules if isinstance(rule.hosts, Globs) for pattern in rule.hosts.patterns])
    compile_globs([pattern for rule in rules if rule.paths is not None for pattern in rule.paths.patterns])
    return rules


def _spellings(host: str) -> tuple[str, ...]:
    return (host, _ALSO_WRITTEN[host]) if host in _ALSO_WRITTEN else (host,)


def _matches(globs: Globs, text: str) -> bool:
    return globs.matches(text) is not None


_RULE: Final = re.compile(r"(?:([A-Za-z*][A-Za-z0-9+.*-]*)://)?(\[[0-9A-Fa-f:.]+\]|[^/:@]+)(?::([0-9]{1,5}|\*))?(/.*)?")


def network_rule(pattern: str) -> NetworkRule:
    """Read a host glob, `host:port`, `[::1]:port` or URL pattern; a URL without a path means the whole host.

    Raises:
        PolicyError: `policy_invalid`.
    """
    literal = _ipv6(pattern)
    if literal is not None:
        return NetworkRule(pattern, literal)
    match = _RULE.fullmatch(pattern)
    if match is None or _UNSAFE.search(pattern) or "%" in (match[2] or ""):
        raise PolicyError(
            "policy_invalid",
            f"not a network pattern: {pattern[:200]!r}",
            hint="write a host glob such as *.example.com, host:port, [::1]:port, or scheme://host/path",
        )
    scheme, host, port, path = match.groups()
    return NetworkRule(
        pattern,
        _host(host) or compile_globs([host.lower().removesuffix(".")]),
        compile_globs([scheme.lower()]) if scheme and scheme != "*" else None,
        int(port) if port and port != "*" else None,
        compile_globs([path]) if path and path not in ("/", "/*", "/**") else None,
    )


class Shape(msgspec.Struct, frozen=True):
    """What a tool does with the paths and URLs of its input."""

    reads: bool = False
    writes: bool = False
    connects: bool = False
    names_place: bool = False
    """A call that names none is not one that can be checked."""
    patch: bool = False
    """Paths also stand in the text of a patch."""
    free_text: bool = False
    """URLs also stand in running text."""
    members: tuple[str, ...] = ()
    """Members that hold paths though their names do not end like one."""


TOOLS: Final[dict[str, Shape]] = {
    "read_file": Shape(reads=True, names_place=True),
    "write_file": Shape(writes=True, names_place=True),
    "edit_file": Shape(reads=True, writes=True, names_place=True),
    "multi_edit": Shape(reads=True, writes=True, names_place=True),
    "apply_patch": Shape(reads=True, writes=True, names_place=True, patch=True),
    "list_files": Shape(reads=True),
    "glob": Shape(reads=True),
    "grep": Shape(reads=True, members=("glob", "include")),
    "bash": Shape(),
    "web_fetch": Shape(connects=True, names_place=True, free_text=True),
    "web_search": Shape(connects=True),
}
"""Neutral tool names. What a command does to files or the network is not in its text: `bash` has no places."""

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
"""The capability list's own examples; each is a second spelling of a neutral name."""

SECOND_SPELLINGS: Final[dict[str, str]] = {neutral: spelling for spelling, neutral in SPELLINGS.items()}


class Touched(msgspec.Struct, frozen=True):
    """Everything that one tool call names, as it was written."""

    paths: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    unreadable: str | None = None
    """Why the input cannot be judged as a whole; None when it can."""


_PATH_ENDINGS: Final = ("path", "paths", "file", "files", "filename", "filenames", "dir", "directory", "folder")
_URL_ENDINGS: Final = ("url", "urls", "uri", "uris", "href", "endpoint")
_FILE_URL: Final = re.compile(r"file:(?://[^/?#]*)?([^?#]*)", re.IGNORECASE)
_URL_IN_TEXT: Final = re.compile(r"\b(?:https?|wss?|ftp|file):/{0,2}[^\s<>\"'`]+", re.IGNORECASE)
_AFTER_A_URL: Final = ".,;:!?)]}"
_PATCH_PATH: Final = re.compile(
    r"^(?:\*\*\* (?:Add|Update|Delete) File: |\*\*\* Move to: |(?:rename|copy) (?:from|to) |(?:---|\+\+\+) )(.+?)\s*$",
    re.MULTILINE,
)


def touched(shape: Shape, value: Json) -> Touched:
    """Collect the paths and URLs of a tool's input, wherever in it they stand."""
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


def patch_paths(text: str) -> list[str]:
    """Paths that a patch names, of the git form and of the `*** Update File:` form; `/dev/null` left out."""
    found = []
    for path in _PATCH_PATH.findall(text):
        path = path.split("\t")[0].strip('"')
        if path != "/dev/null":
            found.append(path[2:] if path[:2] in ("a/", "b/") else path)
    return found


def _percent_decoded(text: str) -> str:
    raw = re.sub(rb"%([0-9A-Fa-f]{2})", lambda found: bytes([int(found[1], 16)]), text.encode())
    return raw.decode("utf-8", "surrogateescape")
