"""Decides what an agent may do.

For a profile and an action it returns allow, deny or ask, with the rule that decided. It enforces nothing and reads no
file: callers resolve links first, and report afterwards which layer enforced each rule.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.events import AgentEvent, CommandExecuted, FileChanged, ToolCall
from backplane.contract.unknown import nearest_name
from backplane.contract.work import PolicyProfile, WorkspaceSpec
from backplane.errors import ConfigError, PolicyError
from backplane.policy.globs import Globs, compile_globs
from backplane.policy.paths import (
    SECOND_SPELLINGS,
    SHELLS,
    SPELLINGS,
    TOOLS,
    ToolShape,
    comparable_glob,
    locate,
    touched,
)
from backplane.policy.urls import NetworkRule, network_rule, network_rules, read_target

POLICY_BYTES_MAX: Final = 1 << 20
"""Maximum size of a policy file, a thousand times the usual one; a larger file is `policy_invalid`."""

TOOL_NAME_CHARS_MAX: Final = 256
"""Maximum length of a tool name; models accept 64 to 128. A call with a longer one is denied as malformed."""

AUDITED: Final[frozenset[type[Any]]] = frozenset({ToolCall, FileChanged, CommandExecuted})
"""Event types that `Policy.audit` can object to."""

_KNOWN_TOOLS_MAX: Final = 256
"""Maximum tool names in the cache of verdicts; agents have some dozens of tools."""

_GIT: Final = ("**/.git/hooks/**", "**/.git/config")
_KEYS: Final = (
    *("**/.env*", "**/id_rsa", "**/id_dsa", "**/id_ecdsa", "**/id_ed25519"),
    *("**/*.pem", "**/*.key", "**/*.p12", "**/*.pfx", "**/*.ppk"),
)

TOOL_LISTS: Final = ("allowed_tools", "disallowed_tools", "require_approval_for")

PROFILES: Final[Mapping[str, PolicyProfile]] = MappingProxyType(
    {
        "default": PolicyProfile(deny_write=_GIT),
        "strict": PolicyProfile(deny_read=_KEYS, deny_write=_GIT, deny_network=("*",)),
        "ci": PolicyProfile(disallowed_tools=("ask_user",), deny_read=_KEYS, deny_write=_GIT, deny_network=("*",)),
    }
)
"""The shipped profiles, which `contracts/examples/policy/` has as files. `default` leaves the agent's own repository
usable; `ci` is `strict` for runs without a user to ask."""

Allowed = Literal["allow", "deny", "ask"]
Layer = Literal["os", "host", "vendor", "audit"]


class Rule(msgspec.Struct, frozen=True):
    """The rule that decided: the name of a profile's list, and its pattern.

    Two rules are built in: `workspace` denies writing outside of it, and `malformed` denies a call whose input cannot
    be read. `pattern` is None for them, and if no pattern of an allow list matched.
    """

    name: str
    pattern: str | None = None


class Ruling(msgspec.Struct, frozen=True):
    """The decision on one action."""

    allowed: Allowed
    reason: str
    """One line for the user."""
    rule: Rule | None = None
    """None if no rule matched."""


_PATTERN: Final = re.compile(r"[^(]*[*?\[\]{}\\]")
"""Matches a tool pattern with a glob in the tool's name; a glob only in parentheses is a rule on arguments."""
_MEANT: Final = dict.fromkeys(("shell", "sh", "terminal", "exec", "command", "run_command", "cmd"), "bash")
"""Common tool names that have no similar known name → the known name to suggest."""

_NO_ALIASES: Final[Mapping[str, str]] = MappingProxyType({})

ALLOWED: Final = Ruling("allow", "no rule forbids it")
_OUTSIDE: Final = Rule("workspace")
MALFORMED: Final = Rule("malformed")
"""The rule of a ruling that denies a call because it cannot be read well enough to decide."""
_UNKNOWN_TOOL: Final = ToolShape()
_COMMAND_NAMES: Final = ("bash", SECOND_SPELLINGS["bash"])


class _KnownTool(msgspec.Struct, frozen=True):
    """The facts about a tool that follow from its names alone."""

    names: tuple[str, ...]
    shape: ToolShape
    verdict: Ruling
    has_places: bool
    """True if the decision also needs the paths and URLs of the input."""


