"""Reads the targets of connections, and the patterns of network rules, into a form in which they can be compared.

`rules` decides what is allowed. No name is looked up (no DNS).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from ipaddress import AddressValueError, IPv6Address, ip_address, ip_network
from typing import Final

import msgspec

from backplane.errors import PolicyError
from backplane.policy.globs import Globs, compile_globs
from backplane.policy.paths import fold, too_long

URL_CHARS_MAX: Final = 8192
"""Maximum length of a target, with its query, as in most servers; a longer one is malformed and denied."""

_HOST_CHARS_MAX: Final = 253
"""Maximum length of a domain name (RFC 1035); a longer one is malformed."""


class Target(msgspec.Struct, frozen=True):
    """The target of a connection, in a form that can be compared. A field is None if the text does not have it."""

    host: str
    """Lower case, no trailing dot, letters beyond ASCII as in DNS (`xn--`); IPv4 in four decimal parts, IPv6 in
    brackets, `0.0.0.0` and `[::]` as the loopback address."""
    scheme: str | None = None
    port: int | None = None
    """The scheme's default port if the text has none."""
    path: str | None = None
    """Without dot segments, query and fragment."""


_TARGET: Final = re.compile(r"(?:([A-Za-z][A-Za-z0-9+.-]*)://)?([^/?#]*)([^?#]*)")
_AUTHORITY: Final = re.compile(r"(\[[^\]]*\]|[^:\[\]]+)(?::([0-9]{0,5}))?")
_UNSAFE: Final = re.compile(r"[\x00-\x20\x7f\\]")
_HOST: Final = re.compile(r"(?!\.)(?:(?!\.\.)[a-z0-9._-]|[^\x00-\x7f])+")
_LEADS_TO: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Unspecified address → address to which a connection with it goes."""
_ALSO_WRITTEN: Final = {leads_to: address for address, leads_to in _LEADS_TO.items()}
_PORTS: Final = {"http": 80, "https": 443, "ws": 80, "wss": 443, "ftp": 21, "ssh": 22}


def read_target(text: str) -> Target | None:
    """Read a URL or `host[:port]`; None if two clients could connect to different hosts for it.

    So these give None: percent signs in the host, more than one `@`, backslashes, blanks, control characters, a scheme
    without `//`, a host that Unicode normalisation would change.
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
    if host is None or path == "" or (port is not None and port > 65535) or too_long(path or ""):
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
    host = _resolved(host)
    return _ipv4(host) if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", host.rpartition(".")[2]) else host


def _stable(host: str) -> bool:
    # Clients convert full-width letters, soft hyphens and ideographic dots before they resolve a name, some also a
    # sharp s and a final sigma: the result is another host.
    letters = all(character.isascii() or unicodedata.category(character)[0] in "LMN" for character in host)
    return letters and unicodedata.normalize("NFKC", host) == host and not _READ_TWO_WAYS & set(host)


_READ_TWO_WAYS: Final = frozenset("\u00df\u03c2")


def _resolved(host: str) -> str:
    """Return a name as it is looked up in DNS."""
    if host.isascii():
        return host
    parts = host.split(".")
    return ".".join(part if part.isascii() else "xn--" + part.encode("punycode").decode() for part in parts)


def _ipv6(text: str) -> str | None:
    try:
        address = IPv6Address(text)
    except AddressValueError:
        return None
    if address.scope_id is not None:
        return None
    host = str(address.ipv4_mapped) if address.ipv4_mapped else f"[{address.compressed}]"
    return _LEADS_TO.get(host, host)


def _ipv4(host: str) -> str | None:
    """Return an IPv4 address in the usual form; octal, hexadecimal and short forms are read as resolvers read them."""
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
    """Normalise a URL's path; return an empty text if it has dot segments between encoded slashes."""
    plain = _UNRESERVED_ESCAPE.sub(lambda found: chr(int(found[1], 16)), path)
    folded = "/" + "/".join(fold(plain, absolute=True))
    if _HIDDEN_DOTS.search(folded):
        return ""
    return folded + "/" if plain.endswith("/") and folded != "/" else folded


class Range(msgspec.Struct, frozen=True):
    """A range of IPv4 or IPv6 addresses as integers, `first` and `last` included."""

    version: int
    first: int
    last: int

    def holds(self, host: str) -> bool:
        """Return whether a target's host is one of these addresses; False for a name."""
        try:
            address = ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return address.version == self.version and self.first <= int(address) <= self.last


