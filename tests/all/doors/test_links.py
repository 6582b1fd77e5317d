"""A rule on a path holds for the path in the workspace and for what it leads to: rules × links × tools × isolation."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backplane.contract.work import PolicyProfile
from backplane.errors import CapabilityError
from backplane.policy.rules import compile_policy
from backplane.sandbox import mounts
from backplane.tools.places import ToolRefused, Tree
from tests.all.doors.test_contain import TRY, control
from tests.runs import go, order, script

pytestmark = [pytest.mark.anyio]

SECRET = "S=topsecretvalue\n"


@pytest.fixture
def ground(beside_tmp: Path) -> Path:
    folder = beside_tmp
    (folder / "work").mkdir()
    (folder / "work/a.txt").write_text("a\n")
    (folder / "common/deep").mkdir(parents=True)
    (folder / "common/env").write_text(SECRET)
    (folder / "common/deep/x.pem").write_text(SECRET)
    (folder / "common/deep/y.txt").write_text("open\n")
    return folder


Link = Callable[[Path], str]
"""Makes a link in the ground's folder `work`, and gives the path that is read."""


def to(target: str, name: str = ".env", read: str = "") -> Link:
    def make(ground: Path) -> str:
        (ground / "work" / name).symlink_to(target.replace("GROUND", str(ground)))
        return read or name

    return make


def chain(ground: Path) -> str:
    (ground / "work/.env").symlink_to("middle")
    (ground / "work/middle").symlink_to(ground / "far")
    (ground / "far").symlink_to("common/env")
    return ".env"


def inside(ground: Path) -> str:
    (ground / "work/conf").mkdir()
    (ground / "work/conf/dev").write_text(SECRET)
    (ground / "work/.env").symlink_to("conf/dev")
    return ".env"


def around(ground: Path) -> str:
    (ground / "work/up").symlink_to(ground)
    (ground / ".env").write_text(SECRET)
    return "up/.env"


def below_two(ground: Path) -> str:
    (ground / "work/first").symlink_to(ground / "common")
    (ground / "common/second").symlink_to(ground / "other")
    (ground / "other").mkdir()
    (ground / "other/z.pem").write_text(SECRET)
    return "first/second/z.pem"


LINKS: dict[str, Link] = {
    "absolute": to("GROUND/common/env"),
    "chain": chain,
    "inside": inside,
    "folder that the rule names": to("GROUND/common", ".env.d", ".env.d/env"),
    "folder with what it names": to("GROUND/common", "certs", "certs/deep/x.pem"),
    "folder within": to("GROUND/common/deep", "keys", "keys/x.pem"),
    "folder around": around,
    "link behind a link": below_two,
}
RULES = {
    "anywhere": ("**/.env*", "**/*.pem"),
    "at its place": (".env", ".env.d/**", "certs/deep/x.pem", "keys/*.pem", "up/.env", "first/second/*"),
}


@pytest.mark.needs("bwrap")
@pytest.mark.parametrize(
    ("rules", "mode", "isolation"),
    [("anywhere", "staged", "required"), ("at its place", "pass_through", "best_effort")],
)
@pytest.mark.parametrize("link", LINKS)
async def test_a_command_cannot_read_by_a_link_what_a_rule_forbids(
    rules: str, link: str, mode: str, isolation: str, ground: Path, backplane_home: Path, tmp_path: Path
) -> None:
    path = LINKS[link](ground)
    said: list[Any] = []
    for policy in (PolicyProfile(), PolicyProfile(deny_read=RULES[rules])):
        body = f"{TRY}\nput(event(run, str([read({path!r}), read('a.txt')]))); put(final(run)); end()"
        async with control(backplane_home, isolation=isolation) as plane:
            run, events = await go(plane, order(ground / "work", mode=mode, policy=policy), script(tmp_path, body))
        assert run.error is None, run.error
        said += [event.text for event in events if hasattr(event, "text")]
    assert said[0] == str([SECRET, "a\n"])
    assert said[1] in (str(["EACCES", "a\n"]), str(["ENOENT", "a\n"]))


