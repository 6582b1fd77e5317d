"""Refuses requests that do not come from the desk's own page, which was opened with the token.

No cookie: a browser would send one to every other port of this machine. The token comes in a header, which neither an
address, nor a page of another origin, nor a DNS name rebound to this address can send.
"""

from __future__ import annotations

import hmac
import secrets
import time
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CODE_S_MAX: Final = 120.0
"""Seconds for which a code is valid; a browser starts in a few seconds, or in a minute on a busy machine."""
TOKEN_PATH: Final = "/api/token"


class Guard:
    """An ASGI application that answers only requests of the desk's page.

    Args:
        port: the port that the server listens on.
        token: the token that the page was opened with.
        policy: the page's Content-Security-Policy.
    """

    def __init__(self, app: ASGIApp, *, port: int, token: str, policy: str) -> None:
        self._app, self._token, self._code, self._code_ends = app, token, "", 0.0
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    def new_code(self) -> str:
        """Return a new code, valid once in exchange for the token: other users can see a browser's arguments."""
        self._code, self._code_ends = secrets.token_urlsafe(16), time.monotonic() + CODE_S_MAX
        return self._code

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        if scope["type"] != "http":
            return
        answer = JSONResponse({"token": self._token}) if scope["path"] == TOKEN_PATH else self._app
        if refusal := self._refused(scope, Headers(scope=scope)):
            status, fact = refusal
            answer = JSONResponse({"code": "policy_denied", "message": fact}, status, {"Connection": "close"})
        await answer(scope, receive, dressed)

    def _refused(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        host, given, is_post = headers.get("host", ""), headers.get("authorization", ""), scope["method"] == "POST"
        if host not in self._hosts:
            return 421, "the Host header is not this server's address"
        if headers.get("origin", "" if is_post else f"http://{host}") != f"http://{host}":
            return 403, "the request comes from another origin"
        if scope["path"] == TOKEN_PATH:
            is_right = is_post and self._redeem(given)
            return None if is_right else (401, "the code is used or expired; open the address that the terminal shows")
        if scope["path"].startswith("/api/") and not _is_same(given, f"Bearer {self._token}"):
            return 401, "the token is missing or wrong; open the address that the terminal shows"
        return None

    def _redeem(self, given: str) -> bool:
        # A wrong code leaves the right one valid: another program could use it up otherwise.
        if not self._code or not _is_same(given, f"Code {self._code}"):
            return False
        self._code = ""
        return time.monotonic() <= self._code_ends


def _is_same(given: str, right: str) -> bool:
    return hmac.compare_digest(given.encode(), right.encode())
