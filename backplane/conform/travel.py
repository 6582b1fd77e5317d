"""A host that stages, on another machine too; what it did not announce is not asked of it."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from collections.abc import Sequence
from typing import Any, Final

from backplane.conform.bench import Bench, BenchRow, end
from backplane.conform.extended import announced
from backplane.conform.verdict import Unfit
from backplane.contract.canonical import Json

SPOKEN: Final = ("cancel/1", "stage/1", "tree/1")
CHUNK_BYTES: Final = 3000


def _archive(*files: tuple[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def _chunks(data: bytes) -> list[dict[str, Any]]:
    starts = range(0, len(data), CHUNK_BYTES)
    made: list[dict[str, Any]] = [
        {"t": "tree", "ref_id": "r1", "seq": seq, "data": base64.b64encode(data[at : at + CHUNK_BYTES]).decode()}
        for seq, at in enumerate(starts)
    ]
    made[-1]["end"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return made


async def _send(bench: Bench, messages: Sequence[Json]) -> tuple[str, str]:
    """Send a run and what follows it; which end came, and its code."""
    async with bench.greeted() as link:
        await link.send(bench.run("r1", SPOKEN, workspace=_AWAY))
        for message in messages:
            await link.send(message)
        line = await end(link)
        if line.get("ref_id") != "r1":
            raise Unfit("it ended with a fatal that names no run", [line])
        return str(line.t), str(line.get("error_code"))


_AWAY: Final[dict[str, Json]] = {"root": ".", "mode": "staged", "include": [], "exclude": []}


async def _travels(bench: Bench) -> str:
    t, code = await _send(bench, _chunks(_archive(("./a.txt", b"x\n"), ("b/c.txt", b"y" * 10_000))))
    if t != "final":
        raise Unfit(f"a good tree was refused: {code}")
    return "final came"


def _refused(messages: Sequence[Json], code: str) -> Any:
    async def check(bench: Bench) -> str:
        t, found = await _send(bench, messages)
        if (t, found) != ("fatal", code):
            raise Unfit(f"{t} {found} came, not fatal {code}")
        return f"fatal: {code}"

    return announced("tree/1", check)


_GOOD: Final = _chunks(_archive(("a.txt", b"x" * 9000)))

TRAVEL_CHECKS: Final[tuple[BenchRow, ...]] = (
    ("takes a workspace that travels", "behaves", "S66", "sent a run and a tree in chunks",
     announced("tree/1", _travels)),
    ("refuses a tree with a piece missing", "behaves", "S66", "sent a tree without its second chunk",
     _refused([_GOOD[0], *_GOOD[2:]], "contract_schema_violation")),
    ("refuses a tree that is not what was sent", "behaves", "S66", "sent a tree with another hash",
     _refused([*_GOOD[:-1], {**_GOOD[-1], "end": {**_GOOD[-1]["end"], "sha256": "0" * 64}}],
              "contract_schema_violation")),
    ("refuses a tree that leaves its folder", "behaves", "S67", "sent a tree with `../x` in it",
     _refused(_chunks(_archive(("../x", b""))), "workspace_staging_failed")),
    ("refuses a tree with a repository's hook", "behaves", "S67", "sent a tree with `.git/hooks/x` in it",
     _refused(_chunks(_archive((".git/hooks/x", b""))), "workspace_staging_failed")),
)  # fmt: skip
