"""A small HTTP proxy that applies rules to host names: CONNECT for encrypted traffic, whole requests for the rest.

It checks a connection against the order's policy, by its name and by every address of the name, and then copies its
bytes. It decrypts nothing, and records only the hosts that were reached and the refusals.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import socket
from contextlib import suppress
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import anyio
import h11

from backplane.contract.canonical import Json
from backplane.errors import DENIAL
from backplane.policy.rules import Policy, Rule
from backplane.policy.urls import NetworkRule, Target, network_rule, network_rules, read_target
from backplane.process.aio import beside, in_daemon, receive, send, visited
from backplane.sandbox.http import (
    CHUNK_BYTES,
    CONNECT_S_MAX,
    CONNECTIONS_MAX,
    HEAD_BYTES_MAX,
    IDLE_S_MAX,
    HttpClient,
    Refused,
    forwarded,
)

HEAD_S_MAX: Final = 15.0
"""Seconds for a request's head to arrive."""

LOOKUPS_MAX: Final = 8
"""Limit of simultaneous name lookups of one run; further ones wait. A resolver may take 30 s, and cannot be stopped."""

Address = tuple[int, tuple[str | int, ...]]
"""An address family, and an address for `connect`."""

FORBIDDEN: Final = 403
"""Status of a connection that a rule forbids; the client gets the rule instead of "Forbidden"."""

PHRASE_CHARS_MAX: Final = 1_000
"""Maximum length of an answer's reason phrase; many clients show nothing else of a refused CONNECT."""

_HTTPS_PORT: Final = 443

