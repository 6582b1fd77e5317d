"""Chooses the next attempt after a refusal by a model's service: ladders as data, and pure functions.

A rung rewrites the request with less in it, which is a loss; a repeat sends the same request again, later. `completion`
waits and sends.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from backplane.dialects import gemini
from backplane.dialects.ir import Loss, LossKind
from backplane.upstream import rewrites
from backplane.upstream.endpoint import PROTOCOLS
from backplane.upstream.failure import INVALID, UpstreamFailure
from backplane.upstream.rewrites import Change, Request, offered_tools

WAIT_S_MAX: Final = 30.0
"""Maximum seconds before a repeat; if more is needed, another upstream is the better choice."""


class Rung(msgspec.Struct, frozen=True):
    """One feature of a request that a service may not support."""

    name: str
    words: str
    """Pattern, in upper or lower case, of a service's message which says that it does not take the feature."""
    change: Change
    reason: str
    is_cut: bool = False
    """True if the model can do or see less afterwards; then the rung needs a refusal that matches `words`."""


REFUSING: Final = (
    r"\bnot\s+(\w+\s+)?(support|accept|allow|permit|enabl|implement|available|known|expect|a multi|process|handle|take)"
    r"|n't\s+(support|accept|allow|take|process|handle)|unsupported|unknown|unexpected|unrecogni[sz]ed|disabled"
    r"|\b(takes?|accepts?|supports?) (no|only)\b|only\s+(text|support|accept)|cannot|unable"
    r"|no (endpoints?|support)\b|extra (input|field)"
)
"""Pattern of words for a refusal; a message that only mentions a feature ("image exceeds 5 MB") refuses none."""


def _refused(thing: str) -> str:
    """Return the pattern of a sentence which says that the service does not take a thing."""
    return rf"({thing})[^;\n]{{0,80}}({REFUSING})|(\bno(?= ({thing})s?\W*$)|{REFUSING})[^;\n]{{0,80}}({thing})"


_STRICT: Final = Rung(
    "no-strict", r"\bstrict\b", rewrites.not_strict, "the service does not hold answers to strict schemas"
)
_PARALLEL: Final = Rung(
    "no-parallel-tool-calls", "parallel_?tool_?calls", rewrites.without(*rewrites.PARALLEL_SPELLINGS),
    "the service does not know whether calls may be parallel",
)  # fmt: skip

_TOOLS: Final = r"(tools|tool[ _](use|calls|calling)|function[ _](calls|calling))"
_NOT_TAKEN: Final = (
    r"(is|are)( currently| yet)? (not( yet)? (supported|enabled|allowed|available|permitted|accepted)|unsupported"
    r"|disabled|unavailable)"
)
_AFTER: Final = r"(?=\W*$|[.,;\n]| (here|yet|by|for|on|in)\b)"
_DEFINITION: Final = "schema|parameters|definition|declaration"
NO_TOOLS: Final = (
    rf"^(?!(.|\n)*({_DEFINITION}))(.|\n)*?("
    rf"(?<![-\w.])(?<!parallel )(?<!combining ){_TOOLS}\b\W? {_NOT_TAKEN}{_AFTER}"
    rf"|(does|do)(n't| not) (support|accept|take|allow)( the)? {_TOOLS}{_AFTER}"
    rf"|(takes|accepts|supports) no {_TOOLS}{_AFTER}"
    rf"|(^|: |\n)\W?tools\W?: (extra|unknown|unexpected|unsupported)"
    rf"|(unsupported|unknown|unexpected)( \w+)?: \W?tools\W*$"
    rf"|no endpoints? (found )?that support {_TOOLS})"
)
"""Matches words about tools as such; those about some of them ("tools of the type computer"), about results or about
one tool's schema do not match."""

WITHOUT_TOOLS: Final = "no-tools"
"""Name of the rung that leaves out all tools."""

LEFT_OUT: Final = "without-tool "
"""Prefix of a rung that leaves out one tool; the tool's name follows."""

TOOLS_LEFT_OUT_MAX: Final = 8
"""Maximum tools left out one by one in a run, because each costs a request."""

_TOOL_PLACE: Final = re.compile(r"(?<!\w)tools[.\[/](\d+)\]?([./]function_?declarations[.\[/](\d+))?", re.IGNORECASE)
_PLAIN: Final = r"content.{0,40}(string|str\b)|(list|array).{0,40}content"

