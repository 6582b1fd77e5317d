"""The clients of `contracts/clients/` over `serve --engine`: the same orders and results, run by another process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.all.clients.test_clients import CASES, DRIVERS, EXPECTED, Bench, Record, built
from tests.queues import needs_queue

needs_queue()

CELLS = ("complete", "fatal", "refused", "order without a task", "ask allow", "ask deny", "cancel", "10 MB event",
         "trace beyond the line limit", "one digit changed")  # fmt: skip
CLIENTS = ("node",)
PLAY_S_MAX = 200

__all__ = ["built"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A folder with a queue and one worker of it; the worker's home is its own."""
    place = Bench(tmp_path_factory.mktemp("queue"))
    *words, serve = place.server
    queue = ["--engine", f"sqlite:///{place.folder / 'queue.sqlite'}"]
    place.server = [*words, serve, *queue]
    worker = [*words, "worker", *queue, "--slots", "2", "--poll", "0.2", "--lease", "30"]
    env = place.env | {"BACKPLANE_HOME": str(place.folder / "worker")}
    with (place.folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(worker, env=env, stdout=log, stderr=log)
    yield place
    process.terminate()
    assert process.wait(40) == 0, (place.folder / "worker.log").read_text()


@pytest.fixture(scope="module")
def played(needs: Callable[[str], str], built: Path, place: Bench) -> Callable[[str], dict[str, Record]]:
    known: dict[str, dict[str, Record]] = {}

    def play(client: str) -> dict[str, Record]:
        if client not in known:
            cases = [one for one in CASES if one["cell"] in CELLS]
            command = [*DRIVERS[client](needs, built), str(place.write(f"{client}.json", cases))]
            ran = subprocess.run(command, env=place.env, cwd=place.folder, capture_output=True, timeout=PLAY_S_MAX)
            records = [json.loads(line) for line in ran.stdout.splitlines()]
            known[client] = {record.pop("cell"): record for record in records}
            known[client][""] = {"exit": ran.returncode, "stderr": ran.stderr.decode(errors="replace")}
        return known[client]

    return play


@pytest.mark.timeout(PLAY_S_MAX + 100)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_queue_looks_to_every_client_as_one_machine(
    client: str, cell: str, played: Callable[[str], dict[str, Record]]
) -> None:
    found = played(client)
    assert found.get(cell) == EXPECTED[cell], found[""]
    assert found[""] == {"exit": 0, "stderr": ""}
