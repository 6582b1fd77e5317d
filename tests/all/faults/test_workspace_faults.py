"""Section Workspace of the fault catalogue: hostile trees, hostile paths, hostile git, end to end."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
from pathlib import Path

import pytest

from tests.all.faults import hosts
from tests.all.faults.ground import GRACE_S, LADDER_S, OFF, Ground, leftovers

STOP_S = GRACE_S + LADDER_S
GOOD = "hello(); take(); os.chdir(RUN['work_order']['workspace']['root']); {body}\nevent(); final(); rest()"


def listing(root: Path) -> dict[str, str]:
    """Everything in a folder with its content, links and special files by name alone."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        found[name] = os.readlink(path) if path.is_symlink() else path.read_text("latin-1") if path.is_file() else "/"
    return found


# F42: out of the workspace --------------------------------------------------------------------------------------------


@pytest.fixture
def outside(ground: Ground) -> Path:
    """A neighbour whose name begins like the workspace's, with something to steal and to spoil."""
    folder = ground.folder / "work-evil"
    folder.mkdir()
    (folder / "secret").write_text("the secret of the neighbour\n")
    return folder


def test_f42_links_are_copied_as_links_and_what_they_lead_to_stays(ground: Ground, outside: Path) -> None:
    (ground.work / "out").symlink_to(outside)
    (ground.work / "file").symlink_to(outside / "secret")
    (ground.work / "up").symlink_to("../work-evil/secret")
    os.link(outside / "secret", ground.work / "hard")
    before = listing(outside), listing(ground.work)
    body = """
open("hard", "w").write("spoilt")
os.unlink("file"); open("file", "w").write("mine")
os.unlink("out"); os.mkdir("out"); open("out/secret", "w").write("mine")
"""
    ended = ground.run(GOOD.format(body=body))
    assert not ground.amiss(ended, outcome="complete", accepted=1)
    assert (listing(outside), listing(ground.work)) == before
    assert "the secret of the neighbour" not in json.dumps(ended.receipt["verification"]).replace("-the secret", "")


def test_f42_a_link_planted_in_the_stage_is_not_followed_by_the_diff(ground: Ground, outside: Path) -> None:
    body = (
        f"os.symlink({str(outside)!r}, 'planted'); os.unlink('a.txt'); os.symlink({str(outside / 'secret')!r}, 'a.txt')"
    )
    ended = ground.run(GOOD.format(body=body))
    assert not ground.amiss(ended, outcome="complete", accepted=1)
    assert "the secret of the neighbour" not in ended.stdout.decode()
    run_id = ended.messages[-1]["ref_id"]
    applied = ground.call("apply", run_id)
    assert applied.code in (0, 1), applied.stderr
    assert listing(outside) == {"secret": "the secret of the neighbour\n"}


@pytest.mark.parametrize("name", ["{outside}/secret", "sub/../../work-evil/secret", "out/secret"])
def test_f42_a_patch_that_reaches_outside_is_refused_by_apply(ground: Ground, outside: Path, name: str) -> None:
    (ground.work / "out").symlink_to(outside)
    ended = ground.run(GOOD.format(body="open('a.txt', 'w').write('two\\n')"))
    assert not ground.amiss(ended, outcome="complete", accepted=1)
    run_id = ended.messages[-1]["ref_id"]
    patch = ground.home / "runs" / run_id / "patch.diff"
    patch.write_bytes(patch.read_bytes().replace(b"a.txt", name.format(outside=outside).encode()))
    applied = ground.call("apply", run_id)
    assert applied.code != 0
    assert b"Traceback" not in applied.stderr
    assert listing(outside) == {"secret": "the secret of the neighbour\n"}


@pytest.mark.parametrize("pattern", ["../work-evil/**", "/etc/**"])
def test_f42_globs_reach_nothing_outside(ground: Ground, outside: Path, pattern: str) -> None:
    ended = ground.run(GOOD.format(body="print(sorted(os.listdir('.')), file=sys.stderr)"), "--include", pattern)
    assert ended.left == []
    assert b"Traceback" not in ended.stderr
    assert b"secret" not in ended.stdout


