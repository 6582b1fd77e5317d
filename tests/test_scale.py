"""Orders in a queue: what may go into it, and one whole story on SQLite; the rest is in `tests/all/scale`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from backplane.cli import main
from backplane.contract.work import PolicyProfile, RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import BackplaneError
from backplane.receipts.store import Store
from backplane.scale.content import Contents
from backplane.scale.engine import default_on_lost
from backplane.scale.orders import Packer, make_job

pytest.importorskip("dbos")
from tests.queues import QUOTA, Queue, a_queue


def test_only_a_closed_network_allows_another_attempt_by_itself() -> None:
    closed = PolicyProfile(deny_network=("*",))
    assert default_on_lost(WorkOrder("t")) == "fail"
    assert default_on_lost(WorkOrder("t", policy=closed)) == "rerun"
    assert default_on_lost(WorkOrder("t", policy=closed, workspace=WorkspaceSpec(mode="pass_through"))) == "fail"
    assert default_on_lost(WorkOrder("t", policy=closed).with_abp("mcp_servers", [{"name": "x"}])) == "fail"


@pytest.mark.parametrize(
    "config",
    [
        RuntimeConfig(env={"KEY": "hunter2-hunter2"}),
        RuntimeConfig(vendor={"abp": {"mcp_servers": [{"name": "m", "headers": {"Auth": "hunter2-hunter2"}}]}}),
        RuntimeConfig(vendor={"abp": {"secrets": ["not a name"]}}),
    ],
)
def test_values_of_secrets_never_go_into_the_queue(config: RuntimeConfig, tmp_path: Path) -> None:
    with pytest.raises(BackplaneError) as caught:
        make_job(WorkOrder("t", config=config), Packer(Contents(tmp_path / "c"), tmp_path / "h", QUOTA))
    assert caught.value.code == "config_invalid"
    assert "hunter2" not in f"{caught.value} {caught.value.hint}"


def test_a_content_that_was_changed_is_refused(tmp_path: Path) -> None:
    store = Contents(tmp_path / "c")
    name = store.put(iter((b"as it was",)))
    (tmp_path / "c" / name).write_bytes(b"as it is")
    with pytest.raises(BackplaneError, match="does not match its SHA-256"):
        store.fetch(name, tmp_path / "out")


def test_a_place_for_contents_is_a_folder_or_a_url_without_a_password(tmp_path: Path) -> None:
    store = Contents((tmp_path / "folder").as_uri())
    name = store.put(iter((b"x",)))
    assert (tmp_path / "folder" / name).read_bytes() == b"x"
    for bad in ("nosuch://host/x", "http://[/x", "https://me:pw@host/x"):
        with pytest.raises(BackplaneError) as caught:
            Contents(bad)
        assert caught.value.code == "config_invalid"
        assert caught.value.hint
        assert "pw" not in f"{caught.value} {caught.value.hint}"


def test_ignored_files_do_not_travel(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    for name, text in ((".gitignore", "*.key\n"), ("service.key", "hunter2-hunter2"), ("kept", "x")):
        (root / name).write_text(text)
    content = Contents(tmp_path / "c")
    job = make_job(WorkOrder("t", workspace=WorkspaceSpec(root=str(root))), Packer(content, tmp_path / "h", QUOTA))
    packed = (tmp_path / "c" / str(job.tree)).read_bytes()
    assert b"hunter2" not in packed
    assert b"kept" in packed


@pytest.mark.parametrize(
    "words",
    [
        ("queue", "worker", "--lease", "nan"),
        ("queue", "worker", "--slots", "0"),
        ("queue", "limit", "--budget-usd", "1e-7"),
        ("queue", "limit", "--rate", "5"),
        ("serve", "--engine", "sqlite:///x", "--label", "a b"),
        ("queue", "submit", "x", "--content", "nosuch://host/x"),
    ],
)
def test_what_a_queue_cannot_do_is_refused_before_anything_is_opened(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("BACKPLANE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert main(list(words)) == 2
    assert capfd.readouterr().err.partition(":")[0] in ("usage_invalid", "config_invalid")
    assert not list(tmp_path.rglob("*.sqlite"))


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with a_queue(tmp_path) as opened:
        yield opened


def test_an_order_comes_back_verified_with_its_patch(queue: Queue) -> None:
    queue.worker("--slots", "2")
    queue.job("true")  # Makes the workspace.
    done = queue.cli(
        "queue", "submit", "sed -i 's/-/+/' calc.py", "--backend", "shell", "--root", "workspace", "--wait"
    )
    assert done.returncode == 0, done
    order_id = done.stdout.split()[0]
    shown = json.loads(queue.cli("queue", "show", order_id, "--json").stdout)
    assert (shown["order"]["state"], shown["holds"], shown["outcome"]) == ("done", None, "complete")
    assert f"run {shown['run_id']}  receipt {shown['receipt_sha256']}\n" in done.stdout
    with Store.open(queue.home) as store:
        (row,) = store.rows()
        receipt = store.load(row.run_id)
        assert receipt.backplane["queue"] == {
            "attempt": 1, "lost": [], "on_lost_worker": "fail", "label": "default",
        }  # fmt: skip
        patch = store.patch(row)
        assert patch is not None
        assert b"+a + b" in patch.read_bytes()
        assert not store.verify_all().findings
    root = queue.folder / "workspace"
    assert done.stdout.endswith(f"patch {patch}  (backplane apply {row.run_id[:8]} --root {root})\n")