def tool_names(name: str, aliases: Mapping[str, str] = _NO_ALIASES) -> tuple[str, ...]:
    """Return all names of a tool: its own, the neutral one, and the neutral one's second spelling.

    Args:
        aliases: a dialect's table, vendor name → neutral name.
    """
    neutral = aliases.get(name) or SPELLINGS.get(name) or ("bash" if name in SHELLS else name)
    second = SECOND_SPELLINGS.get(neutral)
    if second is None:
        return (name,) if neutral == name else (name, neutral)
    return tuple(dict.fromkeys((name, neutral, second)))


def tool_shape(names: tuple[str, ...]) -> ToolShape:
    """Return the shape of a tool with these names, from `TOOLS`; an empty shape for an unknown tool."""
    # Reversed, so that the neutral name comes first: the vendor's own may be another tool's name in the table.
    return next((TOOLS[name] for name in reversed(names) if name in TOOLS), _UNKNOWN_TOOL)


class Policy:
    """Decides by one profile. Make it with `compile_policy`."""

    __slots__ = (
        "_connects", "_hosts_allowed", "_hosts_denied", "_reads_denied", "_tool", "_tools_allowed", "_tools_asked",
        "_tools_denied", "_writes_denied", "profile",
    )  # fmt: skip

    def __init__(self, profile: PolicyProfile) -> None:
        self.profile = profile
        self._tools_allowed = _globs(profile, "allowed_tools")
        self._tools_denied = _globs(profile, "disallowed_tools")
        self._tools_asked = _globs(profile, "require_approval_for")
        self._reads_denied = _globs(profile, "deny_read")
        self._writes_denied = _globs(profile, "deny_write")
        self._hosts_allowed = _network(profile, "allow_network")
        self._hosts_denied = _network(profile, "deny_network")
        self._connects = bool(self._hosts_allowed or self._hosts_denied)
        # A run has many calls of the same few tools.
        self._tool = functools.lru_cache(_KNOWN_TOOLS_MAX)(self._known_tool)

    def decide_read(self, path: str, root: str | None = None, cwd: str | None = None) -> Ruling:
        """Allow or deny to read a file or folder.

        Args:
            root: absolute folder of the workspace, links resolved. A path outside of it is matched as an absolute path
                against the same patterns.
            cwd: folder of relative paths; None is the root.
        """
        return self._listed(path, root, cwd, "deny_read", self._reads_denied, "reading")

    def decide_write(self, path: str, root: str | None = None, cwd: str | None = None) -> Ruling:
        """Allow or deny to create, change or delete a file; outside the root that is always denied.

        Args:
            root, cwd: as in `decide_read`.
        """
        place = locate(path, root, cwd)
        if place is not None and place.outside:
            return Ruling("deny", f"writing {_shown(path)} is outside the workspace", _OUTSIDE)
        return self._listed(path, root, cwd, "deny_write", self._writes_denied, "writing")

    def decide_connection(self, target: str | None) -> Ruling:
        """Allow or deny a connection.

        Args:
            target: a URL or `host[:port]`; None if the tool chooses the target itself.
        """
        if not self._connects:
            return ALLOWED
        if target is None:
            return self._connect_anywhere()

        place, shown = read_target(target), _shown(_UNTOLD.sub("", target))
        if place is None:
            return Ruling("deny", f"{shown} does not say clearly where it leads", MALFORMED)
        denied = next((rule for rule in self._hosts_denied if rule.matches(place, unsaid=True)), None)
        if denied is not None:
            reason = f"connecting to {shown} is forbidden by {denied.pattern!r}"
            return Ruling("deny", reason, Rule("deny_network", denied.pattern))
        allowed = next((rule for rule in self._hosts_allowed if rule.matches(place, unsaid=False)), None)
        if allowed is not None:
            return Ruling("allow", f"{shown} is allowed by {allowed.pattern!r}", Rule("allow_network", allowed.pattern))
        if self._hosts_allowed:
            return Ruling("deny", f"{shown} is not among the allowed hosts", Rule("allow_network"))
        return ALLOWED

    def decide_tool_call(
        self,
        name: str,
        input: Json,
        *,
        root: str | None = None,
        cwd: str | None = None,
        aliases: Mapping[str, str] = _NO_ALIASES,
    ) -> Ruling:
        """Decide a tool call by all its names and by every path and URL in its input.

        Args:
            name: the vendor's name of the tool.
            aliases: the dialect's table, vendor name → neutral name.
        """
        # The cut keeps one character too many, so that a longer name is still denied as malformed.
        known = self._tool(tool_names(name[: TOOL_NAME_CHARS_MAX + 1], aliases))
        if not known.has_places:
            return known.verdict
        return self._places(known, input, root, cwd)

    def audit(self, event: AgentEvent, *, root: str | None = None) -> Ruling | None:
        """Return the ruling on an event of a finished action; None if the policy does not object.

        It may be `ask`: only the caller knows whether the user had approved the action.
        """
        kind = type(event)
        if kind not in AUDITED:
            return None
        if isinstance(event, ToolCall):
            decision = self.decide_tool_call(event.tool_name, event.input, root=root)
        elif isinstance(event, FileChanged):
            decision = self.decide_write(event.path, root)
        else:
            decision = self._tool(_COMMAND_NAMES).verdict
        return None if decision.allowed == "allow" else decision

    def rules(self) -> Iterator[Rule]:
        """Yield every rule, list by list in the profile's order, then the built-in one."""
        for name in PolicyProfile.__struct_fields__:
            for pattern in getattr(self.profile, name):
                yield Rule(name, pattern)
        yield _OUTSIDE

    def _known_tool(self, names: tuple[str, ...]) -> _KnownTool:
        verdict = self._tool_verdict(names)
        shape = tool_shape(names)
        return _KnownTool(names, shape, verdict, verdict.allowed != "deny" and self._has_places(shape))

    def _places(self, tool: _KnownTool, input: Json, root: str | None, cwd: str | None) -> Ruling:
        shape, found, name = tool.shape, touched(tool.shape, input), tool.names[0]
        if found.unreadable is not None:
            return Ruling("deny", f"tool '{name}': {found.unreadable}", MALFORMED)
        if shape.names_place and not found.paths and not found.urls:
            return Ruling("deny", f"tool '{name}' names no place that could be checked", MALFORMED)
        targets: Sequence[str | None] = found.urls or ([None] if shape.connects and not shape.names_place else [])
        rulings = itertools.chain(
            (ruling for path in found.paths for ruling in self._path_rulings(shape, path, root, cwd)),
            map(self.decide_connection, targets),
        )
        return next((ruling for ruling in rulings if ruling.allowed == "deny"), tool.verdict)

    def _has_places(self, shape: ToolShape) -> bool:
        if shape is _UNKNOWN_TOOL:
            return bool(self._reads_denied or self._writes_denied or self._connects)
        # A fetch of `file:` is a read.
        reads = (shape.reads or shape.connects) and self._reads_denied is not None
        return shape.writes or reads or (shape.connects and self._connects)

    def _path_rulings(self, shape: ToolShape, path: str, root: str | None, cwd: str | None) -> Iterator[Ruling]:
        unknown = shape is _UNKNOWN_TOOL
        if shape.reads or shape.connects or unknown:
            verb = "using" if unknown else "writing" if shape.writes else "reading"
            yield self._listed(path, root, cwd, "deny_read", self._reads_denied, verb)
        if shape.writes:
            yield self.decide_write(path, root, cwd)
        elif unknown:
            # An unknown tool may read or write, so both lists apply; being outside the workspace is no reason to deny.
            yield self._listed(path, root, cwd, "deny_write", self._writes_denied, "using")

    def _tool_verdict(self, names: tuple[str, ...]) -> Ruling:
        if not all(0 < len(name) <= TOOL_NAME_CHARS_MAX for name in names) or not names:
            return Ruling("deny", f"a tool's name has 1 to {TOOL_NAME_CHARS_MAX} characters", MALFORMED)
        shown = names[0]
        pattern = _first(self._tools_denied, names)
        if pattern is not None:
            return Ruling("deny", f"tool '{shown}' is forbidden by {pattern!r}", Rule("disallowed_tools", pattern))
        permitted = _first(self._tools_allowed, names)
        if permitted is None and self._tools_allowed is not None:
            return Ruling("deny", f"tool '{shown}' is not among the allowed tools", Rule("allowed_tools"))
        pattern = _first(self._tools_asked, names)
        if pattern is not None:
            return Ruling("ask", f"tool '{shown}' needs approval by {pattern!r}", Rule("require_approval_for", pattern))
        if permitted is not None:
            return Ruling("allow", f"tool '{shown}' is allowed by {permitted!r}", Rule("allowed_tools", permitted))
        return ALLOWED

    def _listed(
        self, path: str, root: str | None, cwd: str | None, name: str, globs: Globs | None, verb: str
    ) -> Ruling:
        place = locate(path, root, cwd)
        if place is None:
            return Ruling("deny", f"{_shown(path)} names no file", MALFORMED)
        pattern = globs.matches(place.path) if globs is not None else None
        if pattern is None:
            return ALLOWED
        return Ruling("deny", f"{verb} {_shown(place.path)} is forbidden by {pattern!r}", Rule(name, pattern))

    def _connect_anywhere(self) -> Ruling:
        everything = next((rule for rule in self._hosts_denied if rule.everything), None)
        if everything is not None:
            rule = Rule("deny_network", everything.pattern)
            return Ruling("deny", f"the network is forbidden by {everything.pattern!r}", rule)
        if self._hosts_allowed and not any(rule.everything for rule in self._hosts_allowed):
            return Ruling("deny", "only listed hosts are allowed, and this tool names none", Rule("allow_network"))
        return ALLOWED


