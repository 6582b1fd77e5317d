"""Who may ask the page's server anything: programs of this machine that have the token, from the page itself.

No cookie: one would be handed to every other port of this machine. The token comes in a header, which neither an
address, nor another origin's page, nor a name that was bound to this address anew can send.
"""

from __future__ import annotations

import hmac
import secrets
import time
from typing import Final

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

BODY_BYTES_MAX: Final = 1 << 20
HEAD_BYTES_MAX: Final = 64 * 1024
STREAMS_MAX: Final = 32
"""Runs that are followed at once, by all pages together."""

CODE_S_MAX: Final = 30.0
"""For a browser that was opened with a code to change it for the token: it starts in a few seconds."""

HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
"""On every answer, beside the policy of the page."""

TOKEN_PATH: Final = "/api/token"


class Guard:
    """Refuses what does not come from the page, before anything reads it.

    Args:
        app: what is behind.
        port: that the server listens on.
        token: that the page was opened with.
        policy: the page's Content-Security-Policy.
    """

    def __init__(self, app: ASGIApp, *, port: int, token: str, policy: str) -> None:
        self._app = app
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._token = token
        self._code, self._code_ends = "", 0.0
        self._headers = [
            (name.lower().encode(), value.encode())
            for name, value in {**HEADERS, "Content-Security-Policy": policy}.items()
        ]

    def new_code(self) -> str:
        """Make a code that gives the token once, within `CODE_S_MAX`: a browser's arguments are seen by other users."""
        self._code, self._code_ends = secrets.token_urlsafe(16), time.monotonic() + CODE_S_MAX
        return self._code

    def _redeem(self, given: str) -> bool:
        # A wrong code leaves the right one valid, else any program of this machine could use it up. It is too long
        # to be guessed.
        code = self._code
        if not code or not hmac.compare_digest(given.encode(), f"Code {code}".encode()):
            return False
        self._code = ""
        return time.monotonic() <= self._code_ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, refused or not."""
        if scope["type"] != "http":
            return
        refusal = self._refused(scope)
        if refusal is not None:
            status, fact = refusal
            await self._answer(send, status, {"code": "policy_denied", "message": fact})
            return
        if scope["path"] == TOKEN_PATH:
            await self._answer(send, 200, {"token": self._token})
            return

        async def dressed(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]  # type: ignore[misc]
            await send(message)

        await self._app(scope, receive, dressed)  # type: ignore[arg-type]

    def _refused(self, scope: Scope) -> tuple[int, str] | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEAD_BYTES_MAX:
            return 431, f"the head is over {HEAD_BYTES_MAX} bytes"
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin, method = headers.get("host", ""), headers.get("origin"), scope["method"]
        if host not in self._hosts:
            return 421, "the Host is not this server's address"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return 403, "another site asks"
        if origin is not None and origin != f"http://{host}":
            return 403, "the Origin is another one"
        if method not in ("GET", "POST"):
            return 405, "only GET and POST"
        if b"token=" in scope["query_string"]:
            return 400, "a token does not belong into an address"
        if not scope["path"].startswith("/api/"):
            return None
        if scope["path"] == TOKEN_PATH:
            refused = _refused_post(headers) if method == "POST" else (405, "only POST")
            if refused is None and not self._redeem(headers.get("authorization", "")):
                refused = 401, "the code was used, or is too old: open the address that the terminal printed"
            return refused
        if not hmac.compare_digest(headers.get("authorization", "").encode(), f"Bearer {self._token}".encode()):
            return 401, "the token is missing or wrong: open the address that the terminal printed"
        if method == "POST":
            return _refused_post(headers)
        return None

    async def _answer(self, send: Send, status: int, told: dict[str, str]) -> None:
        body = msgspec.json.encode(told)
        headers = [*self._headers, (b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _refused_post(headers: dict[str, str]) -> tuple[int, str] | None:
    if "origin" not in headers:
        return 403, "there is no Origin"
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return 415, "the body is not said to be JSON"
    length = headers.get("content-length", "")
    if not length.isascii() or not length.isdigit() or len(length) > 9 or int(length) > BODY_BYTES_MAX:
        return 413, f"the body has no length, or is over {BODY_BYTES_MAX} bytes"
    return None
