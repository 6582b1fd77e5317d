"""A host sees no store of credentials, whatever the policy; what is opened is said; shipped profiles are files."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backplane import resources
from backplane.policy.rules import PROFILES
from backplane.sandbox.credentials import STORES, Covered, cover
from tests.in_process import in_process

FOLDERS = (".ssh", ".gnupg", ".aws", ".azure", ".oci", ".kube", ".mozilla", ".pki", ".cloudflared", ".password-store")
"""Of the table, those that are made as folders here; the others as files, which a store may turn out to be."""
SECRET = "seen-by-the-host"

needs_bwrap = pytest.mark.needs("bwrap")
SPOTS = sorted(spot for spots in STORES.values() for spot in spots if spot[0] != "$")


def fill(home: Path) -> None:
    """Put every store of the table into a home folder."""
    for spot in SPOTS:
        path = home / spot
        if spot in FOLDERS:
            path = path / "key"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(SECRET)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "user"
    folder.mkdir()
    fill(folder)
    return folder


Run = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, home: Path) -> Run:
    """Run a shell command below `home` by the command line; give what it printed, and the label."""

    def call(script: str, *words: str, root: Path | None = None, **abp: Any) -> tuple[str, dict[str, Any]]:
        if root is None:
            root = tmp_path / "work"
            root.mkdir(exist_ok=True)
        order = {"task": script, "workspace": {"root": str(root)}, "config": {"vendor": {"abp": abp}}}
        done = backplane("run", "--backend", "shell", "--json", *words, "--order", "-", home=home, given=order)
        assert done.returncode == 0, done.stdout + done.stderr
        final = json.loads(done.stdout.splitlines()[-1])
        return done.stdout, final["receipt"]["usage_raw"]["backplane"]["enforcement"]["kinds"]["credentials"]

    return call


def backplane(*words: str, home: Path, given: object = None, **env: str) -> subprocess.CompletedProcess[str]:
    return in_process(*words, cwd=home, stdin=json.dumps(given), env={**os.environ, "HOME": str(home), **env})


LOOK = f"cd ~ && grep -rls {SECRET} . | sort"


@needs_bwrap
@pytest.mark.parametrize(("mode", "profile"), [("pass_through", None), ("staged", "default"), ("staged", "strict")])
def test_a_host_sees_no_store_of_credentials(run: Run, mode: str, profile: str | None) -> None:
    words = ["--in-place"] if mode == "pass_through" else []
    said, label = run(f"{LOOK}; cat ~/.npmrc && ls ~/.ssh", *words, *(["--policy", profile] if profile else []))
    assert SECRET not in said.replace(LOOK, "")
    assert not any(f"./{spot}" in said for spot in SPOTS)
    assert '"exit_code":0' in said, "an empty file is read without an error"
    assert label["state"] == "enforced"
    assert set(label["covers"].split(", ")) == {
        name for name, spots in STORES.items() if any(spot[0] != "$" for spot in spots)
    }


@needs_bwrap
def test_what_an_order_opens_is_open_and_said(run: Run) -> None:
    said, label = run("cat ~/.npmrc ~/.git-credentials", credentials=["npm", "git"])
    assert said.count(SECRET) >= 2
    assert label["state"] == "partial"
    assert label["gap"] == "left open to this host: git, npm"
    assert "npm" not in label["covers"].split(", ")


@needs_bwrap
def test_what_a_backend_opens_is_open_and_said(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "backplane.toml"
    file.write_text('[backends.mine]\nhost = "shell"\ncredentials = ["ssh"]\nwritable = ["~/.config/op"]\n')
    work = tmp_path / "work"
    work.mkdir()
    words = ["run", "--config", str(file), "--backend", "mine", "--root", str(work), "--json", "cat ~/.ssh/key"]
    done = backplane(*words, home=home)
    assert SECRET in done.stdout
    assert "left open to this host: ssh, 1password" in done.stdout


@needs_bwrap
@pytest.mark.parametrize("words", [["--in-place"], []])
def test_a_workspace_that_has_stores_in_it_shows_none(run: Run, home: Path, words: list[str]) -> None:
    (home / "notes.txt").write_text("kept\n")
    said, label = run(
        f"pwd; grep -rls {SECRET} . | sort; cat notes.txt */notes.txt; true",
        *words,
        root=home.parent,
    )
    assert "kept" in said
    assert SECRET not in said.replace(f"grep -rls {SECRET}", "")
    assert not any(f"{spot}\\n" in said for spot in SPOTS)
    assert label["state"] == "enforced"


@needs_bwrap
def test_who_asks_to_work_in_a_store_works_there(run: Run, home: Path) -> None:
    said, label = run("cat key", "--in-place", root=home / ".ssh")
    assert SECRET in said
    assert label["gap"] == "left open to this host: ssh"


def test_a_run_without_isolation_says_that_nothing_covers_them(run: Run) -> None:
    said, label = run("cat ~/.ssh/key", "--isolation", "off")
    assert SECRET in said
    assert label == {"state": "none"}


@pytest.mark.parametrize(
    ("asked", "words"),
    [(["gti"], "did you mean 'git'?"), ("git", "a list")],
)
def test_a_store_that_is_not_known_is_refused(home: Path, tmp_path: Path, asked: Any, words: str) -> None:
    order = {
        "task": "true",
        "workspace": {"root": str(tmp_path)},
        "config": {"vendor": {"abp": {"credentials": asked}}},
    }
    done = backplane("run", "--backend", "shell", "--isolation", "off", "--order", "-", home=home, given=order)
    assert done.returncode == 4
    assert "policy_invalid" in done.stderr
    assert words in done.stderr
    file = tmp_path / "backplane.toml"
    file.write_text(f"[backends.mine]\nhost = 'shell'\ncredentials = {asked!r}\n")
    done = backplane("run", "--config", str(file), "--backend", "mine", "true", home=home)
    assert done.returncode in (2, 4)
    assert "credentials" in done.stderr


@pytest.mark.parametrize("spot", sorted(spot for spots in STORES.values() for spot in spots if spot[0] == "$"))
def test_a_store_that_a_variable_moves_is_found(spot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variable, slash, rest = spot[1:].partition("/")
    moved = tmp_path / "moved"
    path = moved / rest if slash else moved
    path.parent.mkdir(exist_ok=True)
    path.write_text(SECRET)
    monkeypatch.setenv(variable, str(moved))
    assert cover("/w", (), (), (str(tmp_path),), ()).places == {str(path): False}
    assert cover("/w", (), (), (str(tmp_path),), (), {str(moved), str(path)}).places == {}, "the host was given it"


def test_a_store_is_found_behind_a_link_and_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / ".aws").symlink_to("real")
    found = cover("/w", (), (), (str(tmp_path), str(tmp_path)), ())
    assert found == Covered({str(tmp_path / "real"): True}, ("aws",))


@pytest.mark.parametrize("name", PROFILES)
def test_a_shipped_profile_is_the_file_of_its_name(name: str) -> None:
    file = resources.find("contracts") / "examples" / "policy" / f"{name}.json"
    members = json.loads(file.read_text())
    assert {key: tuple(value) for key, value in members.items()} == {
        key: getattr(PROFILES[name], key) for key in PROFILES[name].__struct_fields__
    }
