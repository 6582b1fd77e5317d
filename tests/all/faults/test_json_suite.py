"""F34: generated cases, hostile strings and mutated lines at both doors; secrets and memory."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import uuid
from pathlib import Path
from typing import Any

import anyio
import pytest

import backplane
from backplane.config import Limits, Settings
from backplane.contract import canonical
from backplane.protocol.control import ControlEnd
from backplane.receipts.pieces import canonical_chunks
from backplane.runtime.events import now
from backplane.runtime.memory import MemoryBackend
from backplane.runtime.plane import ControlPlane
from tests import closed
from tests.all.faults import hosts, sizes
from tests.all.faults.ground import PROGRAM, UGLY, Ground
from tests.all.faults.json_cases import CHOSEN, hostile_strings, refused, taken

TAKEN, REFUSED = dict(taken()), dict(refused())
assert len(TAKEN) + len(REFUSED) + len(CHOSEN) >= 300


# The sidecar reader ---------------------------------------------------------------------------------------------------

HELLO = b'{"t":"hello","contract_version":"abp/v0.1","backend":{"id":"x"},"capabilities":{}}\n'
EVENT = b'{"t":"event","ref_id":"%s","event":{"type":"tool_call","ts":"2026-01-15T12:00:00Z","tool_name":"t","input":'


def _final(run: dict[str, Any]) -> bytes:
    receipt = {
        "meta": {"run_id": str(uuid.uuid4()), "work_order_id": run["work_order"]["id"], "contract_version": "abp/v0.1"}
        | {"started_at": "2026-01-15T12:00:00Z", "finished_at": "2026-01-15T12:00:01Z", "duration_ms": 1},
        "backend": {"id": "x"},
        "capabilities": {},
        "usage_raw": {},
        "usage": {},
        "trace": [],
        "artifacts": [],
        "verification": {"harness_ok": True},
        "outcome": "complete",
    }
    return json.dumps({"t": "final", "ref_id": run["id"], "receipt": receipt}).encode() + b"\n"


async def _write(fd: int, data: bytes) -> None:
    while data:
        await anyio.wait_writable(fd)
        data = data[os.write(fd, data) :]


async def _say(values: list[bytes], stdin: int, stdout: int) -> None:
    """A host that sends these values as inputs of tool calls, over the bytes of a real pipe."""
    await _write(stdout, HELLO)
    line = b""
    while not line.endswith(b"\n"):
        await anyio.wait_readable(stdin)
        line += os.read(stdin, 65536)
    run = json.loads(line)
    for value in values:
        await _write(stdout, EVENT % run["id"].encode() + value + b"}}\n")
    await _write(stdout, _final(run))


async def _through(plane: ControlPlane, root: Path, values: list[bytes]) -> tuple[list[Any], str | None]:
    """Inputs as the consumer got them, and the error's code."""
    order = backplane.WorkOrder("x", workspace=backplane.WorkspaceSpec(root=str(root), mode="pass_through"))
    host = MemoryBackend(id="x", serve=functools.partial(_say, values))
    found = []
    async with plane.start(order, host) as run:
        async for event in run:
            found.append(getattr(event, "input", event))
    stored = closed.read(b"".join(canonical_chunks(run.receipt)))
    assert len(stored["trace"]) == len(found)
    return found, run.error.code if run.error is not None else None


def test_f34_the_sidecar_reader_takes_and_refuses_what_it_must(ground: Ground) -> None:
    wrong: list[str] = []
    settings = Settings(limits=Limits(cancel_grace_s=0.2))

    async def main() -> None:
        async with ControlPlane(settings, ground.home, {}) as plane:
            values, code = await _through(plane, ground.work, list(TAKEN.values()))
            # Taken whole; one has more members than a rule can be held against, which breaks the default policy.
            assert code == "policy_denied"
            for (name, data), value in zip(TAKEN.items(), values, strict=True):
                if canonical.encode(value) != canonical.encode(canonical.decode(data)):
                    wrong.append(f"changed: {name}")
            # The server's door, which reads by the same function, takes all of them.
            for name, data in list(REFUSED.items())[:: sizes.of(5, 1)]:
                values, code = await _through(plane, ground.work, [data])
                if values or code != "protocol_invalid_envelope":
                    wrong.append(f"taken: {name} {code}")
            for name, (data, takes) in CHOSEN.items():
                values, code = await _through(plane, ground.work, [data])
                if (code is None) != takes:
                    wrong.append(f"chosen: {name} {code}")

    anyio.run(main)
    assert wrong == []