def test_f42_a_host_that_swaps_its_workspace_for_a_link_loses_its_result_and_nothing_else(
    ground: Ground, outside: Path
) -> None:
    body = f"root = os.getcwd(); os.chdir('/'); os.rename(root, root + '-gone'); os.symlink({str(outside)!r}, root)"
    ended = ground.run(GOOD.format(body=body), env=OFF)
    assert not ground.amiss(ended, code="execution_workspace_error", outcome="partial", accepted=1, exit_code=3)
    assert listing(outside) == {"secret": "the secret of the neighbour\n"}
    assert "the secret of the neighbour" not in ended.stdout.decode()


@pytest.mark.parametrize("option", ["--receipt", "--patch"])
def test_a_copy_of_the_result_goes_to_no_place_that_a_host_chose(ground: Ground, outside: Path, option: str) -> None:
    copy = ground.work / "copy"
    copy.write_text("old")
    body = f"os.unlink('copy'); os.symlink({str(outside / 'secret')!r}, 'copy')"
    ended = ground.run(GOOD.format(body=body), "--in-place", option, str(copy), env=OFF)
    assert (ended.code, ended.stderr) == (0, b"")
    assert listing(outside) == {"secret": "the secret of the neighbour\n"}
    assert not copy.is_symlink()
    assert sorted(os.listdir(ground.work)) == ["a.txt", "copy"]


@pytest.mark.parametrize("mode", ["staged", "pass_through"])
def test_a_copy_that_is_to_be_made_is_not_seen_by_the_agent(ground: Ground, mode: str) -> None:
    seen = ground.folder / "seen"
    body = f"open({str(seen)!r}, 'w').write(' '.join(sorted({{*os.listdir()}} - {{'.git'}})))"
    copies = ("--receipt", str(ground.work / "r.json"), "--patch", str(ground.work / "p.diff"))
    ended = ground.run(GOOD.format(body=body), *(["--in-place"] if mode == "pass_through" else []), *copies, env=OFF)
    assert (ended.code, seen.read_text()) == (0, "a.txt")
    assert sorted(os.listdir(ground.work)) == ["a.txt", "p.diff", "r.json"]


@pytest.mark.parametrize("name", ["/dev/stdout", "-"])
def test_a_copy_to_stdout_comes_after_what_is_there(ground: Ground, name: str) -> None:
    log = ground.folder / "log"
    log.write_text("earlier\n")
    for _ in range(2):
        with log.open("ab") as file:
            body = "open('b.txt', 'w').write('new\\n')"
            words = ("run", "do it", "--sidecar", ground.host(GOOD.format(body=body)), "--patch", name)
            assert ground.start(*words, stdout=file, env=OFF).end().code == 0
    text = log.read_text()
    assert text.startswith("earlier\n")
    assert text.count("+new\n") == 2
    assert text.count("complete") >= 2


def test_a_copy_never_comes_between_the_messages_of_json(ground: Ground) -> None:
    ended = ground.run(hosts.GOOD, "--receipt", "-")
    assert (ended.code, ended.fatal) == (2, "config_invalid")
    assert ended.stderr.startswith(b"usage_invalid: ")
    assert b"--json" in ended.stderr


def test_a_copy_that_cannot_be_written_takes_no_end_away(ground: Ground) -> None:
    ended = ground.run(hosts.GOOD, "--receipt", "/dev/full")
    assert (ended.code, ended.error) == (1, "receipt_store_failed")
    assert [message["t"] for message in ended.messages] == ["event", "event", "final"]
    assert not ground.amiss(ended, code="receipt_store_failed", outcome="complete", exit_code=1, accepted=2)


def test_a_command_that_is_refused_leaves_no_empty_copy(ground: Ground) -> None:
    copy = ground.folder / "copy.json"
    ended = ground.run(hosts.GOOD, "--receipt", str(copy), "--patch", str(ground.folder / "no" / "folder"))
    assert (ended.code, copy.exists()) == (2, False)


# F44: git's own programs ----------------------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=folder, check=True, capture_output=True
    )


def trap(folder: Path) -> Path:
    """A program that notes that it was run; every trap names it."""
    path = folder / "trap.sh"
    path.write_text(f'#!/bin/sh\necho "$0 $*" >> {shlex.quote(str(folder / "sprung"))}\n')
    path.chmod(0o755)
    return path


