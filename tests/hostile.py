"""Texts that a page must show and never act on: unescaped, most run a script, fetch something or leave the page."""

from __future__ import annotations

from typing import Final

_RUNS: Final = "window.owned=1"
_AWAY: Final = "//127.0.0.1:9/taken"

_WRAPPED: Final = tuple(
    before + f"<script>{_RUNS}</script>"
    for before in (
        *("", "</script>", "</style>", "</title>", "</textarea>", "</pre>", "</code>", "</summary></details>", "-->"),
        *('">', "'>", '"><!--', "<!--", "<![CDATA[", "</svg>", "</table>", "</template>", "</noscript>", "\u2028"),
        *("<b>", "&lt;", "\\", "`", "{{", "<svg>", "<math>", "</option></select>", "\x00", "<!--<script>", "]]>"),
    )
)
_HANDLERS: Final = tuple(
    f"{start}{made}"
    for start in ("", '">')
    for made in (
        f"<img src=x onerror={_RUNS}>", f"<img src=x onerror='{_RUNS}'//", f"<svg/onload={_RUNS}>",
        f"<svg><animate onbegin={_RUNS} attributeName=x dur=1s>", f"<body onload={_RUNS}>",
        f"<details open ontoggle={_RUNS}>x</details>", f"<input autofocus onfocus={_RUNS}>",
        f"<video src=x onerror={_RUNS}></video>", f"<audio src=x onerror={_RUNS}></audio>",
        f"<iframe onload={_RUNS}></iframe>", f"<iframe srcdoc='<script>parent.{_RUNS}</script>'></iframe>",
        f"<iframe src='javascript:parent.{_RUNS}'></iframe>", f"<object data=x onerror={_RUNS}></object>",
        f"<style onload={_RUNS}></style>", f"<marquee onstart={_RUNS}>x</marquee>",
        f"<math><mtext><img src=x onerror={_RUNS}></mtext></math>", f"<select autofocus onfocus={_RUNS}></select>",
        f"<textarea autofocus onfocus={_RUNS}></textarea>", f"<svg><script>{_RUNS}</script></svg>",
        f"<svg><image href=x onerror={_RUNS}></svg>", f"<link rel=stylesheet href=x onerror={_RUNS}>",
        f"<script src=x onerror={_RUNS}></script>",
    )
)  # fmt: skip
_ATTRIBUTES: Final = tuple(
    f"{quote} {name}={quote}{_RUNS}{more}"
    for quote in ('"', "'")
    for name, more in (
        ("onfocus", "{0} autofocus tabindex=1 x={0}"), ("onanimationstart", ""), ("ontoggle", ""), ("onclick", ""),
        ("style", ";background:url(//127.0.0.1:9/x)"),
    )
    for more in (more.replace("{0}", quote),)
)  # fmt: skip
_FETCHES: Final = (
    f"<img src={_AWAY}>", f"<link rel=stylesheet href={_AWAY}>", f"<script src={_AWAY}></script>",
    f"<iframe src={_AWAY}></iframe>", f"<object data={_AWAY}></object>", f"<embed src={_AWAY}>",
    f"<video src={_AWAY} autoplay></video>", f"<svg><use href={_AWAY}#x></svg>", f"<base href={_AWAY}/>",
    f"<meta http-equiv=refresh content='0;url={_AWAY}'>", f"<style>@import url({_AWAY})</style>",
    f"<div style='background:url({_AWAY})'>x</div>", f"@import url({_AWAY});", f"url({_AWAY})",
    f"<form action={_AWAY}><input name=a><button autofocus>go</button></form>", f"<link rel=prefetch href={_AWAY}>",
    f"<source srcset={_AWAY}>", f"<picture><source srcset={_AWAY}><img></picture>", f"<body background={_AWAY}>",
    f"<input type=image src={_AWAY}>", f"![image](http:{_AWAY})", f"[link](javascript:{_RUNS})",
    f"<a href='javascript:{_RUNS}' autofocus>x</a>", f"javascript:{_RUNS}", f"data:text/html,<script>{_RUNS}</script>",
)  # fmt: skip
_TEXTS: Final = (
    "{{7*7}}", "${7*7}", "{%raw%}", "&#x3c;script&#x3e;", "%3Cscript%3E", "\\u003cscript\\u003e",
    "\x1b]8;;http://evil.example\x1b\\link\x1b]52;c;Ym9vbQ==\x07", "\x1b[2J\x1b[H", "\x9b31m\x85",
    "\u202egnp.exe\u2066\u200b\u2028\u2029", "\ufeff\u2060", "a" + "\u0301" * 1000, "\x00\x01\x7f", "\ud7ff\ue000",
    "x" * 20_000, '{"fact": "sealed"}', "constructor", "__proto__", "**" * 500, "`" * 500, "#" * 500,
    "CON", "../../etc", "\r\nSet-Cookie: a=b", "'; DROP TABLE runs; --",
)  # fmt: skip

HOSTILE: Final = (*_WRAPPED, *_HANDLERS, *_ATTRIBUTES, *_FETCHES, *_TEXTS)
