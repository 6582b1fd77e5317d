"""Policy: tables of paths, tools and hosts, a naive model beside the folding of paths, and bounds on cost."""

from __future__ import annotations

import json
import posixpath
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.contract.events import AssistantDelta, CommandExecuted, FileChanged, ToolCall
from backplane.contract.receipt import BackendIdentity
from backplane.contract.work import PolicyProfile, WorkOrder
from backplane.errors import PolicyError
from backplane.policy.paths import PATH_BYTES_MAX, PLACES_MAX, ComparablePath, locate
from backplane.policy.rules import (
    AUDITED,
    POLICY_BYTES_MAX,
    PROFILES,
    Policy,
    Rule,
    Ruling,
    compile_policy,
    parse_policy,
)
from backplane.policy.urls import URL_CHARS_MAX, read_target
from backplane.receipts.enforcement import held_by
from backplane.receipts.state import RunState

ROOT = "/ws"
TS = "2025-01-15T12:00:00Z"
ACTION_S_MAX = 0.05
MARGIN = 20
"""A shared machine may be this much slower than the goal's; what the test looks for is seconds, not milliseconds."""


# Paths ----------------------------------------------------------------------------------------------------------------

# How it is written → where it is (None: names no file; "!" before it: outside of /ws).
PLACES = [
    ("a", "a"),
    ("./a", "a"),
    (".//a", "a"),
    ("a/", "a"),
    ("a//", "a"),
    ("a/.", "a"),
    ("a/./", "a"),
    ("a/b/..", "a"),
    ("a/b/../", "a"),
    ("./a/../b", "b"),
    ("a//b", "a/b"),
    ("a///b//c", "a/b/c"),
    ("a/./b/./c", "a/b/c"),
    ("a/b/c/../../d", "a/d"),
    ("...", "..."),
    ("a/...", "a/..."),
    ("..a", "..a"),
    ("a..", "a.."),
    (" a", " a"),
    ("a ", "a "),
    ("a\nb", "a\nb"),
    ("a\\b", "a\\b"),
    (".", "."),
    ("./", "."),
    ("a/..", "."),
    ("/ws", "."),
    ("/ws/", "."),
    ("/ws/a", "a"),
    ("//ws/a", "a"),
    ("/ws//a/./b", "a/b"),
    ("/../ws/a", "a"),
    ("/x/../ws/a", "a"),
    ("../ws/a", "a"),
    ("a/../../ws/b", "b"),
    ("~a", "~a"),
    ("a/~/b", "a/~/b"),
    ("..", "!/"),
    ("../", "!/"),
    ("../x", "!/x"),
    ("a/../../x", "!/x"),
    ("../../../x", "!/x"),
    ("/", "!/"),
    ("/w", "!/w"),
    ("/wsx", "!/wsx"),
    ("/ws-evil/a", "!/ws-evil/a"),
    ("/ws/../ws-evil", "!/ws-evil"),
    ("/ws/..", "!/"),
    ("/WS/a", "!/WS/a"),
    ("/etc/passwd", "!/etc/passwd"),
    ("~", "!~"),
    ("~/a", "!~/a"),
    ("~root/a", "!~root/a"),
    ("", None),
    ("\0", None),
    ("a\0b", None),
    ("x" * PATH_BYTES_MAX, "x" * PATH_BYTES_MAX),
    ("x" * (PATH_BYTES_MAX + 1), None),
    ("é" * (PATH_BYTES_MAX // 2 + 1), None),
]


@pytest.mark.parametrize(("path", "expected"), PLACES, ids=[repr(path)[:30] for path, _ in PLACES])
def test_a_path_is_folded_and_placed_without_looking_at_any_file(path: str, expected: str | None) -> None:
    place = locate(path, ROOT)
    if expected is None:
        assert place is None
    else:
        assert place == ComparablePath(expected.removeprefix("!"), expected.startswith("!"))


# path, root, cwd → place
CWD_PLACES: list[tuple[str, str | None, str | None, ComparablePath]] = [
    ("b", "/ws", "/ws/a", ComparablePath("a/b", False)),
    ("../b", "/ws", "/ws/a", ComparablePath("b", False)),
    ("../../b", "/ws", "/ws/a", ComparablePath("/b", True)),
    ("b", "/ws", "a", ComparablePath("a/b", False)),
    ("b", "/ws", "/tmp", ComparablePath("/tmp/b", True)),
    ("../ws/b", "/ws", "/tmp", ComparablePath("b", False)),
    ("b", None, "a", ComparablePath("a/b", False)),
    ("../b", None, "a", ComparablePath("b", False)),
    ("../../b", None, "a", ComparablePath("../b", True)),
    ("..", None, None, ComparablePath("..", True)),
    ("/ws/b", None, None, ComparablePath("/ws/b", True)),
    ("b", ".", None, ComparablePath("b", False)),
    ("/b", ".", None, ComparablePath("/b", True)),
    ("/ws/a/../b", "/ws/./x/..", None, ComparablePath("b", False)),
    ("/a", "/", None, ComparablePath("a", False)),
]


@pytest.mark.parametrize(("path", "root", "cwd", "expected"), CWD_PLACES)
def test_a_relative_path_counts_from_where_the_agent_stands(
    path: str, root: str | None, cwd: str | None, expected: ComparablePath
) -> None:
    assert locate(path, root, cwd) == expected


SEGMENTS = st.lists(st.sampled_from(["", ".", "..", "a", "b", "ws", "..."]), min_size=1, max_size=8)


@given(SEGMENTS, st.booleans())
def test_folding_agrees_with_the_standard_library(segments: list[str], absolute: bool) -> None:
    path = ("/" if absolute else "") + "/".join(segments)
    place = locate(path, ROOT)
    if not path:
        assert place is None
        return
    full = posixpath.normpath("/" + posixpath.join(ROOT, path).lstrip("/"))
    assert place is not None
    assert place.outside is not (full == ROOT or full.startswith(ROOT + "/"))
    assert posixpath.normpath(posixpath.join(ROOT, place.path)) == full
    assert locate(place.path, ROOT) == place


GIT = ("**/.git/hooks/**", "**/.git/config")
ENV = ("**/.env*",)
STRICT_READS = PROFILES["strict"].deny_read
NFC, NFD = "caf\u00e9", "cafe\u0301"

# patterns, path, denied
PATHS: list[tuple[tuple[str, ...], str, bool]] = [
    (GIT, ".git/hooks/pre-commit", True),
    (GIT, "./.git/hooks/pre-commit", True),
    (GIT, ".git//hooks//pre-commit", True),
    (GIT, ".git/./hooks/x", True),
    (GIT, ".git/x/../hooks/y", True),
    (GIT, "a/../.git/hooks/x", True),
    (GIT, "/ws/.git/hooks/x", True),
    (GIT, "/ws//.git/hooks/x/", True),
    (GIT, "../ws/.git/hooks/x", True),
    (GIT, "sub/.git/hooks/x", True),
    (GIT, "a/b/c/.git/hooks/d/e", True),
    (GIT, ".git/config", True),
    (GIT, ".git/config/", True),
    (GIT, ".git/config/.", True),
    (GIT, ".git/config/x/..", True),
    (GIT, "sub/.git/config", True),
    (GIT, ".git/hooks", False),
    (GIT, ".git/config.lock", False),
    (GIT, ".git/configs", False),
    (GIT, ".git/index", False),
    (GIT, ".git/objects/ab/cd", False),
    (GIT, "x.git/config", False),
    (GIT, ".GIT/config", False),
    (GIT, "hooks/x", False),
    (GIT, "git/hooks/x", False),
    (GIT, "a/.gitconfig", False),
    (ENV, ".env", True),
    (ENV, ".env.local", True),
    (ENV, ".envrc", True),
    (ENV, "a/.env", True),
    (ENV, "a/b/.env.production", True),
    (ENV, ".env/x", True),
    (ENV, "env", False),
    (ENV, "a.env", False),
    (ENV, "a/x.env", False),
    (ENV, ".ENV", False),
    (ENV, "x/../.env", True),
    (ENV, "x/../y/.env/..", False),
    (STRICT_READS, "id_rsa", True),
    (STRICT_READS, "keys/id_ed25519", True),
    (STRICT_READS, "id_ecdsa", True),
    (STRICT_READS, "id_dsa", True),
    (STRICT_READS, "server.pem", True),
    (STRICT_READS, "tls/server.key", True),
    (STRICT_READS, "x.p12", True),
    (STRICT_READS, "x.pfx", True),
    (STRICT_READS, "x.ppk", True),
    (STRICT_READS, "id_rsa.pub", False),
    (STRICT_READS, "keyboard.py", False),
    (STRICT_READS, "key", False),
    (("src/*",), "src/a/b", True),
    (("src/*",), "src", False),
    (("*.log",), "a/b.log", True),
    (("*",), "anything/at/all", True),
    (("*",), ".", True),
    (("**",), "a", True),
    (("d/**",), "d/x", True),
    (("d/**",), "d", False),
    (("d/**",), "d/", False),
    (("d/**",), "xd/x", False),
    (("**/x",), "x", True),
    (("**/x",), "xx", False),
    (("{a,b}/c",), "b/c", True),
    (("{a,b}/c",), "c/c", False),
    (("[!a]",), "b", True),
    (("[!a]",), "a", False),
    (("\\*",), "*", True),
    (("\\*",), "a", False),
    (("?",), "a", True),
    (("?",), "é", False),
    (("README",), "README", True),
    (("README",), "readme", False),
    (("a b",), "a b", True),
    (("a\nb",), "a\nb", True),
    ((f"**/{NFC}",), NFC, True),
    ((f"**/{NFC}",), NFD, False),
    ((f"**/{NFD}",), NFD, True),
    (("./a",), "a", False),
    (("a/",), "a", False),
    (("",), "a", False),
    (("locked/**",), "x/../locked/f", True),
    (("locked/**",), "locked/../x", False),
    (("locked/**",), "Locked/f", False),
    ((), ".git/config", False),
]


@pytest.mark.parametrize(("patterns", "path", "denied"), PATHS)
def test_a_path_is_judged_as_it_is_folded(patterns: tuple[str, ...], path: str, denied: bool) -> None:
    reads = Policy(PolicyProfile(deny_read=patterns))
    writes = Policy(PolicyProfile(deny_write=patterns))
    for decision, name in (
        (reads.decide_read(path, ROOT), "deny_read"),
        (writes.decide_write(path, ROOT), "deny_write"),
    ):
        assert decision.allowed == ("deny" if denied else "allow")
        assert (decision.rule is None) is not denied
        assert decision.rule is None or (decision.rule.name, decision.rule.pattern in patterns) == (name, True)
    assert writes.decide_read(path, ROOT).allowed == "allow"


# Outside the root: path, what is read is denied by **/.env* and /etc/shadow.
OUTSIDE = [
    ("/etc/passwd", False),
    ("/etc/shadow", True),
    ("/etc/../etc/shadow", True),
    ("../.env", True),
    ("/home/u/.env.local", True),
    ("~/.env", True),
    ("/ws-evil/a", False),
    ("~", False),
]


@pytest.mark.parametrize(("path", "read_denied"), OUTSIDE)
def test_outside_the_root_writing_is_denied_and_reading_is_judged_by_the_absolute_path(
    path: str, read_denied: bool
) -> None:
    policy = compile_policy(PolicyProfile(deny_read=("**/.env*", "/etc/shadow")))
    written = policy.decide_write(path, ROOT)
    assert (written.allowed, written.rule) == ("deny", Rule("workspace"))
    assert "outside the workspace" in written.reason
    assert policy.decide_read(path, ROOT).allowed == ("deny" if read_denied else "allow")


@pytest.mark.parametrize("path", ["", "\0", "a\0/.env", "x" * (PATH_BYTES_MAX + 1), "é" * PATH_BYTES_MAX])
def test_what_names_no_file_is_denied(path: str) -> None:
    policy = compile_policy(PolicyProfile())
    for ruling in (policy.decide_read(path, ROOT), policy.decide_write(path, ROOT)):
        assert ruling.rule == Rule("malformed")
        assert len(ruling.reason) < 1000


# Tools ----------------------------------------------------------------------------------------------------------------

ALIASES = {"shell": "bash", "run_shell_command": "bash", "replace": "edit_file", "fetchPage": "web_fetch"}

# profile, tool name, allowed, deciding rule
TOOL_RULES: list[tuple[dict[str, list[str]], str, str, Rule | None]] = [
    ({}, "Bash", "allow", None),
    ({}, "anything", "allow", None),
    ({}, "", "deny", Rule("malformed")),
    ({}, "x" * 257, "deny", Rule("malformed")),
    ({"disallowed_tools": ["Bash"]}, "Bash", "deny", Rule("disallowed_tools", "Bash")),
    ({"disallowed_tools": ["Bash"]}, "bash", "deny", Rule("disallowed_tools", "Bash")),
    ({"disallowed_tools": ["bash"]}, "Bash", "deny", Rule("disallowed_tools", "bash")),
    ({"disallowed_tools": ["bash"]}, "shell", "deny", Rule("disallowed_tools", "bash")),
    ({"disallowed_tools": ["Bash"]}, "run_shell_command", "deny", Rule("disallowed_tools", "Bash")),
    ({"disallowed_tools": ["shell"]}, "shell", "deny", Rule("disallowed_tools", "shell")),
    ({"disallowed_tools": ["shell"]}, "run_shell_command", "allow", None),
    ({"disallowed_tools": ["BASH"]}, "bash", "allow", None),
    ({"disallowed_tools": ["Bas"]}, "Bash", "allow", None),
    ({"disallowed_tools": ["Bash*"]}, "BashOutput", "deny", Rule("disallowed_tools", "Bash*")),
    ({"disallowed_tools": ["mcp__*"]}, "mcp__fs__read", "deny", Rule("disallowed_tools", "mcp__*")),
    ({"disallowed_tools": ["mcp__*"]}, "mcp__a/b__c", "deny", Rule("disallowed_tools", "mcp__*")),
    ({"disallowed_tools": ["mcp__*"]}, "mcp_fs", "allow", None),
    ({"disallowed_tools": ["mcp__*"]}, "MCP__fs__read", "allow", None),
    ({"disallowed_tools": ["mcp__fs__*"]}, "mcp__git__log", "allow", None),
    ({"disallowed_tools": ["mcp__*__*"]}, "mcp__git__log", "deny", Rule("disallowed_tools", "mcp__*__*")),
    ({"disallowed_tools": ["*"]}, "Read", "deny", Rule("disallowed_tools", "*")),
    ({"disallowed_tools": ["{Read,Write}"]}, "Write", "deny", Rule("disallowed_tools", "{Read,Write}")),
    ({"allowed_tools": ["Read"]}, "Read", "allow", Rule("allowed_tools", "Read")),
    ({"allowed_tools": ["Read"]}, "read_file", "allow", Rule("allowed_tools", "Read")),
    ({"allowed_tools": ["Read"]}, "Write", "deny", Rule("allowed_tools")),
    ({"allowed_tools": ["bash"]}, "shell", "allow", Rule("allowed_tools", "bash")),
    ({"allowed_tools": ["Re*", "Gr*"]}, "Grep", "allow", Rule("allowed_tools", "Gr*")),
    ({"allowed_tools": ["*"]}, "anything", "allow", Rule("allowed_tools", "*")),
    ({"allowed_tools": ["*"], "disallowed_tools": ["Bash"]}, "Bash", "deny", Rule("disallowed_tools", "Bash")),
    ({"allowed_tools": ["Bash"], "disallowed_tools": ["*"]}, "Bash", "deny", Rule("disallowed_tools", "*")),
    ({"require_approval_for": ["Bash"]}, "shell", "ask", Rule("require_approval_for", "Bash")),
    ({"require_approval_for": ["Bash"]}, "Read", "allow", None),
    ({"require_approval_for": ["mcp__*"]}, "mcp__a__b", "ask", Rule("require_approval_for", "mcp__*")),
    ({"require_approval_for": ["*"], "disallowed_tools": ["x"]}, "x", "deny", Rule("disallowed_tools", "x")),
    ({"require_approval_for": ["*"], "allowed_tools": ["y"]}, "x", "deny", Rule("allowed_tools")),
    ({"require_approval_for": ["x"], "allowed_tools": ["x"]}, "x", "ask", Rule("require_approval_for", "x")),
]


@pytest.mark.parametrize(("lists", "name", "allowed", "rule"), TOOL_RULES)
def test_a_tool_is_judged_by_all_its_names(
    lists: dict[str, list[str]], name: str, allowed: str, rule: Rule | None
) -> None:
    policy = Policy(msgspec.convert(lists, PolicyProfile))
    inputs = {"file_path": "a", "url": "https://x.example/"}
    for _ in range(2):  # the second answer is the remembered one
        decision = policy.decide_tool_call(name, inputs, root=ROOT, aliases=ALIASES)
        assert (decision.allowed, decision.rule) == (allowed, rule)


def test_a_name_is_worked_out_anew_when_the_aliases_change() -> None:
    policy = compile_policy(PolicyProfile(disallowed_tools=("bash",)))
    assert policy.decide_tool_call("go", {}).allowed == "allow"
    assert policy.decide_tool_call("go", {}, aliases={"go": "bash"}).allowed == "deny"
    assert policy.decide_tool_call("go", {}, aliases={"go": "glob"}).allowed == "allow"


PLACE_RULES = PolicyProfile(
    deny_read=("**/.env*",),
    deny_write=("**/locked/**",),
    deny_network=("*.evil.example",),
    require_approval_for=("Edit",),
)
PATCH = "*** Begin Patch\n*** Update File: src/a.py\n*** Move to: {to}\n@@\n-x\n+y\n*** End Patch"
DIFF = "diff --git a/x b/{to}\n--- a/x\n+++ b/{to}\n@@ -1 +1 @@\n-a\n+b\n"

# tool, input, allowed, deciding list
TOOL_INPUTS: list[tuple[str, Any, str, str | None]] = [
    ("Read", {"file_path": "a.py"}, "allow", None),
    ("Read", {"file_path": ".env"}, "deny", "deny_read"),
    ("Read", {"file_path": "/ws/x/../.env"}, "deny", "deny_read"),
    ("read_file", {"path": "sub/.env.local"}, "deny", "deny_read"),
    ("read_file", {"absolute_path": "/ws/.env"}, "deny", "deny_read"),
    ("read_file", {"paths": ["a", "b", ".env"]}, "deny", "deny_read"),
    ("read_file", {"files": [{"path": "a"}, {"path": ".env"}]}, "deny", "deny_read"),
    ("read_file", {"path": "locked/a"}, "allow", None),
    ("read_file", {"path": "/etc/passwd"}, "allow", None),
    ("read_file", {"path": None, "file_path": "a"}, "allow", None),
    ("read_file", {"path": 7}, "deny", "malformed"),
    ("read_file", {"path": ""}, "deny", "malformed"),
    ("read_file", {}, "deny", "malformed"),
    ("read_file", None, "deny", "malformed"),
    ("read_file", {"path": "file:///ws/.env"}, "deny", "deny_read"),
    ("Write", {"file_path": "/ws/a", "content": "x"}, "allow", None),
    ("Write", {"file_path": "a", "content": "see locked/x and .env"}, "allow", None),
    ("Write", {"file_path": "locked/a", "content": "x"}, "deny", "deny_write"),
    ("Write", {"file_path": "/ws-evil/a", "content": "x"}, "deny", "workspace"),
    ("Write", {"file_path": "../a", "content": "x"}, "deny", "workspace"),
    ("Write", {"file_path": "~/a", "content": "x"}, "deny", "workspace"),
    ("Write", {"file_path": ".env", "content": "x"}, "allow", None),
    ("Write", {"content": "x"}, "deny", "malformed"),
    ("Write", {"target": "a"}, "deny", "malformed"),
    ("Edit", {"file_path": "a", "old_string": "locked/x"}, "ask", "require_approval_for"),
    ("Edit", {"file_path": ".env"}, "deny", "deny_read"),
    ("replace", {"file_path": "locked/x"}, "deny", "deny_write"),
    ("MultiEdit", {"file_path": "a", "edits": [{"file_path": "locked/x"}]}, "deny", "deny_write"),
    ("MultiEdit", {"edits": [{"filePath": "a"}, {"filePath": "b"}]}, "allow", None),
    ("apply_patch", {"input": PATCH.format(to="b.py")}, "allow", None),
    ("apply_patch", {"input": PATCH.format(to="locked/b.py")}, "deny", "deny_write"),
    ("apply_patch", PATCH.format(to="../b.py"), "deny", "workspace"),
    ("apply_patch", {"patch": DIFF.format(to="y")}, "allow", None),
    ("apply_patch", {"patch": DIFF.format(to="locked/y")}, "deny", "deny_write"),
    ("apply_patch", {"patch": "rename from a\nrename to locked/a\n"}, "deny", "deny_write"),
    ("apply_patch", {"patch": '--- /dev/null\n+++ "b/locked/\\303\\251"\t2025\n'}, "deny", "deny_write"),
    ("apply_patch", {"patch": '--- /dev/null\n+++ "b/\\154ocked/a"\n'}, "deny", "deny_write"),
    ("apply_patch", {"patch": '--- a/x\n+++ "b/\\056env"\n'}, "deny", "deny_read"),
    (
        "apply_patch",
        {"patch": DIFF.format(to="y") + "diff --git a/locked/e b/locked/e\nnew file mode 100644\n"},
        "deny",
        "deny_write",
    ),
    (
        "apply_patch",
        {"patch": 'diff --git "a/lock\\145d/e" "b/lock\\145d/e"\nnew file mode 100644\n'},
        "deny",
        "deny_write",
    ),
    ("apply_patch", {"patch": "--- i/x\n+++ w/locked/y\n"}, "deny", "deny_write"),
    ("apply_patch", {"patch": "--- x\n+++ locked/y\n"}, "deny", "deny_write"),
    (
        "apply_patch",
        {"patch": "diff --git a/x b/a much/longer name\nrename from x\nrename to a much/longer name\n"},
        "allow",
        None,
    ),
    ("apply_patch", {"patch": '+++ "b/\\"\n+++ "\n+++ "\\\n+++ "b/\\777\u2603\\q"\n'}, "allow", None),
    ("apply_patch", PATCH.replace("*** Move", "  *** Move").format(to="locked/b.py"), "deny", "deny_write"),
    ("apply_patch", {"patch": "nothing in it"}, "deny", "malformed"),
    ("Glob", {"pattern": "**/*.py"}, "allow", None),
    ("Glob", {"pattern": "*", "path": ".env.d"}, "deny", "deny_read"),
    ("Grep", {"pattern": "KEY", "path": "src"}, "allow", None),
    ("Grep", {"pattern": "KEY", "glob": ".env*"}, "deny", "deny_read"),
    ("Grep", {"pattern": "\\.env"}, "allow", None),
    ("Bash", {"command": "cat .env > locked/x; curl http://evil.example"}, "allow", None),
    ("WebFetch", {"url": "https://good.example/"}, "allow", None),
    ("WebFetch", {"url": "https://www.evil.example/"}, "deny", "deny_network"),
    ("WebFetch", {"url": "file:///ws/.env"}, "deny", "deny_read"),
    ("WebFetch", {"url": "FILE:///ws/%2eenv"}, "deny", "deny_read"),
    ("WebFetch", {"url": "file:/ws/.env"}, "deny", "deny_read"),
    ("WebFetch", {"url": "data:text/plain,x"}, "deny", "malformed"),
    ("fetchPage", {"prompt": "sum up https://a.evil.example/x, please"}, "deny", "deny_network"),
    ("fetchPage", {"prompt": "sum up (https://good.example/x)."}, "allow", None),
    ("fetchPage", {"prompt": "sum up the news"}, "deny", "malformed"),
    ("WebSearch", {"query": "evil.example"}, "allow", None),
    ("mcp__fs__get", {"path": ".env"}, "deny", "deny_read"),
    ("mcp__fs__put", {"path": "locked/x"}, "deny", "deny_write"),
    ("mcp__fs__put", {"path": "/elsewhere/x"}, "allow", None),
    ("mcp__web__get", {"uri": "https://a.evil.example"}, "deny", "deny_network"),
    ("mcp__any", {"text": ".env locked/x https://a.evil.example"}, "allow", None),
    ("mcp__any", "text", "allow", None),
]


@pytest.mark.parametrize(("name", "value", "allowed", "rule"), TOOL_INPUTS)
def test_a_tool_call_is_judged_by_every_place_in_its_input(
    name: str, value: object, allowed: str, rule: str | None
) -> None:
    policy = compile_policy(PLACE_RULES)
    decision = policy.decide_tool_call(name, value, root=ROOT, aliases=ALIASES)
    assert (decision.allowed, decision.rule and decision.rule.name) == (allowed, rule)
    assert "\n" not in decision.reason


def test_an_input_that_cannot_be_judged_as_a_whole_is_denied() -> None:
    policy = compile_policy(PLACE_RULES)
    deep: Any = {"path": "a"}
    for _ in range(40):
        deep = [deep]
    many = {"paths": ["a"] * (PLACES_MAX + 1)}
    patch = {"patch": "".join(f"+++ b/{n}\n" for n in range(PLACES_MAX + 1))}
    for name, value in (("read_file", deep), ("read_file", many), ("apply_patch", patch)):
        assert policy.decide_tool_call(name, value, root=ROOT).rule == Rule("malformed")


# The network ----------------------------------------------------------------------------------------------------------

# target → host, scheme, port, path; None where two clients could disagree
TARGETS: list[tuple[str, tuple[str, str | None, int | None, str | None] | None]] = [
    ("example.com", ("example.com", None, None, None)),
    ("EXAMPLE.com.", ("example.com", None, None, None)),
    ("example.com:8080", ("example.com", None, 8080, None)),
    ("example.com/x", ("example.com", None, None, "/x")),
    ("https://example.com", ("example.com", "https", 443, "/")),
    ("HTTP://Example.COM:80/A?b#c", ("example.com", "http", 80, "/A")),
    ("https://example.com:/", ("example.com", "https", 443, "/")),
    ("http://good.example@evil.example/", ("evil.example", "http", 80, "/")),
    ("http://u:p@evil.example:81/", ("evil.example", "http", 81, "/")),
    ("http://evil.example/@good.example", ("evil.example", "http", 80, "/@good.example")),
    ("http://evil.example?@good.example", ("evil.example", "http", 80, "/")),
    ("http://evil.example#@good.example", ("evil.example", "http", 80, "/")),
    ("https://x.example/a/../b/./c//d/", ("x.example", "https", 443, "/b/c/d/")),
    ("https://x.example/%61/%2e%2E/b", ("x.example", "https", 443, "/b")),
    ("https://x.example/a%2fb", ("x.example", "https", 443, "/a%2fb")),
    ("[::1]", ("[::1]", None, None, None)),
    ("::1", ("[::1]", None, None, None)),
    ("http://[0:0::1]:8080/", ("[::1]", "http", 8080, "/")),
    ("http://[::ffff:127.0.0.1]/", ("127.0.0.1", "http", 80, "/")),
    ("http://127.0.0.1", ("127.0.0.1", "http", 80, "/")),
    ("http://127.1", ("127.0.0.1", "http", 80, "/")),
    ("http://2130706433/", ("127.0.0.1", "http", 80, "/")),
    ("http://0x7f.0.0.1/", ("127.0.0.1", "http", 80, "/")),
    ("http://0177.0.0.01/", ("127.0.0.1", "http", 80, "/")),
    ("http://0/", ("127.0.0.1", "http", 80, "/")),
    ("http://0x0.0/", ("127.0.0.1", "http", 80, "/")),
    ("http://0.0.0.0:81/", ("127.0.0.1", "http", 81, "/")),
    ("http://0.0.0.1/", ("0.0.0.1", "http", 80, "/")),
    ("http://[::]/", ("[::1]", "http", 80, "/")),
    ("[0:0::0]:80", ("[::1]", None, 80, None)),
    ("::", ("[::1]", None, None, None)),
    ("http://[::ffff:0.0.0.0]/", ("127.0.0.1", "http", 80, "/")),
    ("http://xn--bcher-kva.example/", ("xn--bcher-kva.example", "http", 80, "/")),
    ("http://b\u00fccher.example/", ("xn--bcher-kva.example", "http", 80, "/")),
    ("http://stra\u00dfe.example/", None),
    ("gopher://x.example/", ("x.example", "gopher", None, "/")),
    (" https://x.example\n", ("x.example", "https", 443, "/")),
    ("", None),
    ("https://", None),
    ("https:///x", None),
    ("//x.example/", None),
    ("http:x.example", None),
    ("http:/x.example", None),
    ("https:x.example", None),
    ("x.example:", None),
    ("x.example:port", None),
    ("x.example:65536", None),
    ("http://x.example:" + "9" * 5_000 + "/", None),
    ("x.example:" + "0" * 5_000 + "80", None),
    ("http://a@b@c/", None),
    ("http://x.example%2eevil/", None),
    ("http://%65vil.example/", None),
    ("http://x.example\\@evil.example/", None),
    ("http://x.exam\tple/", None),
    ("http://x y/", None),
    ("http://x\0/", None),
    ("http://x..example/", None),
    ("http://.example/", None),
    ("http://*.example/", None),
    ("http://x.example)/", None),
    ("http://256.1.1.1/", None),
    ("http://1.2.3.4.5/", None),
    ("http://0x.evil.0xg/", ("0x.evil.0xg", "http", 80, "/")),
    ("http://[::1/", None),
    ("http://[::1%25eth0]/", None),
    ("http://[zz]/", None),
    ("http://\uff45vil.example/", None),
    ("http://evil\u3002example/", None),
    ("http://ev\u00adil.example/", None),
    ("https://x.example/a%2f..%2fb", None),
    ("https://x.example/..%5cb", None),
    ("https://x.example/" + "a" * URL_CHARS_MAX, None),
    ("https://x.example/" + "a" * PATH_BYTES_MAX, None),
    ("x" * 254, None),
]


@pytest.mark.parametrize(("text", "expected"), TARGETS, ids=[repr(text)[:40] for text, _ in TARGETS])
def test_a_target_leads_where_every_client_goes_or_is_refused(
    text: str, expected: tuple[str, str | None, int | None, str | None] | None
) -> None:
    target = read_target(text)
    assert (target and (target.host, target.scheme, target.port, target.path)) == expected


# allow, deny, target, allowed
NETWORK: list[tuple[list[str], list[str], str, bool]] = [
    ([], [], "https://anything.example/", True),
    ([], [], "http://a@b@c/", True),
    ([], ["*"], "https://anything.example/", False),
    ([], ["**"], "10.0.0.1", False),
    ([], ["*"], "http://[::1]/", False),
    ([], ["evil.example"], "https://evil.example/", False),
    ([], ["evil.example"], "https://EVIL.example./x", False),
    ([], ["EVIL.example."], "https://evil.example/", False),
    ([], ["evil.example"], "https://www.evil.example/", True),
    ([], ["evil.example"], "https://evil.example.good/", True),
    ([], ["*.evil.example"], "https://a.b.evil.example/", False),
    ([], ["*.evil.example"], "https://evil.example/", True),
    ([], ["*.evil.example"], "http://good.example@a.evil.example/", False),
    ([], ["evil.example"], "http://%65vil.example/", False),
    ([], ["other.example"], "http://a@b@c/", False),
    ([], ["evil.example:22"], "evil.example:22", False),
    ([], ["evil.example:22"], "ssh://evil.example/", False),
    ([], ["evil.example:22"], "evil.example", False),
    ([], ["evil.example:22"], "https://evil.example/", True),
    ([], ["*:25"], "mail.example:25", False),
    ([], ["*:80"], "http://[::80]:81/", True),
    ([], ["127.0.0.1"], "http://2130706433/", False),
    ([], ["127.*"], "http://0x7f.1/", False),
    ([], ["127.0.0.1"], "http://0/", False),
    ([], ["127.*"], "http://0.0.0.0/", False),
    ([], ["0.0.0.0"], "http://0/", False),
    ([], ["0.0.0.0"], "http://127.0.0.1/", False),
    ([], ["0.*"], "http://0.0.0.0/", False),
    ([], ["0"], "http://0.0.0.0/", False),
    ([], ["127.1"], "http://127.0.0.1/", False),
    ([], ["127.1:80"], "http://127.0.0.1:81/", True),
    ([], ["::1"], "http://[::]/", False),
    ([], ["[::]"], "http://[::1]/", False),
    ([], ["[::]:80"], "http://[::]/", False),
    ([], ["::"], "::", False),
    (["127.0.0.1"], [], "http://0/", True),
    (["0.0.0.0"], [], "http://10.0.0.1/", False),
    ([], ["127.0.0.1"], "http://[::ffff:7f00:1]/", False),
    ([], ["::1"], "http://[0::1]/", False),
    ([], ["[::1]"], "::1", False),
    ([], ["[::1]:80"], "http://[::1]/", False),
    ([], ["[::1]:80"], "http://[::1]:81/", True),
    ([], ["http://*"], "http://x.example/", False),
    ([], ["http://*"], "https://x.example/", True),
    ([], ["http*://x.example"], "https://x.example/", False),
    ([], ["https://x.example/admin/*"], "https://x.example/admin/y", False),
    ([], ["https://x.example/admin/*"], "https://x.example/a/../admin/y", False),
    ([], ["https://x.example/admin/*"], "https://x.example/%61dmin/y", False),
    ([], ["https://x.example/admin/*"], "https://x.example//admin/y", False),
    ([], ["https://x.example/admin/*"], "https://x.example/public", True),
    ([], ["x.example/admin/*"], "x.example", False),
    ([], ["b\u00fccher.example"], "http://B\u00dcCHER.example/", False),
    ([], ["b\u00fccher.example"], "xn--bcher-kva.example:443", False),
    ([], ["xn--bcher-kva.example"], "http://b\u00fccher.example/", False),
    ([], ["*.b\u00fccher.example"], "http://a.xn--bcher-kva.example/", False),
    (["*.b\u00fccher.example"], [], "http://a.b\u00fccher.example/", True),
    ([], ["127.0.0.0/8"], "http://127.200.0.1:8080/", False),
    ([], ["127.0.0.0/8"], "http://2130706433/", False),
    ([], ["127.0.0.0/8"], "http://[::ffff:127.0.0.1]/", False),
    ([], ["127.0.0.0/8"], "http://0/", False),
    ([], ["0.0.0.0/8"], "http://127.0.0.1/", False),
    ([], ["127.0.0.0/8"], "http://128.0.0.1/", True),
    ([], ["127.0.0.0/8"], "http://127.example/", True),
    ([], ["192.168.7.9/16"], "192.168.0.1:22", False),
    ([], ["fd00::/8"], "http://[fd12::5]/", False),
    ([], ["[fd00::]/8"], "[fd12::5]:80", False),
    ([], ["fd00::/8"], "http://[fe00::5]/", True),
    (["10.0.0.0/8"], [], "http://10.9.8.7/", True),
    (["10.0.0.0/8"], [], "http://11.9.8.7/", False),
    (["10.0.0.0/8"], [], "http://[::a09:807]/", False),
    (["good.example"], [], "https://good.example/", True),
    (["good.example"], [], "https://good.example:8443/", True),
    (["good.example"], [], "https://evil.example/", False),
    (["good.example"], [], "http://good.example@evil.example/", False),
    (["good.example"], [], "http://evil.example/good.example", False),
    (["good.example"], [], "http://good.example.evil.example/", False),
    (["good.example"], [], "http://good.example\\@evil.example/", False),
    (["*.good.example"], [], "https://a.good.example/", True),
    (["*.good.example"], [], "https://agood.example/", False),
    (["good.example:443"], [], "https://good.example/", True),
    (["good.example:443"], [], "http://good.example/", False),
    (["good.example:443"], [], "good.example", False),
    (["https://good.example"], [], "https://good.example/any?q", True),
    (["https://good.example/"], [], "https://good.example/any", True),
    (["https://good.example/"], [], "good.example", False),
    (["https://good.example/v1/*"], [], "https://good.example/v1/x", True),
    (["https://good.example/v1/*"], [], "https://good.example/v1/../x", False),
    (["https://good.example/v1/*"], [], "https://good.example/v1/%2e%2e/x", False),
    (["https://good.example/v1/*"], [], "https://good.example/v1/..%2fx", False),
    (["*://good.example/*"], [], "http://good.example/x", True),
    (["*"], ["*.evil.example"], "https://a.evil.example/", False),
    (["*"], ["*.evil.example"], "https://good.example/", True),
    (["a.evil.example"], ["*.evil.example"], "https://a.evil.example/", False),
]


@pytest.mark.parametrize(("allow", "deny", "target", "allowed"), NETWORK)
def test_a_connection_is_judged_by_where_it_leads(
    allow: list[str], deny: list[str], target: str, allowed: bool
) -> None:
    policy = Policy(PolicyProfile(allow_network=tuple(allow), deny_network=tuple(deny)))
    decision = policy.decide_connection(target)
    assert decision.allowed == ("allow" if allowed else "deny")
    assert "\n" not in decision.reason


# allow, deny, a search that says no host is allowed
NO_HOST = [
    ([], [], True),
    ([], ["evil.example"], True),
    ([], ["*"], False),
    (["*"], [], True),
    (["good.example"], [], False),
]


@pytest.mark.parametrize(("allow", "deny", "allowed"), NO_HOST)
def test_a_tool_that_chooses_where_it_goes_needs_an_open_network(
    allow: list[str], deny: list[str], allowed: bool
) -> None:
    policy = Policy(PolicyProfile(allow_network=tuple(allow), deny_network=tuple(deny)))
    assert policy.decide_tool_call("WebSearch", {"query": "x"}).allowed == ("allow" if allowed else "deny")
    assert policy.decide_connection(None).allowed == ("allow" if allowed else "deny")


# Profiles, audit, enforcement -----------------------------------------------------------------------------------------


def test_an_empty_profile_becomes_the_default_one_and_any_other_stays_as_it_is() -> None:
    assert compile_policy(PolicyProfile()).profile == PROFILES["default"]
    own = PolicyProfile(disallowed_tools=("x",))
    assert compile_policy(own).decide_write(".git/config", ROOT).allowed == "allow"


def test_the_default_profile_lets_the_agent_use_its_own_repository() -> None:
    policy = compile_policy(PolicyProfile())
    rulings = [
        policy.decide_write(".git/index", ROOT),
        policy.decide_write("src/a.py", ROOT),
        policy.decide_read(".git/config", ROOT),
        policy.decide_read(".env", ROOT),
        policy.decide_connection("https://example.com/"),
        policy.decide_tool_call("Bash", {"command": "git commit"}),
    ]
    assert [ruling.allowed for ruling in rulings] == ["allow"] * len(rulings)
    assert policy.decide_write("vendored/.git/hooks/post-checkout", ROOT).allowed == "deny"


def test_the_strict_profile_keeps_secrets_unread_and_the_network_shut() -> None:
    policy = compile_policy(PROFILES["strict"])
    rulings = [
        policy.decide_write(".git/hooks/x", ROOT),
        policy.decide_read(".env", ROOT),
        policy.decide_read("/home/u/.ssh/id_ed25519", ROOT),
        policy.decide_connection("https://example.com/"),
        policy.decide_connection(None),
    ]
    assert [ruling.allowed for ruling in rulings] == ["deny"] * len(rulings)
    assert policy.decide_read("src/a.py", ROOT).allowed == "allow"


def test_the_audit_says_what_would_have_been_denied() -> None:
    policy = compile_policy(
        PolicyProfile(disallowed_tools=("Bash",), deny_write=("locked/**",), require_approval_for=("Write",))
    )
    write = ToolCall(ts=TS, tool_name="edit_file", input={"file_path": "/ws/locked/x"})
    assert policy.audit(write, root=ROOT) == policy.decide_write("locked/x", ROOT)
    asked = policy.audit(ToolCall(ts=TS, tool_name="Write", input={"file_path": "x"}), root=ROOT)
    assert asked is not None
    assert asked.allowed == "ask"
    changed = policy.audit(FileChanged(ts=TS, path="locked/x", summary=""), root=ROOT)
    assert changed is not None
    assert changed.rule == Rule("deny_write", "locked/**")
    outside = policy.audit(FileChanged(ts=TS, path="../x", summary=""), root=ROOT)
    assert outside is not None
    assert outside.rule == Rule("workspace")
    command = policy.audit(CommandExecuted(ts=TS, command="ls"))
    assert command is not None
    assert command.rule == Rule("disallowed_tools", "Bash")
    assert policy.audit(FileChanged(ts=TS, path="x", summary="")) is None
    assert policy.audit(AssistantDelta(ts=TS, text="locked/x")) is None
    assert AssistantDelta not in AUDITED


def test_the_system_goes_before_the_layer_of_a_rules_list() -> None:
    profile = PolicyProfile(disallowed_tools=("Bash",), deny_read=("a", "b"), deny_network=("*",))
    state = RunState(run_id="", order=WorkOrder("t", policy=profile), started_ns=0, backend=BackendIdentity("b"))
    state.policy = compile_policy(profile)
    state.held_by_system = {Rule("deny_read", "b"): "", Rule("workspace"): "what is mounted"}
    assert held_by(state, {"disallowed_tools": "host", "deny_read": "host"})["rules"] == [
        {"rule": "disallowed_tools", "pattern": "Bash", "layer": "host"},
        {"rule": "deny_read", "pattern": "a", "layer": "host"},
        {"rule": "deny_read", "pattern": "b", "layer": "os"},
        {"rule": "deny_network", "pattern": "*", "layer": None},
        {"rule": "workspace", "pattern": None, "layer": "os", "gap": "what is mounted"},
    ]


# Files ----------------------------------------------------------------------------------------------------------------

BROKEN: list[tuple[bytes, str]] = [
    (b"", "the whole document"),
    (b"{", "the whole document"),
    (b"[]", "the whole document"),
    (b"null", "the whole document"),
    (b'"deny_read"', "the whole document"),
    (b"{'deny_read': []}", "the whole document"),
    (b'{"deny_read": [],}', "the whole document"),
    (b'{"deny_read": []} x', "the whole document"),
    (b'{"deny_read": [NaN]}', "the whole document"),
    (b'\xef\xbb\xbf{"deny_read": []}', "the whole document"),
    (b'{"deny_read": ["\xff"]}', "the whole document"),
    (b'{"deny_read": ["\\ud800"]}', "the whole document"),
    ('{"deny_read": []}'.encode("utf-16"), "the whole document"),
    (b"[" * 100_000, "the whole document"),
    (b" " * (POLICY_BYTES_MAX + 1), "the whole document"),
    (b'{"deny_reed": []}', "/deny_reed"),
    (b'{"a/b~c": []}', "/a~1b~0c"),
    (b'{"deny_read": [], "deny_read": []}', "/deny_read"),
    (b'{"deny_read": "x"}', "/deny_read"),
    (b'{"deny_read": null}', "/deny_read"),
    (b'{"deny_read": {}}', "/deny_read"),
    (b'{"deny_read": {"x": 1}}', "/deny_read"),
    (b'{"deny_read": ["a", 1]}', "/deny_read/1"),
    (b'{"deny_read": ["a", null]}', "/deny_read/1"),
    (b'{"deny_read": [["a"]]}', "/deny_read/0"),
    (b'{"deny_read": ["a", "b", "[c"]}', "/deny_read/2"),
    (b'{"disallowed_tools": ["{a"]}', "/disallowed_tools/0"),
    (json.dumps({"deny_write": ["{a,b}" * 30]}).encode(), "/deny_write/0"),
    (b'{"deny_network": ["http://"]}', "/deny_network/0"),
    (b'{"deny_network": ["10.0.0.0/33"]}', "/deny_network/0"),
    ('{"deny_network": ["b\u00fc*.example"]}'.encode(), "/deny_network/0"),
    (b'{"allow_network": ["ok", "a@b"]}', "/allow_network/1"),
    (b'{"allow_network": ["x.example:99999999"]}', "/allow_network/0"),
]


@pytest.mark.parametrize(("data", "pointer"), BROKEN, ids=[repr(data[:40]) for data, _ in BROKEN])
def test_a_broken_policy_is_refused_with_the_place_that_is_wrong(data: bytes, pointer: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(data, "team.json")
    assert caught.value.code == "policy_invalid"
    assert caught.value.message.startswith(f"team.json: {pointer}: ")
    assert len(caught.value.message) < 1000


LISTS = st.fixed_dictionaries(
    {},
    optional={name: st.lists(st.sampled_from(["a", "*.b", "x.example"])) for name in PolicyProfile.__struct_fields__},
)


@given(LISTS)
def test_a_policy_that_is_written_is_read_as_it_was(lists: dict[str, list[str]]) -> None:
    profile = msgspec.convert(lists, PolicyProfile)
    assert parse_policy(json.dumps(lists).encode(), "-") == profile
    assert parse_policy(msgspec.json.encode(profile), "-") == profile


@pytest.mark.parametrize("name", ["deny_read", "allowed_tools", "deny_network"])
def test_a_pattern_that_cannot_be_used_stops_the_policy_and_names_its_list(name: str) -> None:
    for pattern in ("[x", "{a,b}" * 30):
        with pytest.raises(PolicyError, match=f"{name}: ") as caught:
            compile_policy(msgspec.convert({name: [pattern]}, PolicyProfile))
        assert caught.value.code == "policy_invalid"


# Cost -----------------------------------------------------------------------------------------------------------------

HOSTILE = ["*a" * 20, "**/a/" * 12, "*a*a*a*a*b", "**/" * 30 + "x", "{a,aa,aaa}*" * 4, "?" * 100 + "*b"]
LONG_PATHS = ["a" * PATH_BYTES_MAX, "a/" * (PATH_BYTES_MAX // 2 - 1) + "a", "/".join("ab" for _ in range(1365))]


def worst(decide: Callable[[str], Ruling], texts: list[str]) -> float:
    times = []
    for text in texts:
        began = time.process_time()
        decide(text)
        times.append(time.process_time() - began)
    return max(times)


def test_a_decision_is_bounded_whatever_the_patterns_and_the_path() -> None:
    policy = compile_policy(PolicyProfile(deny_read=tuple(HOSTILE), deny_write=tuple(HOSTILE)))
    assert worst(policy.decide_read, LONG_PATHS) < ACTION_S_MAX * MARGIN
    assert worst(policy.decide_write, LONG_PATHS) < ACTION_S_MAX * MARGIN


def test_a_connection_is_decided_in_bounded_time_whatever_the_patterns_and_the_url() -> None:
    hosts = tuple(f"{pattern}.{n}".replace("/", ".") for n, pattern in enumerate(HOSTILE))
    paths = tuple(f"https://x.example/{pattern}" for pattern in HOSTILE)
    policy = compile_policy(PolicyProfile(deny_network=hosts + paths))
    targets = [f"https://x.example/{path[:4000]}" for path in LONG_PATHS]
    targets += ["a" * 253, "a." * 120 + "a", "@" * 8000, "%41" * 2700]
    assert worst(policy.decide_connection, targets) < ACTION_S_MAX * MARGIN


def test_a_list_of_hosts_that_costs_too_much_as_a_whole_is_refused() -> None:
    with pytest.raises(PolicyError, match="deny_network") as caught:
        compile_policy(PolicyProfile(deny_network=tuple(f"*{'a' * 200}*{n}" for n in range(100))))
    assert caught.value.code == "policy_invalid"


@given(st.text(max_size=60))
def test_no_text_makes_a_decision_fail(text: str) -> None:
    policy = compile_policy(
        PolicyProfile(deny_read=("*x",), deny_network=("*.evil.example",), allow_network=("https://a/*",))
    )
    rulings = [
        policy.decide_read(text, ROOT),
        policy.decide_write(text, text),
        policy.decide_connection(text),
        policy.decide_connection(f"https://{text}/"),
        policy.decide_tool_call(text, {text: text, "path": text}, root=ROOT, aliases={text: "read_file"}),
        policy.decide_tool_call("web_fetch", {"prompt": text}),
    ]
    assert {ruling.allowed for ruling in rulings} <= {"allow", "deny"}


@pytest.mark.parametrize(
    ("tool", "verb"),
    [
        ("read_file", "reading"),
        ("Read", "reading"),
        ("edit_file", "writing"),
        ("Edit", "writing"),
        ("multi_edit", "writing"),
        ("save_thing", "using"),
    ],
)
def test_a_refusal_by_a_rule_on_reading_says_what_the_call_does(tool: str, verb: str) -> None:
    policy = compile_policy(PolicyProfile(deny_read=(".env",)))
    ruling = policy.decide_tool_call(tool, {"file_path": ".env"}, root="/work")
    assert (ruling.allowed, ruling.reason) == ("deny", f"{verb} '.env' is forbidden by '.env'")
