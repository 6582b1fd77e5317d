"""All errors of the package: subclasses of `BackplaneError`, and tables of their codes.

The codes are stable strings that every peer knows; messages may change. `providers.failures` adds an error with the
codes of the provider interface.
"""

from __future__ import annotations

import errno
from typing import Any, ClassVar, Final, Literal

import msgspec

FaultOwner = Literal["caller", "control", "host", "upstream", "machine"]
"""The cause of an error: the order's author, this control plane, the child, the model's service, or the machine."""


def install_hint(extra: str) -> str:
    """Return the next step for a missing extra. On the public index, `backplane` is another project."""
    return f"install the extra {extra!r}: pip install '.[{extra}]' in the checkout, or pip install 'WHEEL[{extra}]'"


class CodeFacts(msgspec.Struct, frozen=True):
    """The meaning of one error code, for a person and for a program."""

    meaning: str
    fault: FaultOwner
    exit_code: int = 1
    """Exit code of a command that ends with this error (see `cli`)."""
    retryable: bool = False
    ours: bool = True
    """False if only peers use the code."""


CODES: Final[dict[str, CodeFacts]] = {
    "protocol_invalid_envelope": CodeFacts("A line that looked like a message is not strict JSON.", "host"),
    "protocol_handshake_failed": CodeFacts("The host sent no valid hello in time.", "host"),
    "protocol_missing_ref_id": CodeFacts("A message does not say which run it belongs to.", "host"),
    "protocol_unexpected_message": CodeFacts("A known message came from the wrong side or too early.", "host"),
    "protocol_version_mismatch": CodeFacts("The two ends speak protocols that cannot meet.", "host", 4),
    "mapping_unsupported_capability": CodeFacts("The target dialect cannot express a part of the request.", "caller"),
    "mapping_dialect_mismatch": CodeFacts("The JSON is not in the named dialect.", "caller", ours=False),
    "mapping_lossy_conversion": CodeFacts("A translation would lose something, and the caller forbade it.", "caller"),
    "mapping_unmappable_tool": CodeFacts("A tool has no counterpart in the target dialect.", "caller", ours=False),
    "backend_not_found": CodeFacts("No backend of this name is configured or shipped.", "caller", 2),
    "backend_unavailable": CodeFacts("The backend is known but cannot be used now.", "machine", retryable=True),
    "backend_timeout": CodeFacts("A deadline passed: total, idle, or unread input.", "host", retryable=True),
    "backend_rate_limited": CodeFacts("The model's service asks to slow down.", "upstream", retryable=True),
    "backend_auth_failed": CodeFacts("The model's service refuses the key.", "caller"),
    "backend_model_not_found": CodeFacts("No service at this address knows the model.", "caller"),
    "backend_crashed": CodeFacts("The host ended before it gave a result.", "host", retryable=True),
    "execution_tool_failed": CodeFacts("A tool the agent needed failed.", "host"),
    "execution_workspace_error": CodeFacts("The result could not be read from or applied to the files.", "machine"),
    "execution_permission_denied": CodeFacts("The system denied an action of the run.", "machine", ours=False),
    "contract_version_mismatch": CodeFacts("The host speaks another major version of the contract.", "host", 4),
    "contract_schema_violation": CodeFacts("A message or value has the wrong shape.", "host"),
    "contract_invalid_receipt": CodeFacts("The host's final message has no valid receipt.", "host"),
    "capability_unsupported": CodeFacts("The order requires what the backend does not have.", "caller", 4),
    "capability_emulation_failed": CodeFacts("A missing ability could not be supplied.", "control", ours=False),
    "policy_denied": CodeFacts("The policy forbids it, or a limit of the order was reached.", "caller", 4),
    "policy_invalid": CodeFacts("The policy cannot be read or is too costly, or a name is misspelt.", "caller", 4),
    "workspace_init_failed": CodeFacts("The workspace of the order does not exist or cannot be opened.", "caller"),
    "workspace_staging_failed": CodeFacts("The workspace could not be copied.", "machine"),
    "ir_lowering_failed": CodeFacts("The conversation could not be written in a dialect.", "control", ours=False),
    "ir_invalid": CodeFacts("The neutral conversation is not well formed.", "caller"),
    "receipt_hash_mismatch": CodeFacts("The receipt is not what was sealed.", "caller"),
    "receipt_chain_broken": CodeFacts("The store's chain of receipts does not hold together.", "machine"),
    "dialect_unknown": CodeFacts("No dialect of this name.", "caller", 2),
    "dialect_mapping_failed": CodeFacts("A dialect's JSON could not be read.", "caller"),
    "config_invalid": CodeFacts("Configuration, usage or an input file is wrong.", "caller", 2),
    "rate_limit_exceeded": CodeFacts("Too many runs are waiting here.", "control", retryable=True),
    "circuit_breaker_open": CodeFacts("The backend is paused after failures.", "control", retryable=True, ours=False),
    "stream_closed": CodeFacts("The other end went away.", "host", retryable=True),
    "receipt_store_failed": CodeFacts("The receipt could not be written or read.", "machine"),
    "validation_failed": CodeFacts("A result or document does not match its schema.", "host"),
    "sidecar_spawn_failed": CodeFacts("The host program could not be started.", "machine"),
    "backend_content_filtered": CodeFacts("The model's service withheld the answer.", "upstream"),
    "backend_context_length": CodeFacts("The conversation is longer than the model takes.", "caller"),
    "internal": CodeFacts("A fault of this program.", "control"),
}
"""The contract's 44 error codes: append-only, because peers with a closed set refuse any other code."""

