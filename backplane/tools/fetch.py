"""Fetches a page and returns its text, up to a size limit. The policy decides about each address on the way.

A URL comes in, readable text comes out. Scripts of the page do not run.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from html import unescape
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

import anyio
import httpx

from backplane.errors import ConfigError
from backplane.policy.rules import Policy
from backplane.tools.places import ToolRefused
from backplane.tools.results import CallResult, shortened
from backplane.upstream.client import check_coding
from backplane.upstream.clients import making_client

FETCH_S_MAX: Final = 30.0
"""Seconds for the whole page, redirections included."""

PAGE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Most bytes read of a page; the text is about a tenth of them."""

REDIRECTS_MAX: Final = 5
"""Most redirections that are followed; more of them are a loop."""

_TEXTS: Final = ("text/", "application/json", "application/xml", "application/xhtml", "application/javascript")
_MOVED: Final = frozenset({301, 302, 303, 307, 308})
_HEADERS: Final = {"accept-encoding": "gzip, deflate"}
_NO_CHARSETS: Final = frozenset({"punycode", "idna"})
"""Codecs for names; decoding a page of megabytes with them takes minutes."""

_TAG: Final = re.compile(r"<(?:!--|[!?]|/?([a-z][a-z0-9]*))", re.IGNORECASE)
_HIDDEN: Final = {
    name: re.compile(f"</{name}", re.IGNORECASE) for name in ("script", "style", "noscript", "template", "svg")
}
"""Element whose content is not shown → pattern of the element's end."""

_BLOCKS: Final = frozenset(
    {"p", "div", "li", "tr", "br", "pre", "table", "ul", "ol", "section", "article", "header", "title"}
    | {f"h{level}" for level in range(1, 7)}
)


async def web_fetch(policy: Policy, input: dict[str, Any]) -> CallResult:
    """Return a page's text."""
    try:
        with anyio.fail_after(FETCH_S_MAX):
            with making_client():
                client = httpx.AsyncClient(follow_redirects=False, timeout=FETCH_S_MAX)
            async with client:
                return await _follow(client, policy, input["url"])
    except TimeoutError as error:
        raise ToolRefused(f"no answer within {FETCH_S_MAX:g} s") from error
    except ConfigError as error:
        raise ToolRefused(f"the page cannot be fetched: {error.message}") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        # The address is left out, because its query may hold a key.
        raise ToolRefused(f"the page cannot be fetched: {type(error).__name__}") from error


async def _follow(client: httpx.AsyncClient, policy: Policy, url: str) -> CallResult:
    for _ in range(REDIRECTS_MAX + 1):
        if urlsplit(url).scheme not in ("http", "https"):
            raise ToolRefused("only http and https addresses can be fetched")
        decision = policy.decide_connection(url)
        if decision.allowed == "deny":
            raise ToolRefused(f"policy_denied: {decision.reason}")
        async with client.stream("GET", url, headers=_HEADERS) as response:
            location = response.headers.get("location")
            if response.status_code in _MOVED and location:
                url = urljoin(url, location)
                continue
            return await _page(response)
    raise ToolRefused(f"moved more than {REDIRECTS_MAX} times")


async def _page(response: httpx.Response) -> CallResult:
    kind = response.headers.get("content-type", "text/plain").lower()
    if not kind.startswith(_TEXTS) and "+json" not in kind and "+xml" not in kind:
        raise ToolRefused(f"status {response.status_code}, no text but {kind[:80]}")
    check_coding(response)
    data = bytearray()
    async for chunk in response.aiter_bytes():
        data += chunk[: PAGE_BYTES_MAX - len(data)]
        if len(data) >= PAGE_BYTES_MAX:
            break
    text = _decoded(bytes(data), response.charset_encoding)
    if "html" in kind:
        text = readable(text)
    status = "" if response.is_success else f"status {response.status_code}\n"
    return CallResult(shortened(status + text), is_error=not response.is_success)


def _decoded(data: bytes, charset: str | None) -> str:
    try:
        if charset and codecs.lookup(charset).name not in _NO_CHARSETS:
            return data.decode(charset, "replace")
    except (LookupError, UnicodeError):
        pass  # The name is unknown, or it is no charset.
    return data.decode("utf-8", "replace")


def readable(html: str) -> str:
    """Return the words of a page without tags, scripts and empty lines, in one pass."""
    lines = (" ".join(line.split()) for line in "".join(_words(html)).split("\n"))
    return "\n".join(line for line in lines if line)


def _words(html: str) -> Iterator[str]:
    place = 0
    while (tag := _TAG.search(html, place)) is not None:
        yield unescape(html[place : tag.start()])
        name = (tag[1] or "").lower()
        if name in _BLOCKS:
            yield "\n"
        ending, inside = _HIDDEN.get(name), tag.end()
        if ending is not None and (close := ending.search(html, inside)) is not None:
            inside = close.end()
        last = "-->" if tag[0] == "<!--" else ">"
        end = html.find(last, inside)
        if end < 0 or (ending is not None and inside == tag.end()):
            return  # A browser shows nothing of an element that never ends.
        place = end + len(last)
    yield unescape(html[place:])
