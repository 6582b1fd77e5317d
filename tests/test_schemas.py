"""The generated schemas: fresh, valid draft 2020-12, and as lenient or strict as they claim."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from backplane import resources
from backplane.agents.rows import taken
from backplane.contract.receipt import Receipt, Usage
from backplane.contract.work import WorkOrder
from backplane.schemas import build
from backplane.schemas.options import HOSTS
from backplane.upstream.presets import SETTABLE

EXAMPLES = resources.find("contracts") / "examples"
GOOD = sorted(path for path in EXAMPLES.glob("*/*.json") if path.parent.name != "bad")


def violations(name: str, document: Any) -> list[str]:
    validator = jsonschema.Draft202012Validator(json.loads(build.load_schema(name)))
    return ["/" + "/".join(map(str, error.absolute_path)) for error in validator.iter_errors(document)]


def test_the_written_files_are_those_of_today() -> None:
    assert build.stale() == []


@pytest.mark.parametrize("name", build.names())
def test_every_schema_is_a_valid_one_with_an_id_of_its_own(name: str) -> None:
    schema = json.loads(build.load_schema(name))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"].endswith(":" + name)
    assert build.render(name) == build.render(name) == build.load_schema(name)


@pytest.mark.parametrize("name", ["configuration", "policy"])
def test_each_property_of_a_file_that_people_write_is_described(name: str) -> None:
    schema = json.loads(build.load_schema(name))
    shapes = [schema, *schema.get("$defs", {}).values()]
    bare = [member for shape in shapes for member, told in shape["properties"].items() if not told.get("description")]
    assert bare == []
    assert len(shapes) > 7 if name == "configuration" else shapes == [schema]


def test_an_id_is_resolved_and_so_is_every_reference() -> None:
    for name in build.names():
        schema = json.loads(build.load_schema(name))
        assert build.load_schema(schema["$id"]) == build.load_schema(name)
        text = json.dumps(schema)
        for reference in set(re.findall(r'"\$ref": "([^"]*)"', text)):
            assert reference.removeprefix("#/$defs/") in schema["$defs"]


@pytest.mark.parametrize("path", GOOD, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_example_fits_its_schema(path: Any) -> None:
    assert violations(path.parent.name, json.loads(path.read_bytes())) == []


def test_every_schema_has_an_example() -> None:
    assert {path.parent.name for path in GOOD} == set(build.names())


def test_only_a_policy_a_configuration_and_a_session_refuse_unknown_members() -> None:
    closed = {name for name in build.names() if b'"additionalProperties": false' in build.load_schema(name)}
    assert closed == {"policy", "configuration", "session"} & set(build.names())


@pytest.mark.parametrize(
    ("kind", "name", "optional"),
    [
        ("work_order", "whole", set(WorkOrder.__struct_fields__) - {"task"}),
        ("receipt", "sealed", {"mode", "receipt_sha256"}),
    ],
)
def test_an_order_needs_its_task_alone_and_a_receipt_nearly_all(kind: str, name: str, optional: set[str]) -> None:
    whole = json.loads((EXAMPLES / f"{kind}/{name}.json").read_bytes())
    for member in whole:
        cut = {key: value for key, value in whole.items() if key != member}
        assert bool(violations(kind, cut)) == (member not in optional), member


def test_a_violation_inside_a_choice_is_named_where_it_is() -> None:
    receipt = json.loads((EXAMPLES / "receipt/sealed.json").read_bytes())
    receipt["trace"][3]["tool_name"] = 7
    assert violations("receipt", receipt) == ["/trace/3/tool_name"]


def test_what_a_real_run_writes_fits_what_we_say_we_write(tmp_path: Any) -> None:
    command = [sys.executable, "-m", "backplane", "run", "say hi", "--json", "--backend", "mock"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60)
    envelopes = [json.loads(line) for line in ran.stdout.splitlines()]
    assert envelopes[-1]["t"] == "final", ran.stderr
    assert violations("receipt", envelopes[-1]["receipt"]) == []
    assert set(envelopes[-1]["receipt"]) == set(Receipt.__struct_fields__) - {"ext"}
    for envelope in envelopes:
        assert violations(f"envelope_{envelope['t']}", envelope) == []


def test_stale_files_are_named_and_written_anew(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("schemas", "contracts/examples/policy"):
        (tmp_path / kind).mkdir(parents=True)
    (tmp_path / "schemas/old.json").write_text("{}")
    shutil.copy(resources.find("schemas") / "backplane.json", tmp_path / "schemas")
    monkeypatch.setattr(resources, "_PLACES", (tmp_path,))
    assert build.main(["--check"]) == 1
    assert "old.json is stale" in capsys.readouterr().err
    assert build.main([]) == 0
    assert build.main(["--check"]) == 0
    assert not (tmp_path / "schemas/old.json").exists()


def test_what_a_receipt_adds_is_described_to_its_last_member_or_said_to_be_open() -> None:
    def bare(schema: Any, at: str) -> Iterator[str]:
        if not isinstance(schema, dict):
            return
        if "object" in schema.get("type", ()) and not (schema.get("properties") or "additionalProperties" in schema):
            yield at
        if "array" in schema.get("type", ()) and "items" not in schema:
            yield at
        for name, member in schema.get("properties", {}).items():
            yield from bare(member, f"{at}.{name}")
        for below in ("items", "additionalProperties"):
            yield from bare(schema.get(below), f"{at}.{below}")

    added = build.build("backplane")
    assert list(bare(added, "$")) == []
    assert set(added["properties"]["usage"]["properties"]) == set(Usage.__struct_fields__)


@pytest.mark.parametrize(
    ("backend", "wrong"),
    [
        ({"host": "claude", "options": {"silence_s": 3, "own_state": True}}, []),
        ({"host": "claude", "options": {"silence": 3}}, ["/backends/a/options"]),
        ({"host": "api", "options": {"preset": "nosuch"}}, ["/backends/a/options/preset"]),
        ({"host": "acp", "options": {"profile": "qwen", "config": {"variable": "V"}}}, []),
        ({"command": ["./mine"], "options": {"any": 1}}, []),
    ],
)
def test_the_schema_of_a_backend_knows_the_options_of_its_host(backend: Any, wrong: list[str]) -> None:
    assert violations("configuration", {"backends": {"a": backend}}) == wrong


def test_every_option_of_a_host_has_a_row_with_its_meaning() -> None:
    page = (resources.find("contracts") / "options.md").read_text("utf-8")
    for host in HOSTS:
        part = page.partition(f"\n## {host}\n")[2].partition("\n## ")[0]
        for name in SETTABLE if host == "api" else taken(host):
            assert f"\n| `{name}` | " in part, (host, name)