def compile_policy(profile: PolicyProfile) -> Policy:
    """Return the policy of a profile; an empty profile is replaced by the shipped `default`.

    Raises:
        PolicyError: `policy_invalid`, a pattern is invalid or too expensive to match.
    """
    return Policy(with_defaults(profile))


def with_defaults(profile: PolicyProfile) -> PolicyProfile:
    """Return the shipped `default` for an empty profile; return any other unchanged."""
    return PROFILES["default"] if profile == PolicyProfile() else profile


def tightened(base: PolicyProfile, later: PolicyProfile, *, leave_out: bool = False) -> PolicyProfile:
    """Return a policy with the rules of a later one, which cannot allow more.

    Args:
        leave_out: True to drop the later rules that allow more, unless their list would become empty; False to refuse
            them.

    Raises:
        ConfigError: `config_invalid`, the later policy allows more.
    """
    merged: dict[str, tuple[str, ...]] = {}
    base = with_defaults(base)  # An empty policy counts as the default one.
    for name in PolicyProfile.__struct_fields__:
        ours, theirs = getattr(base, name), getattr(later, name)
        if not name.startswith("allow"):
            merged[name] = (*ours, *(rule for rule in theirs if rule not in ours))
            continue
        both = tuple(rule for rule in theirs if not ours or rule in ours)
        if both != theirs and not (leave_out and both):  # An empty list would allow everything.
            more = next(rule for rule in theirs if rule not in both)
            fact = f"the policy has {more!r} in {name}, and the session's has not"
            hint = "a later policy only tightens the session's; --policy replaces the configured one"
            raise ConfigError("config_invalid", fact, hint=hint)
        merged[name] = both or ours
    return PolicyProfile(**merged)