LADDERS: Final[dict[str, tuple[Rung, ...]]] = {
    "openai_compatible": (
        Rung("no-stream-options", "stream_options|include_usage", rewrites.without("stream_options"),
             "the service does not take stream_options; it may not say its usage"),
        _PARALLEL,
        _STRICT,
        Rung("flat-text", f"multi-?part|{_PLAIN}", rewrites.flat_texts,
             "the service takes texts only as plain strings"),
        Rung("no-images", f"{_refused('multi-?part|multi-?modal|image|vision|media')}|{_PLAIN}",
             rewrites.flat_messages, "the service takes only plain text; other parts were left out", is_cut=True),
    ),
    "openai_responses": (
        Rung("stream-instead", "stream", rewrites.stream_instead,
             "the service answers only as a stream"),
        _PARALLEL,
        _STRICT,
    ),
    "anthropic": (
        Rung("as-blocks", r"invalid type: string|valid (list|array)|expected.{0,20}(sequence|list|array)",
             rewrites.as_blocks, "the service takes texts only as lists of blocks"),
        _STRICT,
        Rung("no-tool-choice", "tool_?choice", rewrites.without("tool_choice"),
             "the service does not take tool_choice; the model calls what it likes"),
        Rung("no-images", _refused("image|media|vision|document"), rewrites.claude_no_media,
             "the service takes no images or documents; they were left out", is_cut=True),
        Rung(WITHOUT_TOOLS, NO_TOOLS, rewrites.claude_no_tools,
             "the service takes no tools; earlier calls and results are said in words", is_cut=True),
    ),
    "gemini_ai_studio": (
        Rung("no-defaults", r"generation_?config|safety_?settings|thinking|max_?output_?tokens",
             rewrites.gemini_no_defaults, "the service does not take these settings"),
        Rung("no-images", _refused(r"image|media|mime|inline_?data|file_?data"), rewrites.gemini_no_media,
             "the service takes no media; it was left out", is_cut=True),
        Rung(WITHOUT_TOOLS, NO_TOOLS, rewrites.gemini_no_tools,
             "the service takes no tools; earlier calls and results are said in words", is_cut=True),
    ),
}  # fmt: skip
"""Protocol → what is left out, in this order. A refusal whose words fit a rung takes that one first; one without such
words takes the first that is no cut."""


class Preparation(msgspec.Struct, frozen=True):
    """A change to a request before its first attempt; with a code and a reason it is reported as a loss."""

    change: Change
    code: str = ""
    reason: str = ""


_ONE_CALL: Final = Preparation(
    rewrites.one_call_at_a_time, "option_value", "one call a turn, as parallel calls were not asked for"
)
PREPARATIONS: Final[dict[str, tuple[Preparation, ...]]] = {
    "openai_compatible": (Preparation(rewrites.ask_usage), _ONE_CALL),
    "openai_responses": (
        _ONE_CALL,
        Preparation(
            rewrites.strict_tools, "tool_field", "a tool's objects are closed, as the service's strict schemas ask"
        ),
        Preparation(rewrites.set_detail),
    ),
    "anthropic": (
        Preparation(rewrites.set_limit, "required", f"a request has a limit here: {rewrites.ANSWER_TOKENS}"),
    ),
    "gemini_ai_studio": (Preparation(lambda request: gemini.prove_calls(request)[0], "signature", gemini.NO_PROOF),),
}


class LadderStep(msgspec.Struct, frozen=True, kw_only=True):
    """The next attempt."""

    request: Request
    rung: str | None = None
    """The rung that was taken; None repeats the same request."""
    wait_s: float = 0.0
    losses: tuple[Loss, ...] = ()


def prepare(protocol: str, request: Request, *, parallel: bool) -> tuple[Request, tuple[Loss, ...]]:
    """Write a request as the protocol's services like it best.

    Args:
        parallel: leave it to the model whether one turn holds several calls.
    """
    losses: tuple[Loss, ...] = ()
    for one in PREPARATIONS[protocol]:
        if one is _ONE_CALL and parallel:
            continue
        before, request = request, one.change(request)
        if one.reason:
            losses += _losses(protocol, before, request, one.code, one.reason, "synthesised")
    return request, losses


