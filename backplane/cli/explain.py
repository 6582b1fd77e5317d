"""`explain`: what an error code means, and what to do about it."""

from __future__ import annotations

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, did_you_mean, wrong_words
from backplane.errors import CODES, OWN_CODES, STEPS, provider_code

HELP = "Explain an error code, or list all codes."
EXAMPLE = "backplane explain backend_crashed"


def options(p: Parser) -> None:
    add.value(p, "code", metavar="CODE", nargs="?", help="error code, which is the first word of an error message")


def run(args: Args) -> int:
    known = CODES | OWN_CODES
    if args.code is None:
        width = max(map(len, known))
        streams.write("".join(f"{code:<{width}}  {facts.meaning}\n" for code, facts in known.items()))
        return 0
    code = args.code.lower()
    if code not in known:
        raise wrong_words(f"no error code {args.code!r}", did_you_mean(code, known) + "`backplane explain` lists them")
    facts = known[code]
    streams.write(
        f"{code}\n  {facts.meaning}{'' if facts.ours else ' Only peers send it.'}\n"
        f"  next: {STEPS[code]}\n"
        f"  fault: {facts.fault}\n"
        f"  a retry may help: {'yes' if facts.retryable else 'no'}\n  exit code: {facts.exit_code}\n"
        f"  code of the provider interface: {provider_code(code)}\n"
    )
    return 0