def set_traps(repository: Path, program: Path) -> None:
    """Set every way known in which a repository names a program that git runs."""
    settings = {
        "core.fsmonitor": str(program),
        "core.hooksPath": str(repository / "hooks"),
        "filter.evil.clean": str(program),
        "filter.evil.smudge": str(program),
        "filter.evil.process": str(program),
        "filter.evil.required": "true",
        "diff.evil.textconv": str(program),
        "diff.evil.command": str(program),
        "diff.external": str(program),
        "merge.evil.driver": str(program),
        "core.pager": str(program),
        "core.editor": str(program),
        "core.sshCommand": str(program),
        "gpg.program": str(program),
        "credential.helper": str(program),
        "alias.diff": f"!{program}",
        "alias.status": f"!{program}",
    }
    for name, value in settings.items():
        git(repository, "config", name, value)
    (repository / "hooks").mkdir(exist_ok=True)
    for name in (
        "pre-commit",
        "post-checkout",
        "post-index-change",
        "pre-applypatch",
        "post-applypatch",
        "reference-transaction",
    ):
        for folder in (repository / "hooks", repository / ".git" / "hooks"):
            folder.mkdir(exist_ok=True)
            hook = folder / name
            hook.write_text(program.read_text())
            hook.chmod(0o755)
    (repository / ".gitattributes").write_text("* filter=evil diff=evil merge=evil\n")


@pytest.mark.parametrize("lane", ["patch_first", "workspace_first"])
@pytest.mark.parametrize("mode", ["staged", "pass_through"])
def test_f44_no_program_of_a_tree_or_of_the_user_is_run(ground: Ground, mode: str, lane: str) -> None:
    program = trap(ground.folder)
    git(ground.work, "init", "-q", "-b", "main")
    git(ground.work, "add", "-A")
    git(ground.work, "commit", "-q", "-m", "start")
    nested = ground.work / "nested"
    nested.mkdir()
    git(nested, "init", "-q", "-b", "main")
    (nested / "n.txt").write_text("n\n")
    set_traps(nested, program)
    set_traps(ground.work, program)
    (ground.work / "submodule").mkdir()
    (ground.work / "submodule" / ".git").write_text(f"gitdir: {nested / '.git'}\n")
    (ground.folder / ".gitconfig").write_text(
        f"[core]\n\tfsmonitor = {program}\n\thooksPath = {ground.work / 'hooks'}\n"
    )
    spring = ground.folder / "sprung"
    spring.unlink(missing_ok=True)
    body = f"""
open("a.txt", "w").write("two\\n"); open("new.txt", "w").write("new\\n")
os.makedirs("fresh/.git/hooks", exist_ok=True)
open("fresh/.git/config", "w").write("[core]\\n\\tfsmonitor = {program}\\n\\trepositoryformatversion = 0\\n")
open("fresh/.git/HEAD", "w").write("ref: refs/heads/main\\n")
[os.makedirs("fresh/.git/" + name) for name in ("refs", "objects")]
open("fresh/f.txt", "w").write("f\\n")
if os.path.isdir(".git"):
    open(".git/config", "a").write("[core]\\n\\tfsmonitor = {program}\\n[diff]\\n\\texternal = {program}\\n")
"""
    words = (*["--in-place"][: mode == "pass_through"], *["--apply"][: lane == "workspace_first"])
    ended = ground.run(GOOD.format(body=body), *words, env=OFF | {"HOME": str(ground.folder)})
    assert not ground.amiss(ended, outcome="complete", accepted=1, bound_s=2.0)
    assert "new.txt" in ended.receipt["verification"]["git_diff"]
    if mode == "staged" and lane == "patch_first":
        applied = ground.call("apply", ended.messages[-1]["ref_id"], env={"HOME": str(ground.folder)})
        assert applied.code == 0, applied.stderr
        assert (ground.work / "new.txt").exists()
    sprung = spring.read_text().splitlines() if spring.exists() else []
    assert sprung == []
    # The traps are real: git as everybody calls it springs them.
    subprocess.run(
        ["git", "status"],
        cwd=ground.work,
        capture_output=True,
        env={**os.environ, "HOME": str(ground.folder)},
        check=False,
    )
    assert spring.exists()
    leftovers(set())


# F45: odd trees -------------------------------------------------------------------------------------------------------