_NOT_LISTED: Final = Rule("allow_network")
"""The rule that decides about a host which `allow_network` does not list."""

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
            Refused: the target is forbidden, or ambiguous.
        """
        place = read_target(target)
        if place is None:
            raise Refused(400, "the target does not say clearly where it leads")
        if self._is_endpoint(place):
            return True
        decision = self._policy.decide_connection(target)
        if decision.rule == _NOT_LISTED and self._is_https(place):
            return False
        if decision.allowed != "allow":
            raise Refused(FORBIDDEN, decision.reason)
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
            Refused: the address is forbidden.
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
            raise Refused(FORBIDDEN, f"{host!r} leads to {place}: {decision.reason}")
        if place.is_multicast or place.is_unspecified:
            raise Refused(FORBIDDEN, f"{host!r} leads to {place}, which is no host")

    def _is_endpoint(self, target: Target) -> bool:
        return any(rule.matches(target, unsaid=True) for rule in self._endpoints)


async def serve(door: socket.socket, judge: ConnectionRules, connections: Connections) -> None:
    """Accept connections, check them and copy their data until cancelled."""
    names = anyio.CapacityLimiter(LOOKUPS_MAX)

    async def attend(end: socket.socket) -> None:
        client = HttpClient(end)
        try:
            await _carry_one(client, judge, connections, names)
        except OSError:  # Either end has closed.
            return
        except Exception as error:  # All errors end here: an error of one connection ends neither others nor the run.
            await _refuse(client, _refusal_for(error), connections)

    await visited(door, attend, CONNECTIONS_MAX)


def _refusal_for(error: Exception) -> Refused:
    if isinstance(error, Refused):
        return error
    if not isinstance(error, h11.RemoteProtocolError):
        return Refused(500, f"the proxy failed: {type(error).__name__}")
    if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
        return Refused(error.error_status_hint, f"the head is over {HEAD_BYTES_MAX} bytes")
    return Refused(error.error_status_hint, "not a request of HTTP/1")


async def _refuse(client: HttpClient, refusal: Refused, connections: Connections) -> None:
    words, reason = str(refusal), HTTPStatus(refusal.status).phrase
    connections.deny(words)
    if refusal.status == FORBIDDEN:
        words = f"{DENIAL}: {words}"
        reason = re.sub(r"[^ -~]", "?", words)[:PHRASE_CHARS_MAX]
    with suppress(OSError, h11.ProtocolError):
        await client.answer(refusal.status, "text/plain; charset=utf-8", f"{words}\n".encode(), reason.encode())


async def _carry_one(
    client: HttpClient, judge: ConnectionRules, connections: Connections, names: anyio.CapacityLimiter
) -> None:
    with anyio.move_on_after(HEAD_S_MAX) as reading:
        request = await client.request()
    if reading.cancelled_caught:
        raise Refused(408, f"no whole request within {HEAD_S_MAX:g} s")
    if request is None:
        return
    target = request.target.decode("ascii")
    place, is_tunnel = read_target(target), request.method == b"CONNECT"
    if is_tunnel and (place is None or place.port is None or place.scheme is not None or place.path is not None):
        raise Refused(400, "CONNECT takes host:port")
    if place is None or place.port is None or (not is_tunnel and place.scheme != "http"):
        raise Refused(400, "give the whole address of an http:// resource, or CONNECT")
    host = place.host.strip("[]")
    with await _connect(host, place.port, judge, judge.check_name(target), names) as server:
        connections.allow(f"{host}:{place.port}")
        with anyio.CancelScope(deadline=anyio.current_time() + IDLE_S_MAX) as idle:
            if is_tunnel:
                await _carry_tunnel(client, server, idle)
            else:
                await _carry_request(client, server, request, idle)


async def _carry_tunnel(client: HttpClient, server: socket.socket, idle: anyio.CancelScope) -> None:
    """Copy both directions; the end of one leaves the other open."""
    async for _ in client.body():  # A few clients give CONNECT a body.
        pass
    await client.send(h11.Response(status_code=200, headers=[], reason=b"Connection established"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_pour, server, client.end, idle)
        await _pour(client.end, server, idle, client.http.trailing_data[0])


async def _carry_request(
    client: HttpClient, server: socket.socket, request: h11.Request, idle: anyio.CancelScope
) -> None:
    """Send a whole request on, and copy the answer until the server ends the connection."""
    parts = urlsplit(request.target.decode("ascii"))
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = [(b"Host", parts.netloc.rpartition("@")[2].encode()), (b"Connection", b"close")]
    headers += forwarded(request.headers.raw_items())
    if client.has_body and not any(name.lower() == b"content-length" for name, _ in headers):
        headers.append((b"Transfer-Encoding", b"chunked"))
    there = h11.Connection(h11.CLIENT)
    await send(server, there.send(h11.Request(method=request.method, target=path, headers=headers)))

    async def send_body() -> None:
        try:
            async for data in client.body():
                await send(server, there.send(h11.Data(data=data)))
                idle.deadline = anyio.current_time() + IDLE_S_MAX
            await send(server, there.send(h11.EndOfMessage()))
        except OSError:  # The server may answer before the whole body has come.
            return
        except h11.ProtocolError:  # The client has broken off.
            idle.cancel()

    async with beside(send_body):
        await _pour(server, client.end, idle)


async def _pour(source: socket.socket, sink: socket.socket, idle: anyio.CancelScope, first: bytes = b"") -> None:
    """Copy one direction until its end, and pass the end on; if either socket breaks, end both directions."""
    try:
        await send(sink, first)
        while data := await receive(source, CHUNK_BYTES):
            await send(sink, data)
            idle.deadline = anyio.current_time() + IDLE_S_MAX
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        idle.cancel()


async def _connect(
    host: str, port: int, judge: ConnectionRules, own: bool, names: anyio.CapacityLimiter
) -> socket.socket:
    """Resolve the name, check every address, and connect to the first that answers.

    Args:
        own: True for a backend's endpoint, whose addresses are not checked.
    """
    with anyio.move_on_after(CONNECT_S_MAX):
        try:
            # Use a thread of our own: all runs share the loop's threads, and the loop's end waits for each of them.
            async with names:
                found = await in_daemon(functools.partial(_look_up, host, port))
        except (OSError, UnicodeError) as error:
            raise Refused(502, f"{host!r} cannot be found: {error}") from error
        addresses = list(dict.fromkeys(found))
        if not own:
            for _, where in addresses:
                judge.check_address(host, str(where[0]), port)
        for family, where in addresses:
            with suppress(OSError):
                return await _reach(family, where)
    raise Refused(502, f"{host!r} does not answer on port {port}")


def _look_up(host: str, port: int) -> list[Address]:
    """Resolve a host by the system's resolver; blocks. Raises OSError, and UnicodeError if the host is no name."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A Python built without IPv6 returns IPv6 addresses as numbers.
    return [(family, where) for family, _, _, _, where in found if isinstance(where[0], str)]


async def _reach(family: int, where: tuple[str | int, ...]) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setblocking(False)
        with suppress(BlockingIOError):
            server.connect(where)
        await anyio.wait_writable(server)
        if fault := server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(fault, os.strerror(fault))
    except BaseException:
        server.close()
        raise
    return server
