"""Members of an order that are not known here: no misspelt rule runs a command, by any door; the rest is reported."""

from __future__ import annotations

import json
import subprocess
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backplane
from backplane.contract.unknown import check_settings, keep_unknown, read_work_order, unknown_members
from backplane.contract.work import SETTINGS, RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import ConfigError, PolicyError
from backplane.policy.rules import PROFILES, unknown_tools, unmatched_paths
from backplane.schemas.validate import validate
from tests.in_process import in_process
from tests.peers import ROOT, Child, run
from tests.queues import needs_queue
from tests.served import SERVE

LETTERS = st.sampled_from("abcdefghijklmnopqrstuvwxyz_")


def structs(shape: Any, pointer: str = "") -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Every struct below a struct of the order, with an example of the pointer at which it stands."""
    yield pointer, shape
    for name, hint in typing.get_type_hints(shape).items():
        inner, place = hint, f"{pointer}/{name}"
        if typing.get_origin(hint) is tuple:
            inner, place = typing.get_args(hint)[0], f"{place}/0"
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            yield from structs(inner, place)


STRUCTS = dict(structs(WorkOrder))
CLOSED = [place for place in STRUCTS if place.split("/")[1:2] in (["policy"], ["requirements"], ["workspace"])]
WATCHED = ["", "/config", *CLOSED]
MEMBERS = [
    (place, name)
    for place in WATCHED
    for name in STRUCTS[place].__struct_fields__
    if name != "task" and (place in CLOSED or len(name) >= 4)
]


def with_member(place: str, name: str, value: Any) -> dict[str, Any]:
    """An order that has this member, and nothing else but its task."""
    member: Any = {name: value}
    for key in reversed(place.split("/")[1:]):
        member = [member] if key == "0" else {key: member}
    return {"task": "touch ran", **member}


@st.composite
def edited(draw: st.DrawFn, name: str) -> str:
    """A name with one letter lost, added, changed, or exchanged with the next one."""
    at = draw(st.integers(0, len(name) - 1))
    how = draw(st.sampled_from(["lose", "add", "change", "exchange"]))
    letter = draw(LETTERS)
    return {
        "lose": name[:at] + name[at + 1 :],
        "add": name[:at] + letter + name[at:],
        "change": name[:at] + letter + name[at + 1 :],
        "exchange": name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
    }[how]


@pytest.mark.parametrize(("place", "name"), MEMBERS, ids=lambda part: str(part) or "/")
@settings(max_examples=20)
@given(data=st.data())
def test_no_order_is_taken_with_a_member_that_is_misspelt_by_one_letter(
    place: str, name: str, data: st.DataObject
) -> None:
    wrong = data.draw(edited(name).filter(lambda it: it and it not in STRUCTS[place].__struct_fields__))
    with pytest.raises(PolicyError) as raised:
        read_work_order(with_member(place, wrong, []))
    assert (raised.value.code, raised.value.facts.exit_code) == ("policy_invalid", 4)
    assert f"{place}/{wrong} is no member of an order: " in raised.value.message


@pytest.mark.parametrize("place", CLOSED)
@settings(max_examples=20)
@given(name=st.text(LETTERS, min_size=1))
def test_no_order_is_taken_with_any_unknown_member_where_rules_and_places_stand(place: str, name: str) -> None:
    if name not in STRUCTS[place].__struct_fields__:
        with pytest.raises(PolicyError):
            read_work_order(with_member(place, name, ["x"]))


@pytest.mark.parametrize("place", STRUCTS)
def test_every_struct_of_an_order_is_looked_at(place: str) -> None:
    found = [one.pointer for one, _ in unknown_members(with_member(place, "zzz~/q", 1))]
    assert found == [f"{place}/zzz~0~1q"]


@given(data=st.data(), name=st.sampled_from(sorted(SETTINGS)), flat=st.booleans())
def test_a_misspelt_setting_of_ours_is_refused_however_it_is_given(data: st.DataObject, name: str, flat: bool) -> None:
    wrong = data.draw(edited(name).filter(lambda it: it and it not in SETTINGS))
    vendor = {f"abp.{wrong}": 1} if flat else {"abp": {wrong: 1}}
    with pytest.raises(PolicyError, match=r"/config/vendor/abp"):
        check_settings(WorkOrder("t", config=RuntimeConfig(vendor=vendor)))


def test_a_right_name_beside_it_makes_a_like_one_a_strangers() -> None:
    order = read_work_order({"task": "t", "lane": "patch_first", "lanes": 3, "config": {"model": "m", "models": ["m"]}})
    assert order.abp("unheard") == {"/lanes": 3, "/config/models": ["m"]}
    check_settings(order)


def test_an_order_goes_on_with_what_is_not_known_of_it() -> None:
    known = {"task": "t", "context": {"snippets": [{"name": "n", "content": "c", "tint": 1}]}, "colour": "red"}
    order = read_work_order(known)
    assert order.abp("unheard") == {"/context/snippets/0/tint": 1, "/colour": "red"}
    # One control plane below another: nothing is lost, and nothing doubled.
    assert read_work_order({**json.loads(msgspec.json.encode(order)), "shade": 2}).abp("unheard") == {
        **order.abp("unheard"),
        "/shade": 2,
    }
    plain = {"task": "t", "config": {"vendor": {"x": {"y": 1}}}}
    assert keep_unknown(plain) is plain


@pytest.mark.parametrize("lenient", [1, "true", None, [True]])
def test_lenient_is_true_or_false(lenient: Any) -> None:
    with pytest.raises(PolicyError, match="neither true nor false"):
        check_settings(read_work_order({"task": "t", "config": {"vendor": {"abp": {"lenient": lenient}}}}))


SHAPED = [name for name, shape in SETTINGS.items() if shape is not Any]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", SHAPED)
def test_a_setting_of_another_shape_is_refused_and_found_by_validate(name: str, flat: bool) -> None:
    for wrong in (1.5, "pasthrough" if name != "system" else 1, None):
        vendor: dict[str, Any] = {f"abp.{name}": wrong} if flat else {"abp": {name: wrong}}
        order = {"task": "t", "config": {"vendor": vendor}}
        found = validate(json.dumps(order).encode(), "-")
        if wrong is None or (wrong == "pasthrough" and SETTINGS[name] in (str, str | dict[str, Any])):
            assert found.valid, found
            check_settings(read_work_order(order))
            continue
        pointer = f"/config/vendor/abp.{name}" if flat else f"/config/vendor/abp/{name}"
        assert [one.pointer for one in found.findings if not one.note] == [pointer]
        with pytest.raises(ConfigError, match=name):
            check_settings(read_work_order(order))


def test_a_choice_that_is_none_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'pasthrough' is none of 'mapped', 'passthrough'"):
        check_settings(read_work_order({"task": "t", "config": {"vendor": {"abp": {"mode": "pasthrough"}}}}))


# By every door -------------------------------------------------------------------------------------------------------

MISSPELT: dict[str, dict[str, Any]] = {
    "/policy/disallowed_tool": {"policy": {"disallowed_tool": ["bash"]}},
    "/polcy": {"polcy": {"disallowed_tools": ["bash"]}},
    "/workspace/exclud": {"workspace": {"exclud": ["*"]}},
    "/config/max_turn": {"config": {"max_turn": 1}},
    "/config/vendor/abp/isolaton": {"config": {"vendor": {"abp": {"isolaton": "required"}}}},
}
DOORS = pytest.mark.parametrize("pointer", MISSPELT)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def command(work: Path, *words: str, stdin: Any) -> subprocess.CompletedProcess[str]:
    return in_process(*words, cwd=work, stdin=json.dumps(stdin))


@pytest.mark.parametrize("pointer", list(MISSPELT)[:2])
def test_the_command_line_refuses_it_before_anything_ran(pointer: str, work: Path) -> None:
    order = {"task": "touch ran", **MISSPELT[pointer]}
    done = command(work, "run", "--backend", "shell", "--in-place", "--order", "-", stdin=order)
    assert (done.returncode, list(work.iterdir())) == (4, [])
    assert done.stderr.startswith(f"policy_invalid: {pointer} is no member of an order: ")
    found = command(work, "validate", "-", stdin=order)
    assert found.returncode == 1
    assert f"work_order: {pointer}: unknown member: an order with it is refused; " in found.stdout


def test_a_policy_file_with_a_misspelt_rule_is_answered_with_the_right_name(work: Path) -> None:
    wrong = {"disallowed_tool": ["bash"]}
    (work / "policy.json").write_text(json.dumps(wrong))
    done = command(work, "run", "--backend", "shell", "--policy", "policy.json", "touch ran", stdin="")
    assert (done.returncode, done.stderr.partition(":")[0]) == (4, "policy_invalid")
    assert "disallowed_tools" in done.stderr
    (found,) = validate(json.dumps(wrong).encode(), "-").findings
    assert found.pointer == "/disallowed_tool"


@DOORS
def test_serve_and_a_host_under_a_plain_control_plane_refuse_it(pointer: str, work: Path) -> None:
    message = run("r1", "touch ran", extensions=(), workspace={"root": str(work)})
    order = message["work_order"]
    # A client may leave out what it does not set; a misspelt name is one that stands in the place of a right one.
    del order["policy"], order["config"]["max_turns"]
    for name, member in MISSPELT[pointer].items():
        order[name] = {**order.get(name, {}), **member}
    for program in (SERVE, (sys.executable, "hosts/shell.py")):
        with Child(program, cwd=ROOT) as child:
            assert child.read(20)["t"] == "hello"
            child.send(message)
            child.close_stdin()
            answer = child.read(20)
            assert (answer["t"], answer["ref_id"], answer["error_code"]) == ("fatal", "r1", "policy_invalid"), answer
            assert pointer in answer["error"]
            assert child.read(20) is None
    assert list(work.iterdir()) == []


def test_the_python_api_refuses_a_misspelt_setting(work: Path) -> None:
    order = WorkOrder("touch ran", config=RuntimeConfig(vendor={"abp": {"isolaton": "required"}}))
    ended = backplane.run(order, backend="shell", root=work)
    assert (ended.error and ended.error.code, ended.receipt and ended.receipt.outcome) == ("policy_invalid", "failed")


def test_what_is_not_known_is_a_warning_and_stands_in_the_receipt(work: Path) -> None:
    order = {"task": "true", "colour": "red", "config": {"vendor": {"abp": {"pace": 1, "debug": True}}}}
    done = command(work, "run", "--backend", "shell", "--json", "--order", "-", stdin=order)
    assert done.returncode == 0, done.stderr
    *events, final = map(json.loads, done.stdout.splitlines())
    names = ["/colour", "/config/vendor/abp/debug", "/config/vendor/abp/pace"]
    assert [event["event"]["ext"]["unheard"] for event in events if "unheard" in event["event"].get("ext", {})] == [
        names
    ]
    assert final["receipt"]["usage_raw"]["backplane"]["unheard"] == names
    assert "lenient" not in final["receipt"]["usage_raw"]["backplane"]
    found = command(work, "validate", "-", stdin=order)
    assert found.returncode == 0
    assert [line.split(": ")[2:4] for line in found.stdout.splitlines()[1:]] == [["note", name] for name in names]


@pytest.mark.parametrize(
    "door", [("run", "--dry-run", "-b", "shell"), ("queue", "submit", "--root", ".")], ids=" ".join
)
def test_what_has_no_effect_is_told_where_the_order_is_not_run_here_and_now(work: Path, door: Sequence[str]) -> None:
    if door[0] == "queue":
        needs_queue()
    order = {"task": "true", "colour": "red", "policy": {"disallowed_tools": ["Bsh"]}}
    done = command(work, *door, "--order", "-", "--param", "abp.nosuch=1", stdin=order)
    assert done.returncode == 0, done.stderr
    assert "/colour, /config/vendor/abp/nosuch\n" in done.stderr
    assert "Bsh (bash?)" in done.stderr


def test_a_strangers_order_is_taken_where_it_is_said_and_the_receipt_says_so(work: Path) -> None:
    order = {"task": "true", **MISSPELT["/policy/disallowed_tool"]}
    done = command(work, "run", "--lenient", "--backend", "shell", "--json", "--order", "-", stdin=order)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])["receipt"]["usage_raw"]["backplane"]
    assert (said["unheard"], said["lenient"]) == (["/policy/disallowed_tool"], True)
    lenient = {**order, "config": {"vendor": {"abp": {"lenient": True}}}}
    assert validate(json.dumps(lenient).encode(), "-").valid


def test_tools_of_a_policy_that_nobody_knows_are_warned_of(work: Path) -> None:
    named = ["nosuchtool", "shell", "Bsh", "bash", "Bash", "web_*", "mcp__git__push"]
    profile = read_work_order({"task": "t", "policy": {"disallowed_tools": named}}).policy
    assert unknown_tools(profile) == {"nosuchtool": None, "shell": "bash", "Bsh": "bash"}
    assert [unknown_tools(shipped) for shipped in PROFILES.values()] == [{}] * len(PROFILES)
    words = ("run", "--backend", "shell", "--deny-tool", "shell", "true")
    done = command(work, *words, stdin="")
    assert "warning: tools of the policy that are not known here: shell (bash?)" in done.stdout


UNMATCHED = {
    "./.env": ".env",
    "sec/": "sec",
    "./sec/**": "sec/**",
    "a//b": "a/b",
    "~/.netrc": None,
    "../**": None,
    "{work}/.env": ".env",
}


def test_paths_that_no_file_of_a_workspace_has_are_warned_of(work: Path) -> None:
    named = {pattern.format(work=work): near for pattern, near in UNMATCHED.items()}
    rules = {
        "deny_read": [*named, "**/.env*", "/etc/shadow"],
        "disallowed_tools": ["Bash(git push:*)", "Write", "web_*"],
    }
    order = {"task": "true", "workspace": {"root": str(work), "exclude": ["/sec", "x/"]}, "policy": rules}
    done = command(work, "run", "--backend", "shell", "--json", "--order", "-", stdin=order)
    assert done.returncode == 0, done.stderr
    told = [line["event"].get("ext", {}) for line in map(json.loads, done.stdout.splitlines()) if line["t"] == "event"]
    assert [ext["unmatched_paths"] for ext in told if "unmatched_paths" in ext] == [{**named, "/sec": "sec", "x/": "x"}]
    assert [ext["unknown_tools"] for ext in told if "unknown_tools" in ext] == [{"Bash(git push:*)": "bash"}]
    notes = [fault.pointer for fault in validate(json.dumps(order).encode(), "-").findings if fault.note]
    paths = [f"/policy/deny_read/{place}" for place in range(len(named))]
    wanted = [*paths, "/policy/disallowed_tools/0", "/workspace/exclude/0", "/workspace/exclude/1"]
    assert sorted(notes) == sorted(wanted)
    well = read_work_order({"task": "t", "policy": {"deny_write": [".", "**/", "{a,b}/[!/]c", "sec", "sec/**"]}})
    assert not any(unmatched_paths(policy, WorkspaceSpec()) for policy in (well.policy, *PROFILES.values()))