class NetworkRule(msgspec.Struct, frozen=True):
    """One pattern of a network list; None in a field matches any value."""

    pattern: str
    hosts: Globs | Range | str
    """A host in the form of `Target.host`, a glob whose `*` also matches dots, or a range of addresses."""
    schemes: Globs | None = None
    port: int | None = None
    paths: Globs | None = None

    @property
    def everything(self) -> bool:
        return self.pattern in ("*", "**")

    def matches(self, target: Target, *, unsaid: bool) -> bool:
        """Return whether the rule matches a target; `unsaid` is the result for a part that the target does not have."""
        if isinstance(self.hosts, str):
            here = target.host == self.hosts
        else:
            held = self.hosts.holds if isinstance(self.hosts, Range) else functools.partial(_matches, self.hosts)
            here = any(map(held, _spellings(target.host)))
        return (
            here
            and (self.port is None or (unsaid if target.port is None else target.port == self.port))
            and (self.schemes is None or (unsaid if target.scheme is None else _matches(self.schemes, target.scheme)))
            and (self.paths is None or (unsaid if target.path is None else _matches(self.paths, target.path)))
        )


def network_rules(patterns: Sequence[str]) -> tuple[NetworkRule, ...]:
    """Read a list of patterns, and limit the cost of matching all of them.

    Raises:
        PolicyError: `policy_invalid`, a pattern is invalid, or the list too expensive to match.
    """
    rules = tuple(network_rule(pattern) for pattern in patterns)
    compile_globs([pattern for rule in rules if isinstance(rule.hosts, Globs) for pattern in rule.hosts.patterns])
    compile_globs([pattern for rule in rules if rule.paths is not None for pattern in rule.paths.patterns])
    return rules


def _spellings(host: str) -> tuple[str, ...]:
    return (host, _ALSO_WRITTEN[host]) if host in _ALSO_WRITTEN else (host,)


_RANGE: Final = re.compile(r"(?:[0-9.]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*|\[[0-9A-Fa-f:.]+\])/[0-9]+")


def _range(pattern: str) -> Range | None:
    """Read a range of addresses, `10.0.0.0/8` or `fd00::/8`; None for another pattern.

    Raises:
        PolicyError: `policy_invalid`.
    """
    if _RANGE.fullmatch(pattern) is None:
        return None

    try:
        found = ip_network(pattern.replace("[", "").replace("]", ""), strict=False)
    except ValueError as error:
        fact = f"not a range of addresses: {pattern[:200]!r}"
        raise PolicyError("policy_invalid", fact, hint="write 10.0.0.0/8 or fd00::/8") from error
    return Range(found.version, int(found.network_address), int(found.broadcast_address))


def _host_globs(host: str) -> Globs:
    parts = host.lower().removesuffix(".").split(".")
    if any(not part.isascii() and _GLOB.search(part) for part in parts):
        fact = f"a part of a name with letters beyond ASCII can only be compared whole: {host[:200]!r}"
        raise PolicyError("policy_invalid", fact, hint="write `*` for the whole part between two dots")
    return compile_globs([_resolved(".".join(parts))])


_GLOB: Final = re.compile(r"[*?\[\]{}]")


def _matches(globs: Globs, text: str) -> bool:
    return globs.matches(text) is not None


_RULE: Final = re.compile(r"(?:([A-Za-z*][A-Za-z0-9+.*-]*)://)?(\[[0-9A-Fa-f:.]+\]|[^/:@]+)(?::([0-9]{1,5}|\*))?(/.*)?")


def network_rule(pattern: str) -> NetworkRule:
    """Read a host glob, `host:port`, `[::1]:port`, a range such as `10.0.0.0/8`, or a URL pattern.

    A URL without a path matches all paths of the host.

    Raises:
        PolicyError: `policy_invalid`.
    """
    literal = _ipv6(pattern) or _range(pattern)
    if literal is not None:
        return NetworkRule(pattern, literal)
    match = _RULE.fullmatch(pattern)
    if match is None or _UNSAFE.search(pattern) or "%" in (match[2] or ""):
        raise PolicyError(
            "policy_invalid",
            f"not a network pattern: {pattern[:200]!r}",
            hint="write a host glob such as *.example.com, host:port, [::1]:port, 10.0.0.0/8, or scheme://host/path",
        )
    scheme, host, port, path = match.groups()
    return NetworkRule(
        pattern,
        _host(host) or _host_globs(host),
        compile_globs([scheme.lower()]) if scheme and scheme != "*" else None,
        int(port) if port and port != "*" else None,
        compile_globs([path]) if path and path not in ("/", "/*", "/**") else None,
    )
