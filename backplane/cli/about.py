"""`errors` and `version`: what the program says of itself."""

from __future__ import annotations

from backplane import __version__
from backplane.cli import streams
from backplane.cli.parser import Options, did_you_mean


def version(options: Options) -> int:
    from backplane.contract.version import CONTRACT_VERSION

    if options.json:
        import platform

        from backplane.cli.version import Version

        told = Version(version=__version__, contract=CONTRACT_VERSION, python=platform.python_version())
        streams.write_record(told)
    else:
        streams.write(f"backplane {__version__}  (contract {CONTRACT_VERSION})\n")
    return 0


def errors(options: Options) -> int:
    from backplane.cli.remedies import REMEDIES
    from backplane.cli.start import wrong_words
    from backplane.errors import CODES, OWN_CODES

    known = CODES | OWN_CODES
    if options.code is None:
        width = max(map(len, known))
        streams.write("".join(f"{code:<{width}}  {facts.meaning}\n" for code, facts in known.items()))
        return 0
    code = options.code.lower()
    facts = known.get(code)
    if facts is None:
        hint = did_you_mean(code, known) + "`backplane errors` lists them"
        raise wrong_words(f"no error code {options.code!r}", hint)
    streams.write(
        f"{code}\n  {facts.meaning}{'' if facts.ours else ' Only peers send it.'}\n"
        f"  next: {REMEDIES[code]}\n"
        f"  fault: {_FAULTS[facts.fault]}\n"
        f"  a retry may help: {'yes' if facts.retryable else 'no'}\n  exit code: {facts.exit_code}\n"
        f"  code of the provider interface: {facts.provider_code}\n"
    )
    return 0


_FAULTS = {
    "caller": "the order or the configuration",
    "control": "this control plane",
    "host": "the host program",
    "upstream": "the model's service",
    "machine": "this machine",
}