DENIAL: Final = "refused by backplane"
"""First words of a proxy's answer to a request that a rule or a limit forbids; its readers report `policy_denied`."""

OWN_CODES: Final[dict[str, CodeFacts]] = {
    "usage_invalid": CodeFacts("A command was called with wrong words or options.", "caller", 2),
    "run_cancelled": CodeFacts("The caller ended the run.", "caller"),
}
"""Error codes that only the command line and the Python API use; no message or receipt has them."""

_PROVIDER_CODES: Final[dict[str, tuple[str, ...]]] = {
    "rate_limited": ("backend_rate_limited", "rate_limit_exceeded"),
    "authentication_failed": ("backend_auth_failed",),
    "model_unavailable": ("backend_model_not_found",),
    "context_length_exceeded": ("backend_context_length",),
    "network_error": ("backend_unavailable", "backend_timeout", "circuit_breaker_open", "stream_closed"),
    "invalid_request": (
        "mapping_unsupported_capability", "mapping_dialect_mismatch", "mapping_lossy_conversion",
        "mapping_unmappable_tool", "backend_not_found", "contract_schema_violation", "capability_unsupported",
        "policy_invalid", "ir_invalid", "dialect_unknown", "dialect_mapping_failed", "config_invalid",
        "validation_failed", "usage_invalid",
    ),
}  # fmt: skip
"""Code of the provider interface → the error codes that it stands for."""


def provider_code(code: str) -> str:
    """Return the provider interface's code for an error code: one of seven, `unknown` if none is near."""
    return next((theirs for theirs, codes in _PROVIDER_CODES.items() if code in codes), "unknown")


STEPS: Final[dict[str, str]] = {
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
    "backend_unavailable": "try the service step by step: backplane doctor --probe; or try again later",
    "backend_timeout": "see what it waited for: backplane why RUN; or raise idle_s or run_s",
    "backend_rate_limited": "wait and try again, or choose another backend",
    "backend_auth_failed": "log in with the vendor's program, or set its key: backplane doctor",
    "backend_model_not_found": "name another model, --model M, or correct base_url: backplane backends, doctor",
    "backend_crashed": "read its last output: backplane why RUN; then try again",
    "execution_tool_failed": "see which tool and why: backplane why RUN",
    "execution_workspace_error": "merge the result: backplane apply RUN --merge; or run it again on what is there now",
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
    "receipt_store_failed": "free some space: backplane prune; and look at the state folder: backplane doctor",
    "validation_failed": "compare the answer with the JSON Schema of --schema FILE",
    "sidecar_spawn_failed": "correct the command, or install the program: backplane doctor",
    "backend_content_filtered": "say the task in other words, or choose another model",
    "backend_context_length": "make the task smaller, or choose a model with a longer context",
    "run_cancelled": "see how far it came: backplane why RUN",
    "usage_invalid": "see what the command takes: backplane help COMMAND",
    "internal": "report it with the places in the source that it names",
}
"""The next step for each error code, with `RUN` for the id of the run; an error's own hint is more exact."""


IN_PYTHON: Final[dict[str, str]] = {
    "backend_not_found": "pass `backend='NAME'`, or declare it: Settings(backends={'NAME': BackendSettings(…)})",
    "backend_timeout": "pass `timeout=SECONDS`, or `limits=Limits(idle_s=…)`",
    "backend_rate_limited": "wait `run.receipt.backplane`'s `retry_after_ms`, or pass another `backend`",
    "backend_auth_failed": "give the key to the backend: BackendSettings(env={'KEY': '$KEY'})",
    "backend_model_not_found": "pass `model=…`, or correct `base_url` in BackendSettings(options=…)",
    "backend_crashed": "read `error.evidence`, or iterate over `run.receipt.trace`",
    "execution_tool_failed": "iterate over `run.receipt.trace` for the failed call",
    "execution_workspace_error": "read `run.patch`, or apply it to a fresh copy",
    "capability_unsupported": "pass another `backend='NAME'`, or leave out what it cannot do",
    "policy_denied": "read `run.receipt.findings`; pass another `policy`, or an `on_ask` that allows the call",
    "rate_limit_exceeded": "start fewer runs at once, or raise `runs_max`: Settings(limits=Limits(runs_max=…))",
}
"""The next step of a Python program for an error code; a traceback shows it below the error."""


