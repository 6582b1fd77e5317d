"""What the profiles `strict` and `ci` demand of the machine, and where a run says that rules are not held."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backplane.config import Settings
from backplane.contract.work import PolicyProfile, RuntimeConfig
from backplane.errors import BackplaneError, CapabilityError
from backplane.policy.rules import PROFILES
from backplane.runtime.plane import ControlPlane
from backplane.sandbox.probe import Name, Probe, probe
from tests.in_process import in_process
from tests.layers import without
from tests.ordinary import NOBODY, as_nobody, python_of_everybody
from tests.peers import ROOT
from tests.runs import QUICK, go, not_begun, order, script

SECRET = "a-private-key"  # it opens nothing
WAIT_S = 60.0

READS = 'cat "$HOME/.ssh/id_rsa" "$HOME/.aws/credentials" "$HOME/server.pem" 2>/dev/null; true'
"""A command that prints what it can read of a user's credentials."""


@pytest.fixture
def person(beside_tmp: Path) -> Path:
    """The home folder of a user with keys in it; not below /tmp, of which each contained host has one of its own."""
    home = beside_tmp
    for place in (".ssh/id_rsa", ".aws/credentials", "server.pem"):
        (home / place).parent.mkdir(parents=True, exist_ok=True)
        (home / place).write_text(SECRET)
    (home / "work").mkdir()
    return home


Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(params=["root", "ordinary"])
def user(request: pytest.FixtureRequest, person: Path, tmp_path: Path) -> Call:
    """Run the command line as root or as an ordinary user, in the user's own folder."""
    words = [sys.executable, "-m", "backplane"]
    if request.param == "ordinary":
        python = python_of_everybody() if os.geteuid() == 0 and shutil.which("setpriv") else None
        if python is None:
            pytest.skip("needs root, setpriv and an interpreter that an ordinary user may run")
        # A host gets no PYTHONPATH of ours, and the checkout's interpreter may lie where only root gets in.
        subprocess.run([python, "-m", "venv", "--without-pip", person / "venv"], check=True)
        (packages,) = (person / "venv").glob("lib/python3*/site-packages")
        (packages / "here.pth").write_text(f"{ROOT}\n{Path(pytest.__file__).parents[1]}\n")
        words = [*as_nobody(), str(person / "venv/bin/python"), "-m", "backplane"]
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", person], check=True)
        for folder in (tmp_path, *tmp_path.parents):  # A worker of xdist has a folder more above its own.
            if str(folder).startswith(f"{tempfile.gettempdir()}/"):
                folder.chmod(0o755)

    def call(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        own = {"HOME": person, "BACKPLANE_HOME": person / ".backplane", "XDG_CONFIG_HOME": person / ".config"}
        env = {**os.environ, **{name: str(path) for name, path in own.items()}, **environ}
        if words[0] == sys.executable:
            return in_process(*arguments, cwd=person / "work", env=env)
        return subprocess.run(
            [*words, *arguments], cwd=person / "work", env=env, capture_output=True, text=True, timeout=WAIT_S,
            check=False,
        )  # fmt: skip

    return call


# From the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["strict", "ci"])
def test_a_strict_profile_is_refused_without_bubblewrap(
    profile: str, user: Call, person: Path, without_bubblewrap: str
) -> None:
    done = user("run", f"touch started; {READS}", "-b", "shell", "--policy", profile, PATH=without_bubblewrap)
    assert (done.returncode, SECRET in done.stdout) == (4, False), done
    error, *_, step = done.stderr.splitlines()
    assert error.startswith("capability_unsupported: the credential stores")
    assert "bubblewrap is unusable: bwrap is not found" in error
    assert "install bubblewrap, or --isolation off" in step


@pytest.mark.parametrize("user", ["root"], indirect=True)
def test_a_strict_profile_without_isolation_says_what_is_not_held(user: Call, without_bubblewrap: str) -> None:
    words = ("run", READS, "-b", "shell", "--policy", "strict", "--isolation", "off")
    done = user(*words, PATH=without_bubblewrap)
    assert (done.returncode, SECRET in done.stdout) == (0, True), done
    (line,) = done.stderr.splitlines()
    assert "rules and the credential stores are not held: isolation is off" in line
    assert "bubblewrap" in line
    shown = user("receipts", "show", "last", "--json").stdout
    assert line.removeprefix("note: ") in shown
    places = {"--summary": "⚠", "--junit": "<system-out>", "": '<p class="warn'}
    for form, place in places.items():
        report = user("report", "last", *([form] if form else [])).stdout
        assert "the credential stores are not held" in report, form
        assert place in report


@pytest.mark.needs("bwrap")
@pytest.mark.parametrize(("user", "profile"), [("root", "strict"), ("ordinary", "default")], indirect=["user"])
def test_with_bubblewrap_credentials_are_out_of_sight_and_nothing_is_said(profile: str, user: Call) -> None:
    done = user("run", READS, "-b", "shell", "--policy", profile)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert (SECRET in done.stdout) == (profile == "default")  # It covers no file of the home folder but the stores.
    assert user("run", "cat ~/.ssh/id_rsa; true", "-b", "shell").stdout.count(SECRET) == 0


@pytest.mark.parametrize("user", ["root"], indirect=True)
def test_other_profiles_run_without_bubblewrap_and_say_so_in_one_line(user: Call, without_bubblewrap: str) -> None:
    done = user("run", "true", "-b", "shell", PATH=without_bubblewrap)
    assert done.returncode == 0, done
    (line,) = done.stderr.splitlines()
    assert "the credential stores are not held: bubblewrap is unusable (bwrap is not found); install bubblewrap" in line
    assert user("run", "true", "-b", "shell", "--isolation", "off").stderr == ""


@pytest.mark.parametrize("user", ["ordinary"], indirect=True)
def test_a_bubblewrap_that_does_not_work_is_named_with_its_reason(user: Call, without_bubblewrap: str) -> None:
    broken = Path(without_bubblewrap) / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: no namespaces for you' >&2\nexit 1\n")
    broken.chmod(0o755)
    refused = user("run", READS, "-b", "shell", "--policy", "ci", PATH=without_bubblewrap)
    assert (refused.returncode, SECRET in refused.stdout) == (4, False)
    assert "bubblewrap is unusable: bwrap: no namespaces for you" in refused.stderr
    assert "allow unprivileged user namespaces" in refused.stderr
    told = user("run", "true", "-b", "shell", PATH=without_bubblewrap)
    assert (told.returncode, told.stderr.count("no namespaces for you")) == (0, 1), told


@pytest.mark.parametrize("user", ["root"], indirect=True)
@pytest.mark.parametrize("way", ["configuration", "variable", "table", "order"])
def test_the_demand_comes_with_the_rules_by_whatever_door(
    way: str, user: Call, person: Path, without_bubblewrap: str
) -> None:
    environ, words = {"PATH": without_bubblewrap}, ["true"]
    rules = msgspec.to_builtins(PROFILES["strict"])
    if way == "configuration":
        (person / "work/backplane.toml").write_text('policy = "strict"\n')
    elif way == "table":
        table = "".join(f"{name} = {msgspec.json.encode(value).decode()}\n" for name, value in rules.items() if value)
        (person / "work/backplane.toml").write_text(f"[policy]\n{table}")
    elif way == "variable":
        environ["BACKPLANE_POLICY"] = "ci"
    else:
        (person / "work/order.json").write_bytes(msgspec.json.encode({"task": "true", "policy": rules}))
        words = ["--order", "order.json"]
    done = user("run", *words, "-b", "shell", **environ)
    assert (done.returncode, "bubblewrap is unusable" in done.stderr) == (4, True), done


# From Python ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def found() -> Probe:
    return probe(os.environ)


def control(home: Path, layers: Probe, isolation: Any = "best_effort") -> ControlPlane:
    made = ControlPlane(Settings(limits=QUICK, isolation=isolation), home, os.environ)
    made.layers = layers
    return made


SAYS = "hello(); run = take(); put(event(run), final(run)); end()"


@pytest.mark.anyio
@pytest.mark.needs("bwrap")
@pytest.mark.parametrize("missing", [(), ("bubblewrap",), ("landlock",)])
@pytest.mark.parametrize("name", ["default", "ci", "strict and more", "less than strict"])
@pytest.mark.parametrize("isolation", ["best_effort", "off"])
async def test_profiles_by_layers_and_isolation(
    name: str, missing: tuple[Name, ...], isolation: str, found: Probe, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    strict = PROFILES["strict"]
    profile = {
        **PROFILES,
        "strict and more": msgspec.structs.replace(
            strict, disallowed_tools=("bash",), deny_read=("x", *strict.deny_read)
        ),
        "less than strict": msgspec.structs.replace(strict, deny_read=strict.deny_read[1:]),
    }[name]
    demands = name in ("strict", "ci", "strict and more")
    async with control(backplane_home, without(found, *missing), isolation) as plane:
        run, _ = await go(plane, order(root, policy=profile), script(tmp_path, SAYS))
    if demands and isolation != "off" and "bubblewrap" in missing:
        assert isinstance(run.error, CapabilityError)
        assert run.end is not None
        assert (run.end.reason, not_begun(run)) == ("refused", True)
        return
    assert run.error is None, run.error
    told = run.receipt.backplane["enforcement"].get("shortfall", "")
    weak = "bubblewrap" in missing if isolation != "off" else demands
    assert ("the credential stores are not held" in told) == weak, told
    assert bool(told) == weak


@pytest.mark.anyio
@pytest.mark.parametrize("asked", ["audit", "os"])
async def test_an_order_may_say_itself_how_credentials_are_to_be_held(
    asked: str, found: Probe, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    own = RuntimeConfig(vendor={"abp": {"enforcement": {"credentials": asked, "deny_read_outside": asked}}})
    for profile in (PROFILES["strict"], PolicyProfile()):
        async with control(backplane_home, without(found, "bubblewrap")) as plane:
            run, _ = await go(plane, order(root, policy=profile, config=own), script(tmp_path, SAYS))
        assert isinstance(run.error, BackplaneError) == (asked == "os"), run.error