@pytest.mark.needs("bwrap")
async def test_a_relative_link_is_followed_from_the_original(
    ground: Path, backplane_home: Path, tmp_path: Path
) -> None:
    (ground / "work/.env").symlink_to("../common/env")
    env = str(ground / "common/env")
    body = f"{TRY}\nput(event(run, str([read('.env'), read({env!r})]))); put(final(run)); end()"
    policy = PolicyProfile(deny_read=("**/.env",))
    async with control(backplane_home) as plane:
        run, events = await go(plane, order(ground / "work", mode="staged", policy=policy), script(tmp_path, body))
    assert run.error is None, run.error
    assert [event.text for event in events if hasattr(event, "text")] == [str(["ENOENT", "EACCES"])]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("rules", RULES)
def test_our_own_tools_refuse_the_same_paths(link: str, rules: str, ground: Path) -> None:
    path = LINKS[link](ground)
    tree = Tree(str(ground / "work"), compile_policy(PolicyProfile(deny_read=RULES[rules], deny_write=RULES[rules])))
    with pytest.raises(ToolRefused):
        tree.read(path)
    with pytest.raises(ToolRefused):
        tree.write(path, b"x")
    assert tree.read("a.txt") == b"a\n"


def work_out(ground: Path, **lists: tuple[str, ...]) -> mounts.Masks:
    return mounts.work_out(PolicyProfile(**lists), str(ground / "work"), (), ())


@pytest.mark.parametrize(
    ("target", "hidden"),
    [
        ("GROUND/gone", ()),
        (".env", ()),
        ("/dev/null", ()),
        ("/proc/self/environ", ()),
        ("GROUND/common/env", ("common/env",)),
        ("GROUND/common/deep", ("common/deep",)),
        ("a.txt", ("work/a.txt",)),
    ],
)
def test_a_link_is_covered_where_something_is_there(target: str, hidden: tuple[str, ...], ground: Path) -> None:
    to(target)(ground)
    found = work_out(ground, deny_read=("**/.env",))
    assert (set(found.hidden), found.complete, found.uncovered) == ({str(ground / path) for path in hidden}, True, ())


@pytest.mark.parametrize("target", [".", "..", "/", "GROUND"])
@pytest.mark.parametrize("isolation", ["best_effort", "required"])
@pytest.mark.needs("bwrap")
async def test_a_link_around_the_workspace_is_refused_or_named(
    target: str, isolation: str, ground: Path, backplane_home: Path, tmp_path: Path
) -> None:
    to(target)(ground)
    body = f"{TRY}\nput(event(run, str(read('a.txt')))); put(final(run)); end()"
    todo = order(ground / "work", policy=PolicyProfile(deny_read=("**/.env",)))
    async with control(backplane_home, isolation=isolation) as plane:
        run, _ = await go(plane, todo, script(tmp_path, body))
    if isolation == "required":
        assert isinstance(run.error, CapabilityError)
        assert "'.env' is a link to a folder around the workspace" in run.error.message
        return
    assert run.error is None
    (row,) = [row for row in run.receipt.backplane["enforcement"]["rules"] if row["rule"] == "deny_read"]
    assert f"{mounts.LINKS}: .env" in row["gap"]


def test_too_many_files_behind_a_link_are_a_gap(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "LINKED_FILES_MAX", 3)
    to("GROUND/common", "data")(ground)
    (ground / "work/.env").write_text(SECRET)
    found = work_out(ground, deny_read=("**/.env", "**/*.pem"))
    assert (found.complete, found.uncovered) == (True, ("data",))
    assert str(ground / "work/.env") in found.hidden


def test_links_in_a_circle_come_to_an_end(ground: Path) -> None:
    for name, target in (("one", "GROUND/common"), ("self", "."), ("up", "..")):
        to(target, name)(ground)
    (ground / "common/back").symlink_to(ground / "work")
    (ground / "common/self").symlink_to(".")
    found = work_out(ground, deny_read=("**/*.pem", "one/**/x"))
    assert (set(found.hidden), found.uncovered) == ({str(ground / "common/deep/x.pem")}, ())


def test_what_a_link_leads_to_may_not_be_written_either(ground: Path) -> None:
    inside(ground)
    found = work_out(ground, deny_write=(".env",))
    assert ("--ro-bind", str(ground / "work/conf/dev")) == found.options[-3:-1]
    assert found.unmatched == (".env",), "the link itself can be replaced"
    assert os.path.islink(ground / "work/.env")


def test_a_second_name_of_a_file_is_another_path(ground: Path) -> None:
    (ground / "work/.env").hardlink_to(ground / "common/env")
    found = work_out(ground, deny_read=("**/.env",))
    assert found.hidden == {str(ground / "work/.env")}