def has_rules_of(profile: PolicyProfile, shipped: str) -> bool:
    """Return True if a profile has every rule of a shipped one."""
    names = PolicyProfile.__struct_fields__
    return all(set(getattr(PROFILES[shipped], name)).issubset(getattr(profile, name)) for name in names)


def unknown_tools(profile: PolicyProfile) -> dict[str, str | None]:
    """Return the unknown tool names of a policy, each with the most similar known name; None if there is none."""
    return unknown_names(_named_tools(profile))


def unknown_names(tools: Iterable[str]) -> dict[str, str | None]:
    """Return the unknown ones of these tool names, each with the most similar known name; None if there is none.

    Patterns and tools of MCP servers are skipped: the tools that they will match are not known before the run.
    """
    # A name in a shipped profile is no typing error, though only some agents have such a tool.
    known = (*TOOLS, *SPELLINGS, *(name for shipped in PROFILES.values() for name in _named_tools(shipped)))
    plain = {name for name in tools if not _PATTERN.match(name) and not name.startswith("mcp__")}
    meant = {name: name.partition("(")[0] for name in sorted(plain.difference(known))}
    return {name: _MEANT.get(tool.lower()) or nearest_name(tool, known) for name, tool in meant.items()}


def unmatched_paths(profile: PolicyProfile, workspace: WorkspaceSpec) -> dict[str, str | None]:
    """Return the globs on paths that are not in the form of compared paths, each with the glob to suggest.

    Such a rule matches nothing, or not the copy in which the agent works, so the user must not rely on it.
    """
    root = workspace.root
    found = {glob: comparable_glob(glob, root) for glob in (*profile.deny_read, *profile.deny_write)}
    found |= {glob: comparable_glob(glob, root, outside=False) for glob in (*workspace.include, *workspace.exclude)}
    return {glob: near for glob, near in found.items() if glob != near}


