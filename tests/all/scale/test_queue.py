"""Orders in a queue: one receipt each whatever happens to their workers, and the same record as a local run's."""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

import backplane
from backplane.cli import main
from backplane.errors import BackplaneError
from backplane.receipts.store import Store
from backplane.scale.content import Contents
from backplane.scale.engine import OrderResult
from backplane.scale.orders import Packer, keep

pytest.importorskip("dbos")
from tests.queues import (
    QUOTA,
    Queue,
    a_queue,
    check_events,
    events_of,
    here_cli,
    mock_worker,
    needs_queue,
    result_of,
    until,
)
from tests.runs import HELLO, PRELUDE


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with a_queue(tmp_path) as opened:
        yield opened


def test_contents_travel_by_a_url_bounded_and_checked(tmp_path: Path) -> None:
    import fsspec

    store, url = Contents("memory://contents/here"), "memory://contents/here"
    name = store.put(iter((b"as it", b" was")))
    files = fsspec.filesystem("memory")
    assert files.cat(f"/contents/here/{name}") == b"as it was"
    store.fetch(name, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"as it was"
    small = Contents(url, 3)
    with pytest.raises(BackplaneError, match="more than 3 bytes"):
        small.fetch(name, tmp_path / "small")
    with pytest.raises(BackplaneError, match="more than 3 bytes"):
        small.put(iter((b"as it was",)))
    files.pipe(f"/contents/here/{name}", b"as it is")
    for bad, why in (("0" * 64, "cannot read"), (name, "does not match its SHA-256"), ("../calc.py", "is not a SHA")):
        with pytest.raises(BackplaneError, match=why) as caught:
            store.fetch(bad, tmp_path / why)
        assert caught.value.code == "workspace_staging_failed"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A queue's URL, for commands in this process; its folder is the present one."""
    needs_queue()
    monkeypatch.setenv("BACKPLANE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path / 'q.sqlite'}"


@pytest.mark.anyio
async def test_a_program_submits_follows_cancels_and_gets_its_receipt(queue: Queue, tmp_path: Path) -> None:
    root = tmp_path / "project"
    root.mkdir()
    (root / "calc.py").write_text("a - b\n")
    settings = backplane.Settings(isolation="off")
    opened = backplane.Queue(queue.url, content=queue.content.place, home=queue.home, settings=settings)
    async with opened as orders:
        first = await orders.submit("sed -i s/-/+/ calc.py", backend="shell", root=root)
        second = await orders.submit("sleep 60", backend="shell", root=root)
        assert (await orders.status(first)).state == "waiting"
        assert await orders.cancel(second)
        queue.worker()
        kinds = [type(event) async for event in orders.events(first)]
        assert backplane.RunStarted in kinds
        assert kinds[-1] is backplane.RunCompleted
        receipt = await orders.result(first)
        assert receipt.outcome == "complete"
        assert "+a + b" in (receipt.verification.git_diff or "")
        assert (await orders.result(second)).outcome != "complete"
        assert not await orders.cancel(first)
        with pytest.raises(backplane.ConfigError, match="no order"):
            await orders.result("nonsense")
    with pytest.raises(RuntimeError, match="closed"):
        await orders.status(first)


@pytest.mark.anyio
async def test_a_folder_is_packed_anew_only_after_a_change(queue: Queue, tmp_path: Path) -> None:
    root = tmp_path / "project"
    root.mkdir()
    (root / "a.txt").write_text("one")
    os.utime(root / "a.txt", (1, 1))
    packed: list[None] = []

    class Counting(Packer):
        def _packed(self, order: backplane.WorkOrder, ignored: bool) -> str:
            packed.append(None)
            return super()._packed(order, ignored)

    packer = Counting(queue.content, queue.home, QUOTA)
    order = backplane.WorkOrder("true", workspace=backplane.WorkspaceSpec(root=str(root)))

    def count() -> int:
        packer.pack(order)
        return len(packed)

    assert [count(), count()] == [1, 2]  # The file is newer than times can tell.
    await anyio.sleep(0.15)
    assert [count(), count(), count()] == [3] * 3
    (root / "a.txt").write_text("two")
    os.utime(root / "a.txt", (1, 1))
    assert count() == 4


@pytest.mark.parametrize("action", ["list", "prune", "show"])
def test_a_queue_that_is_not_there_is_not_made_by_who_looks(
    here: str, action: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    order = ["an-order"] if action == "show" else []
    for url in (here, "sqlite:///", ""):
        assert main(["queue", action, *order, "--engine", url]) == 2
        assert capfd.readouterr().err.startswith("config_invalid: ")
    # Of one's own queue nobody has to know whether it was made yet.
    assert main(["queue", action, *order]) == (0 if action == "list" else 2)
    assert not list(tmp_path.rglob("*.sqlite*"))


def test_a_new_queue_is_told_and_no_folder_is_made_for_it(
    here: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["queue", "submit", "true", "--engine", here]
    for wrong in (["--engine", f"sqlite:///{tmp_path}/typo/q.sqlite"], ["--content", str(tmp_path / "typo" / "c")]):
        assert main([*words, *wrong]) == 1
        assert "typo" in capfd.readouterr().err
    assert not (tmp_path / "typo").exists()
    assert not (tmp_path / "q.sqlite").exists()
    capfd.readouterr()
    for told in (f"created the queue {tmp_path / 'q.sqlite'}\n", ""):
        assert main(words) == 0
        assert capfd.readouterr().err == told


def test_a_label_chooses_what_is_listed_and_counted(here: str, capfd: pytest.CaptureFixture[str]) -> None:
    ids = {}
    for label in ("gpu", "other"):
        assert main(["queue", "submit", "true", "--engine", here, "--label", label]) == 0
        ids[label] = capfd.readouterr().out.strip()
    for label, counted in (("gpu", 1), ("none", 0)):
        assert main(["queue", "list", "--engine", here, "--label", label]) == 0
        assert [row.split()[0] for row in capfd.readouterr().out.splitlines()] == [ids["gpu"]] * counted
        assert main(["queue", "status", "--engine", here, "--label", label]) == 0
        assert f"waiting  {counted}" in capfd.readouterr().out
    assert main(["queue", "status", "--engine", here]) == 0
    assert "waiting  2" in capfd.readouterr().out


def test_a_limit_set_before_the_first_order_makes_the_queue_and_holds(
    here: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["queue", "limit", "--engine", here]) == 2
    assert "`limit` create a queue" in capfd.readouterr().err
    words = ["queue", "limit", "--engine", here, "--label", "gpu"]
    assert main([*words, "--budget-usd", "1.5", "--concurrency", "2", "--rate", "3/60"]) == 0
    assert main(["queue", "submit", "true", "--engine", here, "--label", "gpu"]) == 0
    capfd.readouterr()
    assert main(words) == 0
    found = capfd.readouterr().out
    assert ("concurrency  2" in found, "3 in 60 s" in found, "of $1.50" in found) == (True, True, True)


def test_an_order_submitted_again_later_is_the_same_one(
    here: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    for name in ("kept", "sub/kept"):
        (root / name).write_text(name)
    (root / "link").symlink_to("kept")
    order = {"id": "4a1f8f0e-9f0c-4f6e-8a55-0d8bb1c1a001", "task": "true", "workspace": {"root": "root"}}
    (tmp_path / "o.json").write_text(json.dumps(order))
    words = ["queue", "submit", "--engine", here, "--order", "o.json"]
    assert main(words) == 0
    time.sleep(1.1)  # An archive counts seconds.
    for name in ("kept", "sub/kept"):
        (root / name).touch()
    assert main(words) == 0, capfd.readouterr().err
    assert f"{order['id']} was submitted before" in capfd.readouterr().err
    (root / "kept").write_text("another")
    assert main(words) == 2
    assert "another order has the id" in capfd.readouterr().err


def test_a_worker_gives_the_secrets_that_it_has_and_logs_what_it_takes_and_how_it_ended(queue: Queue) -> None:
    words = ("--root", ".", "-b", "shell")
    good, bad = (queue.cli("queue", "submit", task, *words).stdout.strip() for task in ("true", "exit 3"))

    async def main() -> tuple[OrderResult, OrderResult]:
        absent, given = queue.job("true", secrets=["ABSENT"]), queue.job('test "$KEY" = abcdefgh', secrets=["KEY"])
        for job in (absent, given):
            queue.engine.submit(job)
        results = [await result_of(queue.engine, job.order.id, 100) for job in (absent, given)]
        return results[0], results[1]

    worker = queue.worker(KEY="abcdefgh")
    missing, given = anyio.run(main)
    assert "this worker does not have it" in str(missing.receipt)
    assert '"outcome":"complete"' in str(given.receipt)
    until(lambda: all(queue.engine.status(one).state == "done" for one in (good, bad)))
    worker.terminate()
    assert worker.wait(30) == 0
    lines = (queue.folder / "worker0.log").read_text().splitlines()
    listed = queue.cli("queue", "list").stdout
    for order_id, end in ((good, "complete"), (bad, "failed")):
        begins, ended = (line for line in lines if order_id in line)
        assert f"{order_id}  begins, attempt 1: run " in begins
        assert f"{order_id}  {end}" in ended
        assert f"{order_id}  {end} " in listed


def test_an_order_without_a_backend_gets_the_choice_of_its_workers_router(queue: Queue) -> None:
    mock_worker(queue, "thinks")
    route = ("--param", 'abp.route={"type":"simple_query","seed":3}')
    done = queue.cli("queue", "submit", "hello", "--root", ".", *route, "--wait")
    assert done.returncode == 0, done
    with Store.open(queue.home) as store:
        told = store.load(store.rows()[0].run_id).backplane["route"]
    assert (told["chosen"]["backend"], told["seed"]) == ("thinks", 3)


USES = """
hello()
run = take()
given = run["work_order"]["config"]["vendor"]["abp"]["budget_tokens"]
if run["work_order"]["task"] == "reports":
    usage = {"input_tokens": 29, "output_tokens": 1}
    body = {"ts": "2026-01-15T12:00:00Z", "type": "warning", "message": "usage", "ext": {"usage": usage}}
    put({"t": "event", "ref_id": run["id"], "event": body})
put(event(run, f"may use {given}"))
if given == 100:
    time.sleep(60)
put(final(run))
end()
"""


def test_orders_of_a_killed_worker_fail_or_run_again_and_spend_their_budget_once(queue: Queue) -> None:
    (queue.folder / "uses.py").write_text(PRELUDE.format(hello=json.dumps(HELLO)) + USES)
    config = queue.folder / "worker.toml"
    config.write_text(f'[backends.uses]\ncommand = ["{sys.executable}", "{queue.folder / "uses.py"}"]\n')

    async def main() -> None:
        tasks = ("reports", "is silent")
        spends = [replace(queue.job(task, on_lost_worker="rerun", budget_tokens=100), backend="uses") for task in tasks]
        lost = queue.job("for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.25; done; sleep 60", on_lost_worker="fail")
        for job in (lost, *spends):
            queue.engine.submit(job)
        worker = queue.worker("--slots", "3", "--config", str(config))
        with anyio.fail_after(100):
            for job in (lost, *spends):
                while not events_of(queue.engine, job.order.id):
                    await anyio.sleep(0.1)
        worker.kill()
        queue.worker("--slots", "3", "--config", str(config))
        for job, found in zip(spends, ("may use 70", "policy_denied"), strict=True):
            assert found in str((await result_of(queue.engine, job.order.id, 100)).receipt)
        result = await result_of(queue.engine, lost.order.id, 100)
        assert len(result.attempts) == 2
        row = await anyio.to_thread.run_sync(keep, queue.home, lost, result, queue.content)
        with Store.open(queue.home) as store:
            receipt = store.load(row.run_id)
        assert receipt.backplane["queue"]["lost"] == [result.attempts[0]]
        assert receipt.outcome == "failed"
        assert receipt.backplane["error"]["code"] == "backend_crashed"
        assert "lost worker" in receipt.backplane["error"]["message"]

    anyio.run(main)


LIMITED = """
hello()
run = take()
if run["work_order"]["config"]["vendor"]["abp"].get("wait_for_limit_s") == 600:
    body = {"code": "backend_rate_limited", "retry_after_ms": 400_000, "until": "2030-01-01T00:00:00Z"}
    put({"t": "event", "ref_id": run["id"], "event": {
        "ts": "2026-01-15T12:00:00Z", "type": "warning", "message": "waiting", "ext": {"retry": body}}})
    time.sleep(60)
put(final(run))
end()
"""


def test_an_order_that_waits_for_a_limit_takes_no_slot_and_begins_again(queue: Queue) -> None:
    (queue.folder / "limited.py").write_text(PRELUDE.format(hello=json.dumps(HELLO)) + LIMITED)
    config = queue.folder / "worker.toml"
    config.write_text(f'[backends.limited]\ncommand = ["{sys.executable}", "{queue.folder / "limited.py"}"]\n')

    limited, cancelled = (replace(queue.job("t", wait_for_limit_s=600), backend="limited") for _ in range(2))
    other = queue.job("true")

    async def deferred() -> None:
        for job in (limited, cancelled, other):
            queue.engine.submit(job)
        await result_of(queue.engine, other.order.id, 100)  # The only slot is free.
        for job in (limited, cancelled):
            status = queue.engine.status(job.order.id)
            assert (status.state, status.label, len(status.attempts)) == ("waiting", "default", 1)
            assert 300_000 < (status.limited_ms or 0) <= 400_000

    async def resumed() -> None:
        queue.engine.cancel(cancelled.order.id, "not needed")
        result = await result_of(queue.engine, cancelled.order.id, 100)
        assert '"cancel_reason":"not needed"' in str(result.receipt)
        # Another worker takes a deferred order over, and knows its time.
        worker.kill()
        queue.engine.note(limited.order.id, not_before_ms=queue.engine.ledger.now_ms() + 10_000)
        queue.worker("--config", str(config))
        result = await result_of(queue.engine, limited.order.id, 100)
        assert (result.outcome, len(result.attempts)) == ("complete", 2)
        check_events(events_of(queue.engine, limited.order.id), result.attempts[-1])
        assert '"lost":[]' in str(result.receipt)

    worker = queue.worker("--config", str(config))
    anyio.run(deferred)
    assert "a limit of the model's service" in queue.cli("queue", "show", limited.order.id).stdout
    assert f"{limited.order.id}  limited " in queue.cli("queue", "list").stdout
    anyio.run(resumed)


def test_a_stopped_worker_and_its_children_are_killed_before_others_take_over(queue: Queue) -> None:
    marks = queue.folder / "marks"
    line = f"for i in $(seq 30); do echo $$ $(date +%s%N) >> {marks}; sleep 0.1; done"

    async def main() -> None:
        job = queue.job(line, on_lost_worker="rerun", isolation="off")
        queue.engine.submit(job)
        # The marks lie outside of the workspace, where a contained host could not write.
        worker = queue.worker(BACKPLANE_ISOLATION="off")
        await anyio.to_thread.run_sync(until, marks.exists)
        worker.send_signal(signal.SIGSTOP)
        queue.worker(BACKPLANE_ISOLATION="off")
        result = await result_of(queue.engine, job.order.id, 100)
        assert worker.wait(5) == -signal.SIGKILL
        assert len(result.attempts) == 2
        check_events(events_of(queue.engine, job.order.id), result.attempts[-1])

    anyio.run(main)
    lines = [row.split() for row in marks.read_text().splitlines()]
    first, second = lines[0][0], lines[-1][0]
    assert first != second
    # Not one line of the first attempt after the second has begun.
    assert max(int(when) for who, when in lines if who == first) < min(
        int(when) for who, when in lines if who == second
    )


def test_a_cancelled_order_has_a_cancelled_receipt(queue: Queue) -> None:
    async def main() -> None:
        running, waiting = queue.job("sleep 60"), queue.job("sleep 60")
        queue.engine.submit(running)
        queue.worker()
        with anyio.fail_after(100):
            while (queue.engine.status(running.order.id)).state != "running":
                await anyio.sleep(0.1)
        queue.engine.submit(waiting)
        for job in (waiting, running):
            queue.engine.cancel(job.order.id, "not needed")
        for job in (running, waiting):
            result = await result_of(queue.engine, job.order.id, 100)
            assert '"cancel_reason":"not needed"' in str(result.receipt)

    anyio.run(main)


def test_a_pickled_row_is_never_read(queue: Queue) -> None:
    mark = queue.folder / "mark"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (mark,))

    async def main() -> None:
        planted, other = queue.job("true"), queue.job("true")
        queue.engine.submit(planted)
        row = base64.b64encode(pickle.dumps(Evil())).decode()
        with closing(sqlite3.connect(queue.folder / "queue.sqlite")) as connection, connection:
            tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            for table in tables:
                columns = {column[1] for column in connection.execute(f"PRAGMA table_info({table})")}
                for column in {"inputs", "input"} & columns:
                    connection.execute(f"UPDATE {table} SET {column} = ?", (row,))
                if "serialization" in columns:
                    connection.execute(f"UPDATE {table} SET serialization = 'py_pickle'")
        queue.engine.submit(other)
        queue.worker("--slots", "2")
        result = await result_of(queue.engine, other.order.id, 100)
        assert '"outcome":"complete"' in str(result.receipt)

    anyio.run(main)
    assert not mark.exists()


def test_an_answer_or_a_cancel_without_an_object_is_refused(queue: Queue) -> None:
    mock_worker(queue, "acts")
    scenario = ("--param", 'mock.scenario=[{"ask":{"question":"which colour?"}}]')
    order_id = queue.cli("queue", "submit", "t", "-b", "acts", "--root", ".", *scenario, "--asks").stdout.strip()
    until(lambda: "which colour?" in str(events_of(queue.engine, order_id)))

    def refused(*words: str) -> str:
        done = queue.cli("queue", *words)
        assert (done.returncode, done.stdout) == (2, ""), done
        return done.stderr

    ask = refused("answer", order_id, "ask-9", "allow").split()[-1]
    refused("answer", order_id, ask, "allow")  # It wants words.
    assert f"backplane queue answer {order_id} {ask} allow" in queue.cli("queue", "show", order_id).stdout
    assert queue.cli("queue", "answer", order_id, ask, "allow", "--text", "green").returncode == 0
    until(lambda: queue.engine.status(order_id).state == "done")
    refused("answer", order_id, ask, "deny")
    refused("cancel", order_id)


def test_an_order_is_named_by_the_beginning_of_its_id(queue: Queue) -> None:
    first, second = (
        queue.cli("queue", "submit", "true", "--root", ".", "-b", "shell").stdout.strip() for _ in range(2)
    )
    assert first in queue.cli("queue", "show", first[:8]).stdout
    assert queue.cli("queue", "cancel", second[:8]).returncode == 0
    for name in ("zzzz", first[:3]):
        assert queue.cli("queue", "show", name).returncode == 2


def test_submit_refuses_what_no_run_would_begin_with(queue: Queue) -> None:
    (queue.folder / "order.json").write_text('{"task": "true", "policy": {"deny_write": ["[z"]}}')
    refused = queue.cli("queue", "submit", "--order", "order.json", "-b", "shell")
    assert (refused.returncode, refused.stderr.partition(":")[0]) == (4, "policy_invalid"), refused


def test_a_second_signal_ends_a_worker_with_that_signals_code(queue: Queue) -> None:
    order_id = queue.cli("queue", "submit", "sleep 60", "--root", ".", "-b", "shell").stdout.strip()
    worker = queue.worker()
    until(lambda: queue.engine.status(order_id).state == "running")
    worker.terminate()
    until(lambda: b"taking no more orders" in (queue.folder / "worker0.log").read_bytes())
    worker.terminate()
    assert worker.wait(30) == 128 + signal.SIGTERM


def test_an_order_that_ended_before_its_host_began_is_a_run_with_its_task(queue: Queue) -> None:
    words = ("queue", "submit", "paint it", "--root", ".")
    cancelled = queue.cli(*words, "--backend", "shell").stdout.strip()
    queue.cli("queue", "cancel", cancelled)
    refused = queue.cli(*words, "--require", "nosuch").stdout.strip()
    queue.worker()
    ends = {cancelled: (1, "", "shell"), refused: (4, "capability_unsupported", "sidecar:none")}
    for order_id, (code, error, backend) in ends.items():
        until(lambda order_id=order_id: queue.engine.status(order_id).state == "done")
        shown = queue.cli("queue", "show", order_id)
        assert (shown.returncode, shown.stderr.partition(":")[0]) == (code, error), "as `run` would end"
        run = json.loads(here_cli(queue, "show", order_id, "--json").stdout)
        assert (run["task"], run["root"], run["queued"]) == ("paint it", None, order_id)
        assert run["backend"] == backend, run


def test_many_orders_are_submitted_at_once(here: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [{"task": f"echo {number}", "id": f"4a1f8f0e-9f0c-4f6e-8a55-0d8bb1c1a00{number}"} for number in range(3)]
    (tmp_path / "orders").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    words = ["queue", "submit", "--engine", here, "--root", str(tmp_path / "root"), "--label", "gpu", "--jsonl"]
    (tmp_path / "root").mkdir()
    assert main([*words, str(tmp_path / "orders")]) == 0
    assert capfd.readouterr().out.split() == [one["id"] for one in lines]
    assert main(["queue", "list", "--engine", here, "--json"]) == 0
    listed = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [one["label"] for one in listed] == ["gpu"] * 3
    (tmp_path / "orders").write_text('{"task": "a"}\n{"task": 1}\n')
    assert main([*words, str(tmp_path / "orders")]) == 2
    assert "line 2" in capfd.readouterr().err
    assert main(["queue", "status", "--engine", here]) == 0
    assert "waiting  3" in capfd.readouterr().out, "none of them, where one cannot be read"
    for wrong in (["a task"], ["--wait"], ["--order", "o.json"]):
        assert main([*words, "orders", *wrong]) == 2


def test_a_worker_without_its_database_takes_nothing(tmp_path: Path) -> None:
    needs_queue()
    (tmp_path / "q.sqlite").write_bytes(b"no database" * 100)
    with a_queue(tmp_path, f"sqlite:///{tmp_path / 'q.sqlite'}") as queue:
        assert queue.worker().wait(30) == 1
        log = (queue.folder / "worker0.log").read_text()
    assert log.startswith("receipt_store_failed: the queue's database cannot be used"), log


def test_who_follows_an_order_hears_what_it_waits_for_and_how_it_goes_on(queue: Queue) -> None:
    words = ["queue", "submit", "true", "--root", ".", "-b", "shell", "--label", "gpuu", "--wait"]
    log = queue.folder / "follower.log"
    with log.open("wb") as file:
        command, env = queue.command(*words), queue.env(queue.home)
        follower = subprocess.Popen(command, env=env, cwd=queue.folder, stdout=file, stderr=file)
    try:
        until(lambda: "no worker with the label gpuu runs" in log.read_text())
        follower.send_signal(signal.SIGINT)
        assert follower.wait(30) == 128 + signal.SIGINT
    finally:
        follower.kill()
        follower.wait(10)
    assert log.read_text().count("it waits in the queue for a worker") == 1
    assert "\nthe order continues: " in log.read_text()


def test_an_order_whose_worker_is_dead_says_so(queue: Queue) -> None:
    worker = queue.worker()
    order_id = queue.cli("queue", "submit", "sleep 60", "-b", "shell", "--root", ".").stdout.strip()
    until(lambda: queue.engine.status(order_id).state == "running")
    worker.kill()
    worker.wait(10)
    with closing(sqlite3.connect(queue.folder / "queue.sqlite")) as connection, connection:
        connection.execute("UPDATE backplane_worker SET beat_ms = beat_ms - 3600000")
    assert "its worker is dead: " in queue.cli("queue", "show", order_id).stdout