class BackplaneError(Exception):
    """An error with a stable code.

    Args:
        code: one of `CODES` or `OWN_CODES`; anything else becomes `internal` and is kept in `foreign_code`.
        message: the fact, with the limit or the name involved.
        hint: the next step for the reader.
        evidence: the exit code, the last lines of the child's stderr, or part of a line; not yet escaped for printing.
    """

    codes: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the codes for which `from_code` makes this type; the first defined type counts."""

    def __init_subclass__(cls, codes: tuple[str, ...] = ()) -> None:
        cls.codes = codes

    def __init__(self, code: str, message: str, *, hint: str | None = None, evidence: str | None = None) -> None:
        super().__init__(code, message)
        known = code in CODES or code in OWN_CODES
        self.foreign_code = None if known else code
        self.code = code if known else "internal"
        self.message = message
        self.hint = hint
        self.evidence = evidence
        if step := IN_PYTHON.get(self.code):
            self.add_note(f"in Python: {step}")

    @property
    def facts(self) -> CodeFacts:
        return CODES.get(self.code) or OWN_CODES[self.code]

    @property
    def retryable(self) -> bool:
        return self.facts.retryable

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" + (f"; {self.hint}" if self.hint else "")


class ProtocolError(BackplaneError, codes=("protocol_",)):
    """The peer broke a rule of the protocol."""


class ContractError(BackplaneError, codes=("contract_", "validation_")):
    """A value does not follow the contract."""


class PolicyError(BackplaneError, codes=("policy_",)):
    """The policy forbids an action, or cannot be read."""


class CapabilityError(BackplaneError, codes=("capability_",)):
    """The order needs a capability that the backend does not have."""


class WorkspaceError(BackplaneError, codes=("workspace_", "execution_workspace_")):
    """Files could not be staged, compared or changed."""


class BackendError(BackplaneError, codes=("backend_", "sidecar_", "stream_", "rate_limit_", "circuit_", "execution_")):
    """A backend could not be started, or it failed."""


class StoreError(BackplaneError, codes=("receipt_",)):
    """A receipt could not be stored, or does not verify."""


class TranslationError(BackplaneError, codes=("mapping_", "dialect_", "ir_")):
    """JSON of one dialect could not be written in another."""


class ConfigError(BackplaneError, codes=("config_",)):
    """Configuration or usage is wrong."""


class RunCancelledError(BackplaneError, codes=("run_",)):
    """The caller ended the run (`run_cancelled`)."""


def from_code(code: str, message: str, *, hint: str | None = None, evidence: str | None = None) -> BackplaneError:
    """Build an error of the type for its code; an unknown code becomes `internal`."""
    kinds = BackplaneError.__subclasses__()
    kind = next((kind for kind in kinds if code.startswith(kind.codes)), BackplaneError)
    return kind(code, message, hint=hint, evidence=evidence)


FRAMES_MAX: Final = 6
"""Number of innermost frames in the error for an unexpected exception."""


def unforeseen(error: BaseException) -> BackplaneError:
    """Convert an unexpected exception to a BackplaneError; return a BackplaneError unchanged, even from a group."""
    found = leaves(error)
    known = next((leaf for leaf in found if isinstance(leaf, BackplaneError)), None)
    known = known or next(filter(None, map(_of_the_machine, found)), None)
    if known is not None:
        return known
    from traceback import walk_tb  # Such errors are rare.

    fault = found[0]
    steps = [
        f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_qualname}"
        for frame, line in walk_tb(fault.__traceback__)
    ]
    fact, where = f"{type(fault).__name__}: {fault}", "\n".join(steps[-FRAMES_MAX:])
    return BackplaneError("internal", fact, hint="please report it, with these places", evidence=where)


def _of_the_machine(error: BaseException) -> BackplaneError | None:
    """Build the error for a resource that the machine lacks; return None for any other exception."""
    if "No usable temporary directory" in str(error):
        fact = "there is no folder for temporary files that can be written"
        return BackendError("backend_unavailable", fact, hint="set TMPDIR to one")
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    if "can't start new thread" in str(error):
        number = errno.EAGAIN
    if number not in _HINTS:
        return None
    fact = f"this machine has no more to give: {errno.errorcode[number]}"
    return BackendError("backend_unavailable", fact, hint=_HINTS[number])


_HINTS: Final = {
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine; end something",
    errno.ENOMEM: "free some memory, or raise the limit (ulimit -v)",
    errno.EAGAIN: "too many processes or threads; raise the limit (ulimit -u)",
    errno.ENOSPC: "free some space",
}
"""Number of an error of the system → the next step."""


def leaves(error: BaseException) -> list[BaseException]:
    """Return all exceptions in a group; a task group wraps even a single one in a group."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def require_type(value: object, kinds: Any, what: str, hint: str) -> None:
    """Check that a value has an allowed type.

    Args:
        kinds: the allowed types, as for `isinstance`.
        what: the value's name at the beginning of the error, for example "the order".

    Raises:
        ConfigError: `config_invalid`, the value has another type.
    """
    if not isinstance(value, kinds):
        raise ConfigError("config_invalid", f"{what} is a value of the type {type(value).__name__}", hint=hint)