def _named_tools(profile: PolicyProfile) -> tuple[str, ...]:
    return tuple(name for names in TOOL_LISTS for name in getattr(profile, names))


def _globs(profile: PolicyProfile, name: str) -> Globs | None:
    patterns: tuple[str, ...] = getattr(profile, name)
    return _named(name, _compiled, patterns) if patterns else None


@functools.lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> Globs:
    """Compile globs once for all runs with the same rules."""
    return compile_globs(patterns)


def _network(profile: PolicyProfile, name: str) -> tuple[NetworkRule, ...]:
    patterns: tuple[str, ...] = getattr(profile, name)
    if not patterns:
        return ()

    return tuple(_named(name, network_rules, patterns))


def _named(name: str, make: Callable[[Any], Any], patterns: object) -> Any:
    try:
        return make(patterns)
    except PolicyError as error:
        raise PolicyError(error.code, f"{name}: {error.message}", hint=error.hint, evidence=error.evidence) from None


def _first(globs: Globs | None, names: tuple[str, ...]) -> str | None:
    if globs is None:
        return None
    return next((pattern for name in names if (pattern := globs.matches(name)) is not None), None)


_SHOWN_CHARS_MAX: Final = 120


_UNTOLD: Final = re.compile(r"(?:^|(?<=//))[^/?#]*@|[?#].*", re.DOTALL)
"""Parts of a target that are left out of reasons, as no rule uses them: credentials, query, fragment."""


def _shown(text: str) -> str:
    """Return a text of the agent for a one-line message: quoted, escaped and cut."""
    return repr(text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "…")


def parse_policy(data: bytes, source: str) -> PolicyProfile:
    """Read a policy file: a JSON object with the profile's lists, each of them optional.

    Args:
        source: name of the file, for the error message.

    Raises:
        PolicyError: `policy_invalid` with the JSON pointer: no strict JSON, a duplicate or unknown name, a wrong type,
            or an invalid pattern.
    """
    if len(data) > POLICY_BYTES_MAX:
        raise _invalid(source, "", f"over {POLICY_BYTES_MAX} bytes")

    try:
        value = canonical.decode(data)
        twice = canonical.duplicate_key(data, value)
    except (ValueError, RecursionError) as error:
        raise _invalid(source, "", f"not strict JSON ({error})") from error
    if not isinstance(value, dict):
        raise _invalid(source, "", "not an object")
    if twice is not None:
        raise _invalid(source, _pointer(twice), "stands twice")
    known = PolicyProfile.__struct_fields__
    for name in value.keys() - set(known):
        near = nearest_name(name, known)
        meant = f"{near!r} may be meant" if near else f"known are {', '.join(known)}"
        raise _invalid(source, _pointer(name), f"no such member; {meant}")
    return PolicyProfile(**{name: _patterns(items, source, _pointer(name)) for name, items in value.items()})


def _pointer(name: str) -> str:
    return "/" + name.replace("~", "~0").replace("/", "~1")


def _patterns(value: Json, source: str, pointer: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _invalid(source, pointer, "not a list of texts")

    check: Callable[[str], object] = network_rule if pointer.endswith("_network") else lambda one: compile_globs([one])
    for place, item in enumerate(value):
        if not isinstance(item, str):
            raise _invalid(source, f"{pointer}/{place}", "not a text")
        try:
            check(item)
        except PolicyError as error:
            raise _invalid(source, f"{pointer}/{place}", error.message) from error
    return tuple(value)


def _invalid(source: str, pointer: str, fact: str) -> PolicyError:
    return PolicyError(
        "policy_invalid", f"{source}: {pointer or 'the whole document'}: {fact}", hint="correct the policy file"
    )
