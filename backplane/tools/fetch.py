"""Fetching a page: text of a bounded size, every address on the way asked of the policy.

A URL comes in, readable text comes out. What a browser would do with the page is not done.
"""

from __future__ import annotations

from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urljoin, urlsplit

import anyio

from backplane.policy import Connect, Policy
from backplane.tools.places import Refused
from backplane.tools.results import Result, shortened

if TYPE_CHECKING:
    import httpx

FETCH_S_MAX: Final = 30.0
"""For the whole page, redirections included."""

PAGE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Read of a page; its text is a tenth of that."""

REDIRECTS_MAX: Final = 5
"""A page that is moved more often is a loop."""

_TEXTS: Final = ("text/", "application/json", "application/xml", "application/xhtml", "application/javascript")
_MOVED: Final = frozenset({301, 302, 303, 307, 308})


async def web_fetch(policy: Policy, input: dict[str, Any]) -> Result:
    """Give a page's text."""
    # Only who fetches pays for loading it.
    import httpx

    try:
        with anyio.fail_after(FETCH_S_MAX):
            async with httpx.AsyncClient(follow_redirects=False, timeout=FETCH_S_MAX) as client:
                return await _follow(client, policy, input["url"])
    except TimeoutError as error:
        raise Refused(f"no answer within {FETCH_S_MAX:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        # Without the address: it may hold a key in its query.
        raise Refused(f"the page cannot be fetched: {type(error).__name__}") from error


async def _follow(client: httpx.AsyncClient, policy: Policy, url: str) -> Result:
    for _ in range(REDIRECTS_MAX + 1):
        if urlsplit(url).scheme not in ("http", "https"):
            raise Refused("only http and https addresses can be fetched")
        decision = policy.decide(Connect(url))
        if decision.allowed == "deny":
            raise Refused(f"policy_denied: {decision.reason}")
        async with client.stream("GET", url) as response:
            location = response.headers.get("location")
            if response.status_code in _MOVED and location:
                url = urljoin(url, location)
                continue
            return await _page(response)
    raise Refused(f"moved more than {REDIRECTS_MAX} times")


async def _page(response: httpx.Response) -> Result:
    kind = response.headers.get("content-type", "text/plain").lower()
    if not kind.startswith(_TEXTS) and "+json" not in kind and "+xml" not in kind:
        raise Refused(f"status {response.status_code}, no text but {kind[:80]}")
    data = bytearray()
    async for chunk in response.aiter_bytes():
        data += chunk[: PAGE_BYTES_MAX - len(data)]
        if len(data) >= PAGE_BYTES_MAX:
            break
    try:
        text = data.decode(response.charset_encoding or "utf-8", "replace")
    except LookupError:
        text = data.decode("utf-8", "replace")
    if "html" in kind:
        text = readable(text)
    status = "" if response.is_success else f"status {response.status_code}\n"
    return Result(shortened(status + text), is_error=not response.is_success)


class _Words(HTMLParser):
    """The words of a page, a line a block."""

    _HIDDEN: Final = frozenset({"script", "style", "noscript", "template", "svg"})
    _BLOCKS: Final = frozenset(
        {"p", "div", "li", "tr", "br", "pre", "table", "ul", "ol", "section", "article", "header", "title"}
        | {f"h{level}" for level in range(1, 7)}
    )

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in self._HIDDEN
        if tag in self._BLOCKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._HIDDEN:
            self._hidden = max(self._hidden - 1, 0)
        if tag in self._BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.pieces.append(data)


def readable(html: str) -> str:
    """The words of a page without its tags, scripts and empty lines."""
    words = _Words()
    words.feed(html)
    words.close()
    lines = (" ".join(line.split()) for line in "".join(words.pieces).split("\n"))
    return "\n".join(line for line in lines if line)
