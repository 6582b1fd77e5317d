"""A small HTTP proxy that applies rules to host names: CONNECT for encrypted traffic, whole requests for the rest.

It checks a connection against the order's policy, by its name and by every address of the name, and then copies its
bytes. It decrypts nothing, and records only the hosts that were reached and the refusals.
"""

from __future__ import annotations

import errno
import functools
import ipaddress
import os
import re
import socket
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

import anyio
import msgspec

from backplane.contract.canonical import Json
from backplane.errors import DENIAL
from backplane.policy.rules import Policy, Rule
from backplane.policy.urls import NetworkRule, Target, network_rule, network_rules, read_target
from backplane.process.aio import in_daemon, receive, send, visited

CONNECTIONS_MAX: Final = 128
"""Limit of open connections; further ones wait. A package manager opens about 50."""

HEAD_BYTES_MAX: Final = 64 * 1024
"""Size limit of a request's head in bytes; servers accept 8 to 64 KiB."""

HEAD_S_MAX: Final = 15.0
"""Seconds for a request's head to arrive."""

CONNECT_S_MAX: Final = 20.0
"""Seconds to look up a name and to connect, together."""

IDLE_S_MAX: Final = 600.0
"""Seconds without data after which a connection ends; a model may need minutes for its first word."""

CHUNK_BYTES: Final = 64 * 1024
"""Maximum number of bytes copied at once, in each direction."""

LOOKUPS_MAX: Final = 8
"""Limit of simultaneous name lookups of one run; further ones wait. A resolver may take 30 s, and cannot be stopped."""

Names = anyio.CapacityLimiter
"""Limits simultaneous name lookups."""

Address = tuple[int, tuple[str | int, ...]]
"""An address family, and an address for `connect`."""

ADDRESSES_MAX: Final = 16
"""Number of addresses of one name that are tried."""

FORBIDDEN: Final = "403 Forbidden"
"""Status of a connection that a rule forbids; the client gets the rule instead of "Forbidden"."""

PHRASE_CHARS_MAX: Final = 1_000
"""Maximum length of an answer's reason phrase; many clients show nothing else of a refused CONNECT."""

_HTTPS_PORT: Final = 443

_NOT_LISTED: Final = Rule("allow_network")
"""The rule that decides about a host which `allow_network` does not list."""

DROPPED_HEADERS: Final = (b"proxy-connection", b"proxy-authorization", b"connection", b"keep-alive", b"te", b"upgrade")
"""Headers that are not forwarded, because they apply to one connection only (RFC 9110, 7.6.1)."""


NOTES_MAX: Final = 100
"""Number of refusals, and of hosts, that the receipt names; it counts all."""


class Connections:
    """Records the connections of one run."""

    def __init__(self) -> None:
        self.allowed = 0
        self.denied = 0
        self._hosts: dict[str, None] = {}
        self._refusals: dict[str, None] = {}

    def allow(self, target: str) -> None:
        self.allowed += 1
        if len(self._hosts) < NOTES_MAX:
            self._hosts[target] = None

    def deny(self, reason: str) -> None:
        self.denied += 1
        if len(self._refusals) < NOTES_MAX:
            self._refusals[reason] = None

    def to_wire(self) -> dict[str, Json]:
        return {
            "allowed": self.allowed,
            "denied": self.denied,
            **({"hosts": list(self._hosts)} if self._hosts else {}),
            **({"refusals": list(self._refusals)} if self._refusals else {}),
        }