# The stdio server -----------------------------------------------------------------------------------------------------


class Server:
    """`serve` with its two pipes."""

    def __init__(self, ground: Ground) -> None:
        self.process = subprocess.Popen(
            [*PROGRAM, "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ground.work,
            env=ground.environ(),
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.read()

    def read(self) -> Any:
        line = self.stdout.readline()
        assert line, self.process.stderr.read() if self.process.stderr else b""
        return json.loads(line)

    def say(self, *lines: bytes) -> None:
        self.stdin.write(b"".join(lines))
        self.stdin.flush()

    def end(self) -> bytes:
        self.stdin.close()
        assert self.process.wait(10) == 0
        assert self.process.stderr is not None
        words = self.process.stderr.read()
        for stream in (self.stdout, self.process.stderr):
            stream.close()
        return words


def test_f34_the_server_takes_and_refuses_what_it_must_and_goes_on(ground: Ground) -> None:
    server, wrong = Server(ground), []
    cases = [(name, data, True) for name, data in TAKEN.items()] + [
        (name, data, False) for name, data in REFUSED.items()
    ]
    cases += [(name, data, takes) for name, (data, takes) in CHOSEN.items()]
    for number, (name, data, takes) in enumerate(cases, 1):
        server.say(b'{"t":"ping","seq":%d,"x":' % number + data + b"}\n")
        answer = server.read()
        good = {"t": "pong", "seq": number} if takes else {"t": "fatal", "ref_id": None}
        if not answer.items() >= good.items():
            wrong.append((name, answer))
    assert b"Traceback" not in server.end()
    assert wrong == []


ECHO = """
hello(); take()
for text in RUN["work_order"]["config"]["vendor"]["texts"]:
    event(text)
final(); rest()
"""


def test_f34_hostile_strings_come_back_as_they_went_in(ground: Ground) -> None:
    texts = hostile_strings()
    command = json.dumps(list(hosts.script(ground.folder, ECHO)))
    (ground.work / "backplane.toml").write_text(f"[backends.it]\ncommand = {command}\n")
    server = Server(ground)
    order = {"task": "x", "config": {"vendor": {"abp": {"backend": "it"}, "texts": texts}}}
    order["workspace"] = {"root": str(ground.work)}
    server.say(json.dumps({"t": "run", "id": "r", "work_order": order, "extensions": ["stage/1"]}).encode() + b"\n")
    said = []
    while (message := server.read())["t"] == "event":
        said.append(message["event"]["text"])
    assert message["t"] == "final", message.get("error")
    server.end()
    assert said == texts
    shown = ground.call("receipts", "show", ground.rows()[0].run_id, "--json")
    assert [event["text"] for event in json.loads(shown.stdout)["trace"]] == texts


# Fuzz -----------------------------------------------------------------------------------------------------------------

SEEDS = [
    HELLO,
    EVENT % b"r" + b'{"a":[1,2.5,"x",null]}}}\n',
    b'{"t":"event","ref_id":"r","event":{"type":"assistant_delta","ts":"2026-01-15T12:00:00Z","text":"gr\xc3\xbc\\n"}}\n',
    b'{"t":"ask","ref_id":"r","id":"1","kind":"tool","name":"b","input":{},"deadline_ms":1,"default":"deny"}\n',
    b'{"t":"fatal","ref_id":"r","error":"x","error_code":"internal"}\n',
    b'{"t":"ping","seq":1}\n',
    b'{"t":"run","id":"r","work_order":{"task":""}}\n',
    b'{"t":"cancel","ref_id":"r"}\n',
    b'{"t":"answer","ref_id":"r","id":"1","decision":"allow"}\n',
]
DICTIONARY = [*b'" { } [ ] , : \\ \\u \\ud800 null 1e999 -0 NaN'.split(), b"\x00", b"\xff"]
DICTIONARY += [
    b'"t":',
    b'"event"',
    b'"final"',
    b"\xed\xa0\x80",
    b"9" * 400,
    b"[" * 200,
    b"\xef\xbb\xbf",
    b"\r",
    b"\x1b",
]


def mutated(rng: random.Random) -> bytes:
    data = bytearray(rng.choice(SEEDS)[:-1])
    for _ in range(rng.randrange(1, 6)):
        place = rng.randrange(len(data) + 1)
        what = rng.randrange(5)
        if what == 0 and data:
            data[place % len(data)] = rng.randrange(256)
        elif what == 1:
            data[place:place] = rng.choice(DICTIONARY)
        elif what == 2:
            del data[place : place + rng.randrange(1, 20)]
        elif what == 3:
            data[place:place] = data[rng.randrange(len(data) + 1) :][:50]
        else:
            data[place:place] = bytes([rng.randrange(256)])
    return bytes(data).replace(b"\n", b" ") + b"\n"


@pytest.mark.timeout(900)
def test_c11_mutated_lines_make_no_door_fail(ground: Ground) -> None:
    rng, count = random.Random(11), sizes.of(4000, 50_000)
    lines = [mutated(rng) for _ in range(count)]
    end = ControlEnd(now=now)
    end.receive(HELLO)
    for number, line in enumerate(lines):
        end.receive(line)
        if number % 500 == 499:  # an end remembers; most runs are short
            end = ControlEnd(now=now)
    server = Server(ground)
    reader_ended = b'{"t":"ping","seq":4242424242}\n'
    # Lines that start a run are for another test: here nothing shall run.
    safe = [line for line in lines if b'"run"' not in line]
    for start in range(0, len(safe), 100):
        server.say(*safe[start : start + 100], reader_ended)
        while server.read() != {"t": "pong", "seq": 4242424242}:
            pass
    assert b"Traceback" not in server.end()


# C15: secrets ---------------------------------------------------------------------------------------------------------

LEAKS = """
import base64, urllib.parse
S = os.environ["MY_KEY"]
forms = [S, json.dumps(S)[1:-1], urllib.parse.quote(S, safe=""), base64.b64encode(S.encode()).decode(),
         base64.urlsafe_b64encode(S.encode()).decode(), urllib.parse.quote_plus(S), S]
put(S.encode() + b"\\n", 2); put(b"noise " + S.encode() + b"\\n")
hello(backend={**BACKEND, "backend_version": S}); take()
for form in forms:
    event(form)
    say("event", ref_id=RUN["id"], event=body(kind="tool_call", tool_name=form, input={form: [form]}, tool_use_id=form))
    say("event", ref_id=RUN["id"], event=body(kind="command_executed", command=form, exit_code=0, output_preview=form))
    for char in form:
        event(char, kind="assistant_delta")
open(os.path.join(RUN["work_order"]["workspace"]["root"], "leak.txt"), "w").write("\\n".join(forms))
say("event", ref_id=RUN["id"], event=body(kind="file_changed", path=S, summary=S))
say("unknown", **{S: S})
say("fatal", ref_id=RUN["id"], error=S, error_code="backend_crashed")
"""


@pytest.mark.parametrize(
    "secret", ["sk-live-0123456789abcdefghij", 'a+b/c="d\\e" \u00fc?&%', "p\u00e4ss w\u00f6rd/with+signs=="]
)
def test_c15_a_secret_is_nowhere_in_any_of_its_forms(ground: Ground, secret: str) -> None:
    import base64
    import urllib.parse

    forms = {
        secret,
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        urllib.parse.quote(secret, safe=""),
        urllib.parse.quote_plus(secret),
        base64.b64encode(secret.encode()).decode(),
        base64.urlsafe_b64encode(secret.encode()).decode(),
    }
    hits = []
    for _ in range(sizes.of(1, 17)):
        ended = ground.run(LEAKS, "--env", "MY_KEY", env={"MY_KEY": secret})
        assert ended.error == "backend_crashed", ended.stderr
        seen = {"stdout": ended.stdout, "stderr": ended.stderr}
        seen["deltas"] = "".join(event["text"] for event in ended.events if event["type"] == "assistant_delta").encode()
        for path in ground.home.rglob("*"):
            # The patch is the work itself; everything that is said about it is ours.
            if path.is_file() and path.name != "patch.diff" and "repo.git" not in path.parts:
                seen[str(path)] = path.read_bytes()
        hits += [(place, form) for place, data in seen.items() for form in forms if form.encode() in data]
    assert hits == []


PLACES = {
    "the kind of an unknown message": "hello(); take(); say(S, ref_id=S, id=S, x=1); final(); rest()",
    "the run of a message": "hello(); take(); event('a', ref_id=S); say('fatal', ref_id=S, error='x'); final(); rest()",
    "an event before the hello": 'put(b\'{"t":"event","ref_id":"\' + S.encode() + b\'"}\\n\'); rest()',
    "an ask": """
hello(extensions=["ask/1"]); take()
for number in range(2):
    say("ask", ref_id=RUN["id"], id=S + str(number), kind="tool", name="t", input={}, deadline_ms=1000, default="deny")
    event("answered" if json.loads(line())["id"] == S + str(number) else "another id")
final(); rest()""",
    "a line cut on one": "hello(); take(); put(b'{' + b'.' * 185 + S.encode() + bytes(17 << 20) + b'\\n'); rest()",
    "noise that is too long": "hello(); take(); put(b'.' * 190 + S.encode() * 1000000 + b'\\n'); final(); rest()",
    "what is no JSON": "hello(); take(); put(b'{' + S.encode() * 4000 + b'\\n'); rest()",
    "the last words": "hello(); take(); os.write(2, (S * 4000).encode()); os._exit(3)",
    "a name that is in no patch": """
hello(); take(); os.chdir(RUN["work_order"]["workspace"]["root"]); os.mkfifo(S); final(); rest()""",
}


@pytest.mark.parametrize("place", PLACES)
def test_c15_no_piece_of_a_secret_is_told_where_a_host_puts_it(ground: Ground, place: str) -> None:
    secret = "sup3rSECRETvalue-AbC123xyz"
    host = ground.host("S = os.environ['MYKEY']\n" + PLACES[place])
    words = ("run", "do it", "--sidecar", host, "--env", f"MYKEY={secret}", "--on-ask", "deny")
    ended = ground.start(*words, "--json").end()
    assert not any(word in ended.stdout + ended.stderr for word in UGLY)
    seen = {"stdout": ended.stdout, "stderr": ended.stderr}
    seen |= {str(path): path.read_bytes() for path in ground.home.rglob("*") if path.is_file()}
    pieces = [secret[at : at + 5].encode() for at in range(len(secret) - 4)]
    assert [(name, piece) for name, data in seen.items() for piece in pieces if piece in data] == []
    assert len(ground.rows()) == 1
    assert b"another id" not in ended.stdout


@pytest.mark.parametrize("pause_s", [0.03, 0.3])
def test_c15_a_secret_that_comes_letter_by_letter_is_not_shown(ground: Ground, pause_s: float) -> None:
    body = f"""
hello(); take()
for char in os.environ["MY_KEY"] + ".":
    event(char, kind="assistant_delta"); time.sleep({pause_s})
final(); rest()
"""
    ended = ground.run(body, "--env", "MY_KEY=hunter2-x")
    assert not ground.amiss(ended, outcome="complete", bound_s=10 * pause_s)
    said = "".join(event["text"] for event in ended.events)
    assert "hunter2-x" not in said
    # What was held for too long was let go; the rest of it was not.
    assert said == "[redacted]." if pause_s < 0.2 else said.endswith("[redacted].")


# Memory ---------------------------------------------------------------------------------------------------------------


def test_the_longest_line_of_text_is_taken_whole(ground: Ground) -> None:
    body = "hello(); take(); event('x' * ((16 << 20) - 1000)); final(); rest()"
    ended = ground.run(body)
    assert (ended.code, ended.error, ended.left) == (0, None, [])
    assert len(ended.events[0]["text"]) == (16 << 20) - 1000
    # Read, decoded, printed anew, journalled and shown: some ten copies of a line may live at once.
    assert ended.peak_bytes - ground.base_bytes < 12 * 16 << 20