def test_f45_special_files_odd_names_holes_and_depth_are_survived(ground: Ground) -> None:
    work = ground.work
    os.mkfifo(work / "fifo")
    speaker = socket.socket(socket.AF_UNIX)
    here = os.open(".", os.O_RDONLY)
    os.chdir(work)
    speaker.bind("sock")
    os.chdir(here)
    os.close(here)
    (work / "loop").symlink_to("loop")
    (work / "round").symlink_to(".")
    for name in (b"new\nline", b"\xff\xfe", b"\x1b[31m", b" ", b"-rf", b"\"quote'", "grün".encode(), b"a" * 255):
        with open(os.path.join(os.fsencode(work), name), "wb") as file:
            file.write(b"odd\n")
    with (work / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    deep = os.open(work, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=deep)
        inner = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = inner
    os.close(deep)
    ended = ground.run(GOOD.format(body=r"open(b'\x1b[32m', 'w').write('new\n')"))
    speaker.close()
    assert not ground.amiss(ended, outcome="complete", accepted=1, bound_s=5.0)
    assert b"\x1b" not in ended.stderr
    assert b"\x1b" not in ground.call("receipts", "show", ended.messages[-1]["ref_id"]).stdout
    # So deep that not every tool can remove it.
    subprocess.run(["rm", "-rf", str(work / "d")], check=True)


def test_f45_what_a_host_leaves_in_its_stage_goes_whatever_its_modes(ground: Ground) -> None:
    body = """
os.mkdir("shut"); open("shut/file", "w").write("x"); os.chmod("shut/file", 0); os.chmod("shut", 0)
os.mkdir("fixed"); open("fixed/file", "w").write("x"); os.chmod("fixed", 0o555)
os.mkfifo("fifo"); os.symlink("nowhere", "dangling")
"""
    ended = ground.run(GOOD.format(body=body))
    assert ended.error in (None, "execution_workspace_error"), ended.stderr
    assert ended.left == []
    assert not ground.litter()


@pytest.mark.skipif(os.geteuid() == 0, reason="as root no mode stops anybody; see `test_ordinary_user`")
def test_f45_a_tree_that_may_not_be_read_is_named_and_nothing_stays(ground: Ground) -> None:
    shut = ground.work / "shut"
    shut.mkdir()
    (shut / "file").write_text("x")
    shut.chmod(0)
    try:
        ended = ground.run(GOOD.format(body="pass"))
        assert not ground.amiss(ended, code="workspace_staging_failed", accepted=0, bound_s=STOP_S)
        assert b"shut" in ended.stderr
    finally:
        shut.chmod(0o700)


# F46: quotas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("BACKPLANE_WORKSPACE_BYTES_MAX", "100000"), ("BACKPLANE_WORKSPACE_FILES_MAX", "50")]
)
def test_f46_a_tree_over_its_quota_is_refused_and_the_disk_is_as_before(ground: Ground, name: str, value: str) -> None:
    for number in range(100):
        (ground.work / f"f{number}").write_bytes(b"x" * 2000)
    ended = ground.run(GOOD.format(body="pass"), env={name: value})
    assert not ground.amiss(ended, code="workspace_staging_failed", accepted=0, bound_s=STOP_S)
    assert value.encode() in ended.stderr.replace(b",", b"") or b"KiB" in ended.stderr or b"files" in ended.stderr


def test_f46_a_result_over_its_quota_is_an_error_and_the_disk_is_as_before(ground: Ground) -> None:
    body = "for n in range(200):\n    open(f'big{n}', 'wb').write(os.urandom(2000))"
    ended = ground.run(GOOD.format(body="\n" + body), env={"BACKPLANE_WORKSPACE_BYTES_MAX": "100000"})
    assert not ground.amiss(ended, code="execution_workspace_error", outcome="partial", accepted=1, exit_code=3)


# Of the same classes -----------------------------------------------------------------------------------------------

ROOT = 'root = RUN["work_order"]["workspace"]["root"]; os.chdir(root)\n'


@pytest.mark.parametrize(
    "to", ["import shutil; shutil.rmtree(root)", "os.rename(root, root + '.x'); os.symlink('{outside}', root)",
           "os.rename(root, root + '.x'); open(root, 'w').write('x')"], ids=["nothing", "a link", "a file"]
)  # fmt: skip
def test_a_stage_that_is_replaced_is_a_lost_patch_and_nothing_else(ground: Ground, outside: Path, to: str) -> None:
    to = to.format(outside=outside)
    ended = ground.run("hello(); take()\n" + ROOT + f"os.chdir('/'); {to}; final(); rest()", env=OFF)
    assert (ended.error, ended.code, ended.left) == ("execution_workspace_error", 3, [])
    assert ended.own["end"]["reason"] == "partial"
    assert listing(outside) == {"secret": "the secret of the neighbour\n"}
    assert not ground.litter()