class ConnectionRefused(Exception):
    """A refused connection: the status and the reason for the client."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class ConnectionRules:
    """Decides where a connection may go, by name and by address.

    Args:
        endpoints: patterns, like those of the policy, of targets that are always allowed.
    """

    def __init__(self, policy: Policy, endpoints: tuple[str, ...]) -> None:
        self._policy = policy
        self._endpoints: tuple[NetworkRule, ...] = network_rules(endpoints)

    def check_name(self, target: str) -> bool:
        """Check a target by its name; return True for a backend's endpoint, whose addresses need no check.

        Raises:
            ConnectionRefused: the target is forbidden, or ambiguous.
        """
        place = read_target(target)
        if place is None:
            raise ConnectionRefused("400 Bad Request", "the target does not say clearly where it leads")
        if self._is_endpoint(place):
            return True
        decision = self._policy.decide_connection(target)
        if decision.rule == _NOT_LISTED and self._is_https(place):
            return False
        if decision.allowed != "allow":
            raise ConnectionRefused(FORBIDDEN, decision.reason)
        return False

    def _is_https(self, place: Target) -> bool:
        """Return True if a rule on https allows a tunnel to this port: port 443, or the one that the rule names."""
        if place.scheme is not None or place.path is not None:
            return False
        rule = self._policy.decide_connection(f"https://{place.host}:{place.port}/").rule
        if rule is None or rule.name != "allow_network" or rule.pattern is None:
            return False
        return place.port in (_HTTPS_PORT, network_rule(rule.pattern).port)

    def check_address(self, host: str, address: str, port: int) -> None:
        """Check an address of a name, because an allowed name must not lead to a forbidden address.

        Raises:
            ConnectionRefused: the address is forbidden.
        """
        place = ipaddress.ip_address(address)
        mapped = getattr(place, "ipv4_mapped", None)
        place = mapped or place
        text = f"[{place}]:{port}" if place.version == 6 else f"{place}:{port}"
        decision = self._policy.decide_connection(text)
        # The public addresses of an allowed name need no rule of their own. Its other addresses, such as this machine's
        # or its neighbours', need one, or the owner of the name could choose any of them.
        trusted = place.is_global or (place.is_loopback and host == "localhost")
        if decision.allowed != "allow" and not (trusted and decision.rule == _NOT_LISTED):
            raise ConnectionRefused(FORBIDDEN, f"{host!r} leads to {place}: {decision.reason}")
        if place.is_multicast or place.is_unspecified:
            raise ConnectionRefused(FORBIDDEN, f"{host!r} leads to {place}, which is no host")

    def _is_endpoint(self, target: Target) -> bool:
        return any(rule.matches(target, unsaid=True) for rule in self._endpoints)


class _Request(msgspec.Struct, frozen=True):
    """A client's request, read from its head."""

    target: str
    host: str
    port: int
    tunnel: bool
    head: bytes = b""
    """The head to send to the server; empty for a tunnel."""
    body_bytes: int = 0
    rest: bytes = b""
    """Further bytes that arrived with the head."""


async def serve(door: socket.socket, judge: ConnectionRules, connections: Connections) -> None:
    """Accept connections, check them and copy their data until cancelled."""
    names = anyio.CapacityLimiter(LOOKUPS_MAX)
    attend = functools.partial(_attend, judge=judge, connections=connections, names=names)
    await visited(door, attend, CONNECTIONS_MAX)


_LENGTH_DIGITS_MAX: Final = 18
"""Maximum number of digits in a body's length; Python refuses to read thousands of digits."""


async def _attend(client: socket.socket, judge: ConnectionRules, connections: Connections, names: Names) -> None:
    try:
        await _carry_one(client, judge, connections, names)
    except ConnectionRefused as refusal:
        connections.deny(str(refusal))
        await _refuse(client, refusal)
    except OSError:  # Either end has closed.
        return
    except Exception as error:  # All errors end here: an error of one connection ends neither others nor the run.
        connections.deny(f"the proxy failed: {type(error).__name__}")
        await _refuse(client, ConnectionRefused("500 Internal Server Error", "the proxy failed"))
    finally:
        _forget(client)


async def _carry_one(client: socket.socket, judge: ConnectionRules, connections: Connections, names: Names) -> None:
    with anyio.move_on_after(HEAD_S_MAX) as reading:
        head, rest = await _read_head(client)
    if reading.cancelled_caught:
        raise ConnectionRefused("408 Request Timeout", f"no whole request within {HEAD_S_MAX:g} s")
    request = _read_request(head, rest)
    server = await _connect(request, judge, judge.check_name(request.target), names)
    with server:
        connections.allow(f"{request.host}:{request.port}")
        try:
            await _carry(client, server, request)
        finally:
            _forget(server)


async def _refuse(client: socket.socket, refusal: ConnectionRefused) -> None:
    status, words = refusal.status, str(refusal)
    if status == FORBIDDEN:
        words = f"{DENIAL}: {words}"
        status = f"{status[:3]} {re.sub(r'[^ -~]', '?', words)[:PHRASE_CHARS_MAX]}"  # A phrase is ASCII on one line.
    body = f"{words}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with suppress(OSError), anyio.move_on_after(HEAD_S_MAX):
        await send(client, head.encode() + body)


async def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0 and len(data) <= HEAD_BYTES_MAX:
        chunk = await receive(client, CHUNK_BYTES)
        if not chunk:
            raise ConnectionResetError
        data += chunk
    if not 0 <= end <= HEAD_BYTES_MAX:
        raise ConnectionRefused("431 Request Header Fields Too Large", f"the head is over {HEAD_BYTES_MAX} bytes")
    return data[:end], data[end + 4 :]


