"""`backplane translate` as people and programs use it: documents and streams in, documents, streams and losses out."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backplane.dialects import framing
from tests.dialects import dialect_corpus
from tests.in_process import in_process

S_MAX = 20
REQUEST = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


def translate(*words: str, data: bytes, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    done = in_process("translate", *words, cwd=Path.cwd(), stdin=data, env={**os.environ, **(env or {})})
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.encode(), done.stderr.encode())


def test_a_request_goes_in_and_the_other_vendors_comes_out() -> None:
    done = translate("--from", "claude", "--to", "copilot", data=json.dumps(REQUEST).encode())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == REQUEST
    assert done.stderr == b""


def test_losses_are_json_lines_on_stderr() -> None:
    data = json.dumps({**REQUEST, "top_k": 5}).encode()
    done = translate("--from", "claude", "--to", "openai", data=data)
    losses = [json.loads(line) for line in done.stderr.splitlines()]
    assert {"path": "/top_k", "kind": "dropped", "code": "option"}.items() <= losses[0].items()


def test_strict_fails_on_a_loss_and_not_on_a_form() -> None:
    data = json.dumps({**REQUEST, "top_k": 5}).encode()
    assert translate("--from", "claude", "--to", "openai", "--strict", data=data).returncode == 1
    data = json.dumps({**REQUEST, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}).encode()
    assert translate("--from", "claude", "--to", "openai", "--strict", data=data).returncode == 0


def test_a_response_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(dialect_corpus.documents("gemini", "response")[0][1]))
    done = translate("--from", "gemini", "--to", "openai", "--kind", "response", str(file), data=b"")
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "Small."


@pytest.mark.parametrize("target", ["claude", "kimi"])
def test_a_stream_comes_out_in_the_targets_framing(target: str) -> None:
    chunks = dialect_corpus.streams("openai")[0][1]
    data = b"".join(framing.sse_bytes(chunk) for chunk in chunks) + framing.done_bytes()
    done = translate("--from", "openai", "--to", target, "--kind", "stream", data=data)
    assert done.returncode == 0, done.stderr
    reader = framing.Sse()
    out: list[Any] = reader.feed(done.stdout)
    assert "Hel" in json.dumps(out)
    assert reader.done == (target in ("openai", "kimi", "copilot"))


EXTENSION = (
    b'event: copilot_confirmation\ndata: {"type":"action","title":"?","message":"Now?","confirmation":{"id":"a"}}\n\n'
    b'event: copilot_references\ndata: [{"type":"file","id":"x","data":{"path":"a"}}]\n\n'
    b'event: copilot_errors\ndata: [{"type":"agent","code":"slow","message":"one source is slow","identifier":"i"}]\n\n'
    b'data: {"choices":[{"delta":{"content":"Hello"}}]}\n\n'
    b"data: [DONE]\n\n"
)
"""As extensions made with the vendor's SDK send it: choices without a place, and no reason to stop."""


@pytest.mark.parametrize("target", ["openai", "claude"])
def test_a_stream_of_an_extension_is_whole_for_another_vendor(target: str) -> None:
    done = translate("--from", "copilot", "--to", target, "--kind", "stream", data=EXTENSION)
    assert done.returncode == 0, done.stderr
    assert b"Hello" in done.stdout
    assert b"stream_cut" not in done.stdout + done.stderr
    assert b"sse_event" not in done.stdout
    for name in (b"copilot_confirmation", b"copilot_references", b"copilot_errors"):
        assert name in done.stderr + done.stdout


def test_an_event_that_is_no_json_is_a_loss() -> None:
    chunks = dialect_corpus.streams("openai")[0][1]
    data = b"data: <html>\n\n" + b"".join(framing.sse_bytes(chunk) for chunk in chunks)
    done = translate("--from", "openai", "--to", "claude", "--kind", "stream", "--strict", data=data)
    assert done.returncode == 1
    assert json.loads(done.stderr.splitlines()[-1])["kind"] == "dropped"


def test_one_stream_gives_the_same_bytes_in_every_process() -> None:
    name = "openai"
    more = {word: word for word in ("alpha", "beta", "gamma", "delta", "epsilon")}
    data = b"".join(framing.sse_bytes({**chunk, **more}) for chunk in dialect_corpus.streams(name)[0][1])
    words = ("--from", name, "--to", name, "--kind", "stream")
    seen = {translate(*words, data=data, env={"PYTHONHASHSEED": seed}).stdout for seed in "123"}
    assert len(seen) == 1
    assert b"epsilon" in seen.pop()


def test_an_array_of_chunks_is_a_stream_too() -> None:
    data = json.dumps(dialect_corpus.streams("gemini")[0][1]).encode()
    done = translate("--from", "gemini", "--to", "claude", "--kind", "stream", data=data)
    assert b"event: message_stop" in done.stdout


@pytest.mark.parametrize(
    ("words", "data", "code", "exit_code"),
    [
        (["--from", "nobody", "--to", "claude"], b"{}", b"dialect_unknown", 2),
        (["--from", "openai", "--to", "claude"], b"{}", b"dialect_mapping_failed", 1),
        (["--from", "openai", "--to", "claude"], b"{", b"config_invalid", 2),
        (["--from", "openai", "--to", "claude", "--kind", "stream"], b"data: <html>\n\n", b"dialect_mapping_failed", 1),
        (["--from", "openai", "--to", "claude", "/no/such/file"], b"", b"config_invalid", 2),
        (
            ["--from", "codex", "--to", "claude"],
            b'{"model":"m","input":"x","previous_response_id":"r"}',
            b"mapping_unsupported_capability",
            1,
        ),
    ],
)
def test_what_cannot_be_translated_says_why(words: list[str], data: bytes, code: bytes, exit_code: int) -> None:
    done = translate(*words, data=data)
    assert done.returncode == exit_code
    assert done.stderr.startswith(code)
    assert len(done.stderr.splitlines()) <= 3


@pytest.mark.parametrize("target", ["claude", "kimi"])
def test_the_end_of_a_cut_stream_is_named_as_made_up(target: str) -> None:
    choice = {"index": 0, "delta": {"role": "assistant", "content": "half a"}, "finish_reason": None}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    words = ("--from", "openai", "--to", target, "--kind", "stream", "--strict")
    done = translate(*words, data=f"data: {json.dumps(chunk)}\n\n".encode())
    assert done.returncode == 1
    assert "cut" in [json.loads(line)["code"] for line in done.stderr.splitlines()]


def on_a_terminal(*words: str, data: bytes) -> list[str]:
    """Run the command with a terminal as stderr; return its lines."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "backplane", "translate", *words]
    subprocess.run(command, input=data, stdout=subprocess.DEVNULL, stderr=slave, timeout=S_MAX, check=False)
    os.close(slave)
    found = b""
    with contextlib.suppress(OSError):  # a terminal whose other end is closed
        while more := os.read(master, 65536):
            found += more
    os.close(master)
    return found.decode().splitlines()


def test_people_read_a_line_for_each_loss_material_ones_first() -> None:
    said = [{"role": "user", "content": [{"type": "text", "text": "x"}], "x_new": 1}]
    data = json.dumps({**REQUEST, "top_k": 5, "messages": said}).encode()
    kinds = [line.split()[0] for line in on_a_terminal("--from", "claude", "--to", "openai", data=data)]
    assert kinds == sorted(kinds, key=lambda kind: kind == "form")
    assert "dropped" in kinds
