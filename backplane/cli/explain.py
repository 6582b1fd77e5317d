"""`explain`: what an error code means, and what to do about it."""

from __future__ import annotations

from typing import Final

from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, did_you_mean, wrong_words
from backplane.errors import CODES, OWN_CODES

HELP = "Explain an error code, or list all codes."
EXAMPLE = "backplane explain backend_crashed"


def options(p: Parser) -> None:
    add.value(p, "code", metavar="CODE", nargs="?", help="code, as an error's first line names it")


def run(args: Args) -> int:
    known = CODES | OWN_CODES
    if args.code is None:
        width = max(map(len, known))
        streams.write("".join(f"{code:<{width}}  {facts.meaning}\n" for code, facts in known.items()))
        return 0
    code = args.code.lower()
    facts = known.get(code)
    if facts is None:
        hint = did_you_mean(code, known) + "`backplane explain` lists them"
        raise wrong_words(f"no error code {args.code!r}", hint)
    streams.write(
        f"{code}\n  {facts.meaning}{'' if facts.ours else ' Only peers send it.'}\n"
        f"  next: {REMEDIES[code]}\n"
        f"  fault: {_FAULTS[facts.fault]}\n"
        f"  a retry may help: {'yes' if facts.retryable else 'no'}\n  exit code: {facts.exit_code}\n"
        f"  code of the provider interface: {facts.provider_code}\n"
    )
    return 0


_FAULTS: Final = {
    "caller": "the order or the configuration",
    "control": "this control plane",
    "host": "the host program",
    "upstream": "the model's service",
    "machine": "this machine",
}

REMEDIES: Final[dict[str, str]] = {
    "protocol_invalid_envelope": "check the host: backplane conform -- COMMAND",
    "protocol_handshake_failed": "check its command: backplane doctor; or raise hello_s",
    "protocol_missing_ref_id": "check the host: backplane conform -- COMMAND",
    "protocol_unexpected_message": "check the host: backplane conform -- COMMAND",
    "protocol_version_mismatch": "use a host that speaks abp/v0.1",
    "mapping_unsupported_capability": "take the feature out of the request, or choose another target dialect",
    "mapping_dialect_mismatch": "name the dialect of the JSON: translate --from DIALECT",
    "mapping_lossy_conversion": "allow the loss, or see what is lost: translate prints it",
    "mapping_unmappable_tool": "take the tool out of the request, or choose another target dialect",
    "backend_not_found": "list the backends: backplane backends",
    "backend_unavailable": "see what it lacks: backplane doctor; or try again later",
    "backend_timeout": "see what it waited for: backplane why RUN; or raise idle_s or run_s",
    "backend_rate_limited": "wait and try again, or choose another backend",
    "backend_auth_failed": "log in with the vendor's program, or set its key: backplane doctor",
    "backend_model_not_found": "name another model, --model M, or correct base_url: backplane backends, doctor",
    "backend_crashed": "read its last output: backplane why RUN; then try again",
    "execution_tool_failed": "see which tool and why: backplane why RUN",
    "execution_workspace_error": "see which file and why: the error names it; free space or rights may be missing",
    "execution_permission_denied": "give this user the rights, or open the path: contracts/isolation.md",
    "contract_version_mismatch": "use a host of the same major version",
    "contract_schema_violation": "compare it with its schema: backplane validate FILE, backplane schema NAME",
    "contract_invalid_receipt": "check the host: backplane conform -- COMMAND",
    "capability_unsupported": "choose a backend that has it: backplane backends; or do not require it",
    "capability_emulation_failed": "choose a backend with the native capability: backplane backends",
    "policy_denied": "see which rule or limit: backplane why RUN; change the policy or the limit if it is wrong",
    "policy_invalid": "check the file: backplane validate FILE",
    "workspace_init_failed": "name an existing folder: --root, or workspace.root of the order",
    "workspace_staging_failed": "leave out what cannot be copied: --exclude GLOB; or free some space",
    "ir_lowering_failed": "report it with the request: it is a fault of this program",
    "ir_invalid": "correct the conversation at the place that the error names",
    "receipt_hash_mismatch": "do not trust it; get the receipt from the machine that sealed it",
    "receipt_chain_broken": "see which row was changed: backplane receipts verify",
    "dialect_unknown": "see the names of the dialects: backplane translate --help",
    "dialect_mapping_failed": "correct the JSON at the place that the error names, or name its dialect: --from",
    "config_invalid": "correct the file or setting that the error names: backplane validate FILE",
    "rate_limit_exceeded": "wait for other runs to end, or raise runs_max",
    "circuit_breaker_open": "wait until the pause of the backend ends, or choose another: backplane run --dry-run -v",
    "stream_closed": "try again; if it ends again: backplane why RUN",
    "receipt_store_failed": "free some space, and look at the state folder: backplane doctor",
    "validation_failed": "compare the result with the JSON Schema of --schema FILE",
    "sidecar_spawn_failed": "correct the command, or install the program: backplane doctor",
    "backend_content_filtered": "say the task in other words, or choose another model",
    "backend_context_length": "shorten the conversation, or choose a model with a longer context",
    "run_cancelled": "see how far it came: backplane why RUN",
    "usage_invalid": "see what the command takes: backplane help COMMAND",
    "internal": "report it with its traceback: BACKPLANE_DEBUG=1 prints it",
}
"""The next step for each error code; an error's own hint is more exact."""