def _read_request(head: bytes, rest: bytes) -> _Request:
    try:
        first, *lines = head.split(b"\r\n")
        method, target, version = first.decode("ascii").split(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0"):
            raise ValueError
    except ValueError:
        raise ConnectionRefused("400 Bad Request", "not a request of HTTP/1") from None
    if method != "CONNECT":
        return _whole_request(method, target, lines, rest)
    place = read_target(target)
    if place is None or place.port is None or place.scheme is not None or place.path is not None:
        raise ConnectionRefused("400 Bad Request", "CONNECT takes host:port")
    return _Request(target, place.host.strip("[]"), place.port, True, rest=rest)


def _whole_request(method: str, target: str, lines: list[bytes], rest: bytes) -> _Request:
    place = read_target(target)
    if place is None or place.scheme != "http":
        raise ConnectionRefused("400 Bad Request", "give the whole address of an http:// resource, or CONNECT")
    kept: list[bytes] = []
    body_bytes: int | None = None
    for line in lines:
        name = line.partition(b":")[0].strip().lower()
        if name == b"transfer-encoding" or line[:1] in (b" ", b"\t"):
            raise ConnectionRefused("411 Length Required", "say the length of the body")
        if name == b"content-length":
            digits = line.partition(b":")[2].strip()
            if not digits.isdigit() or len(digits) > _LENGTH_DIGITS_MAX or body_bytes is not None:
                raise ConnectionRefused("400 Bad Request", "the length of the body is no number")
            body_bytes = int(digits)
        if name not in DROPPED_HEADERS and name != b"host":
            kept.append(line)
    parts = urlsplit(target)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    first = f"{method} {path} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}".encode()
    head = b"\r\n".join([first, *kept, b"Connection: close", b"", b""])
    assert place.port is not None, "the scheme has one"
    return _Request(target, place.host.strip("[]"), place.port, False, head, body_bytes or 0, rest)


async def _connect(request: _Request, judge: ConnectionRules, own: bool, names: Names) -> socket.socket:
    """Resolve the name, check every address, and connect to the first that answers."""
    with anyio.move_on_after(CONNECT_S_MAX):
        try:
            # Not in the loop's own threads: all runs share those, and the loop's end waits for each of them.
            found = await in_daemon(functools.partial(_look_up, request.host, request.port), names)
        except (OSError, UnicodeError) as error:
            raise ConnectionRefused("502 Bad Gateway", f"{request.host!r} cannot be found: {error}") from error
        addresses = list(dict.fromkeys(found))[:ADDRESSES_MAX]
        if not own:
            for _, where in addresses:
                judge.check_address(request.host, str(where[0]), request.port)
        for family, where in addresses:
            with suppress(OSError):
                return await _reach(family, where)
    raise ConnectionRefused("502 Bad Gateway", f"{request.host!r} does not answer on port {request.port}")


def _look_up(host: str, port: int) -> list[Address]:
    """Resolve a host by the system's resolver; blocks. Raises OSError, and UnicodeError if the host is no name."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A Python built without IPv6 returns IPv6 addresses as numbers.
    return [(family, where) for family, _, _, _, where in found if isinstance(where[0], str)]


async def _reach(family: int, where: tuple[str | int, ...]) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setblocking(False)
        fault = server.connect_ex(where)
        if fault == errno.EINPROGRESS:
            await anyio.wait_writable(server)
            fault = server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if fault:
            raise OSError(fault, os.strerror(fault))
        return server
    except BaseException:
        _forget(server)
        server.close()
        raise


async def _carry(client: socket.socket, server: socket.socket, request: _Request) -> None:
    with anyio.CancelScope(deadline=anyio.current_time() + IDLE_S_MAX) as idle:
        if request.tunnel:
            await send(client, b"HTTP/1.1 200 Connection established\r\n\r\n")
        await send(server, request.head + request.rest[: None if request.tunnel else request.body_bytes])
        left = None if request.tunnel else max(0, request.body_bytes - len(request.rest))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_pour, client, server, left, idle, None)
            # The end of the server's data ends the connection; the end of the client's data does not.
            await _pour(server, client, None, idle, tasks.cancel_scope)


async def _pour(
    source: socket.socket,
    sink: socket.socket,
    bytes_max: int | None,
    idle: anyio.CancelScope,
    both: anyio.CancelScope | None,
) -> None:
    """Copy one direction until its end, and close it; then cancel `both`, which ends the other direction, too."""
    left = bytes_max
    with suppress(OSError):
        while left != 0:
            data = await receive(source, CHUNK_BYTES if left is None else min(CHUNK_BYTES, left))
            if not data:
                break
            await send(sink, data)
            left = None if left is None else left - len(data)
            idle.deadline = anyio.current_time() + IDLE_S_MAX
        if bytes_max is None:
            sink.shutdown(socket.SHUT_WR)
    if both is not None:
        both.cancel()


def _forget(end: socket.socket) -> None:
    if end.fileno() >= 0:
        anyio.notify_closing(end)
