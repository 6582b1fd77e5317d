"""`replay:RUN`: a stored run as a backend, on both loops and through the real command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from backplane.contract.approval import Decision
from backplane.contract.work import PolicyProfile
from backplane.errors import BackplaneError
from backplane.receipts.store import Store
from backplane.runtime.plane import ControlPlane
from backplane.runtime.replay import find_replay
from backplane.runtime.run import Run
from backplane.workspace import apply_patch
from tests.runs import backplane_of, counts, ended, go, memory, mock_backend, order, plane, saying, script
from tests.test_runs import cli

pytestmark = pytest.mark.anyio

WRITES: dict[str, Any] = {"write": {"path": "a.txt", "content": "new\n"}}
ASKS: dict[str, Any] = {"tool": {"name": "bash", "input": {"command": "x"}}}
USAGE: dict[str, Any] = {"usage": {"input_tokens": 12, "estimated_cost_usd": 0.5}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text("old\n")
    return folder


def lines(home: Path, run: Run) -> bytes:
    return (home / "runs" / run.id / "trace.jsonl").read_bytes()


async def replayed(plane: ControlPlane, run: Run, root: Path, *, with_patch: bool = False, **members: Any) -> Run:
    backend = find_replay(f"replay:{run.id}", plane.home, with_patch=with_patch)
    return (await go(plane, order(root, mode="staged", **members), backend))[0]


async def test_a_replay_has_the_bytes_and_the_outcome_of_its_run_and_says_so(root: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    policy = PolicyProfile(require_approval_for=("bash",))
    async with plane(home) as open_plane:
        work = order(
            root, WRITES, ASKS, {"say": "ü\u2028"}, USAGE, {"outcome": "partial"}, mode="staged", policy=policy
        )
        then, _ = await go(open_plane, work, mock_backend("memory"), on_ask=saying(Decision("allow")))
        again = await replayed(open_plane, then, root)
        twice = await replayed(open_plane, again, root)
    assert lines(home, then) == lines(home, again) == lines(home, twice)
    assert (then.receipt.outcome, again.receipt.outcome, ended(again)[0]) == ("partial", "partial", "partial")
    assert backplane_of(again)["replay"] == {
        "run": then.id, "receipt_sha256": then.receipt.receipt_sha256, "with_patch": False
    }  # fmt: skip
    assert then.receipt.usage.input_tokens == 12
    assert again.receipt.usage.input_tokens is None
    assert backplane_of(again)["enforcement"]["rules"][0]["layer"] is None
    assert again.patch is None
    assert (root / "a.txt").read_text() == "old\n"


async def test_the_vendors_own_messages_come_again_byte_for_byte(root: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    body = """
hello(mode="passthrough", heeds=["mode"])
run = take()
raw = {"raw_message": {"n": 1.5, "big": 10**20, "nested": [None, {"k": "é\\u0000"}], "long": "x" * 70000}}
put(*[event(run, str(n), ext=raw) for n in range(20)], final(run, mode="passthrough"))
end()
"""
    async with plane(home) as open_plane:
        asked = order(root).with_abp("mode", "passthrough")
        then, _ = await go(open_plane, asked, script(tmp_path, body))
        backend = find_replay(f"replay:{then.id}", home)
        again, events = await go(open_plane, order(root).with_abp("mode", "passthrough"), backend)
    assert len(events) == 20
    assert lines(home, then) == lines(home, again)
    assert (then.receipt.mode, again.receipt.mode) == ("passthrough", "passthrough")


async def test_a_long_run_comes_again_whole(root: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with plane(home) as open_plane:
        many = {"repeat": {"times": 3_000, "steps": [{"delta": "n {n}"}]}}
        then, _ = await go(open_plane, order(root, many), mock_backend("memory"))
        again = await replayed(open_plane, then, root)
    assert lines(home, then) == lines(home, again)


async def test_a_replay_that_is_cancelled_ends_as_any_run(root: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with plane(home) as open_plane:
        many = {"repeat": {"times": 10_000, "steps": [{"delta": "n {n}"}]}}
        then, _ = await go(open_plane, order(root, many), mock_backend("memory"))
        async with open_plane.start(order(root), f"replay:{then.id}") as again:
            async for _event in again:
                await again.cancel("enough")
    assert ended(again) == ("cancelled", None, "partial")
    assert 0 < len(again.receipt.trace) < 10_000


async def test_the_patch_comes_along_only_when_it_is_asked_for(root: Path, tmp_path: Path) -> None:
    async with plane(tmp_path / "home") as open_plane:
        then, _ = await go(open_plane, order(root, WRITES, mode="staged"), mock_backend("memory"))
        again = await replayed(open_plane, then, root, with_patch=True)
        assert again.receipt.verification.git_diff == then.receipt.verification.git_diff
        assert again.folder is not None
        apply_patch(again.folder)
        moved = await replayed(open_plane, then, root, with_patch=True)
        forbidden = PolicyProfile(deny_write=("a.txt",))
        (root / "a.txt").write_text("old\n")
        against = await replayed(open_plane, then, root, with_patch=True, policy=forbidden)
    assert ended(moved) == ("failed", "execution_workspace_error", "failed")
    assert ended(against) == ("partial", "policy_denied", "partial")
    assert backplane_of(against)["enforcement"]["violations"][0]["rule"] == "deny_write"


async def test_a_patch_that_broke_its_policy_or_holds_secrets_does_not_travel_on(root: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    body = f"""
hello()
run = take()
open({str(root)!r} + "/a.txt", "w").write("token geheim-geheim-77\\n")
put(event(run, "geheim-geheim-77"), final(run))
end()
"""
    async with plane(home) as open_plane:
        rules = PolicyProfile(deny_write=("a.txt",))
        broke, _ = await go(open_plane, order(root, policy=rules), script(tmp_path, body))
        (root / "a.txt").write_text("old\n")
        secret = script(tmp_path, body, secrets=("geheim-geheim-77",))
        hidden, _ = await go(open_plane, order(root), secret)
        again = await replayed(open_plane, hidden, root)
    for run, words in ((broke, "did not keep its policy"), (hidden, "contains secrets")):
        with pytest.raises(BackplaneError, match=words):
            find_replay(f"replay:{run.id}", home, with_patch=True)
    assert lines(home, hidden) == lines(home, again)
    assert b"geheim-geheim-77" not in b"".join(again.receipt_chunks())


async def test_a_failed_run_fails_again_and_what_only_its_host_could_heed_is_refused(
    root: Path, tmp_path: Path
) -> None:
    async with plane(tmp_path / "home") as open_plane:
        fails = order(root, {"say": "a"}, {"fail": {"message": "no", "code": "rate_limit_exceeded"}})
        then, _ = await go(open_plane, fails, mock_backend("memory"))
        again = await replayed(open_plane, then, root)
        from backplane.contract.work import RuntimeConfig

        other = await replayed(open_plane, then, root, config=RuntimeConfig(model="m2"))
    assert ended(again) == ("failed", None, "failed")
    assert ended(other)[0] == "refused"
    assert "late" not in counts(again)


async def test_a_host_named_so_in_memory_is_no_replay(root: Path, tmp_path: Path) -> None:
    async def work(run: Any) -> Any:
        from backplane.host import Done

        return Done()

    async with plane(tmp_path / "home") as open_plane:
        run, _ = await go(open_plane, order(root), memory(work))
    assert "replay" not in backplane_of(run)


def test_the_command_replays_a_stored_run(root: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(root)
    done = cli("run", "echo hi; echo new > a.txt", "--backend", "shell")
    assert done.returncode == 0, done.stderr
    again = cli("run", "again", "--backend", "replay:last")
    assert (again.returncode, "hi\n" in again.stdout, "patch" in again.stdout) == (0, True, False), again.stderr
    home = Path(os.environ["BACKPLANE_HOME"])
    with Store.open(home, readonly=True) as store:
        rows = list(store.rows())
        told = [store.load(row.run_id).backplane.get("replay", {}) for row in rows]
    assert [it.get("run") for it in told] == [rows[1].run_id, None]
    rejudged = cli("policy", "test", "strict", "--all", "--json").stdout.splitlines()
    assert [json.loads(line)["decisions"] for line in rejudged][1:] == [0]


def test_a_pruned_run_is_counted_and_says_nothing_of_a_policy(root: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(root)
    cli("run", "echo old", "--backend", "shell")
    cli("prune", "--keep", "0")
    gone = cli("policy", "test", "default", "--all")
    assert (gone.returncode, "1 run only partly judged" in gone.stdout) == (4, True), gone
    assert gone.stdout.startswith("not judged, 1 run: its order is not kept here"), "counted, and not named"
    cli("run", "echo new", "--backend", "shell")
    (root / "new.json").write_text('{"disallowed_tools": ["bash"]}')
    done = cli("policy", "test", "new.json", "--all")
    assert (done.returncode, "1 run only partly judged" in done.stdout) == (1, True), done


def test_wrong_words_of_a_replay_are_refused(root: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(root)
    for words, fact in (
        (("--backend", "replay:last"), "not so many receipts"),
        (("--backend", "replay:"), "too short"),
    ):
        refused = cli("run", "x", *words)
        assert (refused.returncode, fact in refused.stderr) == (2, True), refused.stderr