def climb(protocol: str, request: Request, taken: tuple[str, ...]) -> Request:
    """Return the request, changed by the rungs that earlier requests needed."""
    left_out = [_without_tool(name.removeprefix(LEFT_OUT)) for name in taken if name.startswith(LEFT_OUT)]
    for rung in (*LADDERS[protocol], *left_out):
        if rung.name in taken:
            request = rung.change(request)
    return request


def next_step(
    protocol: str, request: Request, failure: UpstreamFailure, taken: tuple[str, ...] = (), *,
    tries: int = 1, tries_max: int = 3, backoff_ms: int = 500,
) -> LadderStep | None:  # fmt: skip
    """Choose the attempt after a failure before any output was passed on; None if nothing is left to try.

    Args:
        request: the request that failed.
        taken: rungs that were taken before.
        tries: attempts at this same request so far, this one included.
    """
    for rung in _rungs(protocol, request, failure, taken):
        changed = rung.change(request)
        kind: LossKind = "dropped" if rung.is_cut else "degraded"
        if losses := _losses(protocol, request, changed, "fallback", rung.reason, kind):
            return LadderStep(request=changed, rung=rung.name, losses=losses)
    if not failure.may_pass or tries >= tries_max:
        return None
    wait_s = failure.retry_after_s
    if wait_s is None:
        wait_s = min(backoff_ms / 1000 * 2 ** (tries - 1), WAIT_S_MAX)
    return LadderStep(request=request, wait_s=wait_s) if wait_s <= WAIT_S_MAX else None


def _rungs(protocol: str, request: Request, failure: UpstreamFailure, taken: tuple[str, ...]) -> list[Rung]:
    """Return the rungs to try after a refusal, the best first."""
    is_refusal = failure.code == INVALID
    # Gateways answer 500 to requests that they cannot pass on; only the words distinguish it from a passing fault.
    if not is_refusal and (failure.code != "backend_unavailable" or failure.status is None):
        return []
    left = [rung for rung in LADDERS[protocol] if rung.name not in taken]
    named = [rung for rung in left if re.search(rung.words, failure.message, re.IGNORECASE)]
    if (tool := blamed_tool(request, failure)) is not None:
        # A refusal about one tool must not cost the model another ability.
        named = [rung for rung in named if not rung.is_cut] + [rung for rung in left if rung is _STRICT]
        is_last = len({name for _, name in offered_tools(request)}) == 1
        if not is_last and sum(name.startswith(LEFT_OUT) for name in taken) < TOOLS_LEFT_OUT_MAX:
            named.append(_without_tool(tool))
    return [*named, *(rung for rung in left if is_refusal and not rung.is_cut)]


def _without_tool(name: str) -> Rung:
    reason = f"the service refuses the tool {name!r}; it was not offered to the model"
    return Rung(f"{LEFT_OUT}{name}", "", rewrites.without_tool(name), reason, is_cut=True)


def blamed_tool(request: Request, failure: UpstreamFailure) -> str | None:
    """Return the name of the offered tool that a refusal is about, None if it is about none or about several.

    A service names a tool by its place in the request, or by its name beside a word for its definition.
    """
    offered = offered_tools(request)
    if found := _TOOL_PLACE.search(f"{failure.place} {failure.message}"):
        places = tuple(int(number) for number in (found[1], found[3]) if number is not None)
        return next((name for place, name in offered if place == places), None)
    if not re.search(_DEFINITION, failure.message, re.IGNORECASE):
        return None
    blamed = {name for _, name in offered if re.search(_named(name), failure.message)}
    return blamed.pop() if len(blamed) == 1 else None


def _named(name: str) -> str:
    """Return the pattern of a tool's name in quotation marks, or after the word for what it is."""
    word = re.escape(name)
    return rf"['\"`‘“]{word}['\"`’”]|\b([Ff]unction|[Tt]ool) {word}(?![-\w])"


def _losses(protocol: str, before: Request, after: Request, code: str, reason: str, kind: LossKind) -> tuple[Loss, ...]:
    """Return one loss for each member of a request that differs."""
    name = PROTOCOLS[protocol].dialect
    return tuple(
        Loss(path=f"/{member}", dialect=name, target=name, kind=kind, code=code, reason=reason)
        for member in {**before, **after}
        if (member in before) != (member in after) or before.get(member) != after.get(member)
    )
