"""Secrets: every usual spelling is found, ordinary words are not, and no way of cutting a stream lets one through."""

from __future__ import annotations

import base64
import html
import itertools
import json
import re
import shlex
import time
from typing import Any
from urllib.parse import quote, quote_plus

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from backplane.contract.events import AssistantDelta, AssistantMessage, CommandExecuted, ToolCall, Warned, carried
from backplane.redact.secrets import HEAD_BYTES, MARK, SECRET_CHARS_MIN, DeltaRedactor, Redactor
from backplane.redact.tail import OutputTail

TS = "2025-01-15T12:00:00Z"
SECRET = 'p4ss/word+"quo\\te"é=&<x>it\'s'
PEM = "-----BEGIN PRIVATE KEY-----\n" + "\n".join("QUJD" * 16 for _ in range(6)) + "\n-----END PRIVATE KEY-----\n"

GO = (
    json.dumps(SECRET, ensure_ascii=False)[1:-1].replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
)

SPELLINGS = {
    "plain": SECRET,
    "json": json.dumps(SECRET, ensure_ascii=False)[1:-1],
    "json in ascii": json.dumps(SECRET)[1:-1],
    "json in json": json.dumps(json.dumps(SECRET, ensure_ascii=False), ensure_ascii=False)[1:-1],
    "json in json in ascii": json.dumps(json.dumps(SECRET))[1:-1],
    "url": quote(SECRET, safe=""),
    "url with slashes": quote(SECRET),
    "url in lower case": "".join(c if c.isalnum() and c.isascii() else quote(c, safe="").lower() for c in SECRET),
    "form": quote_plus(SECRET),
    "base64": base64.b64encode(SECRET.encode()).decode().rstrip("="),
    "base64 after one byte": base64.b64encode(b"u" + SECRET.encode()).decode(),
    "base64 after two bytes": base64.b64encode(b"u:" + SECRET.encode()).decode(),
    "base64 for urls": base64.urlsafe_b64encode(SECRET.encode()).decode(),
    "json with slashes escaped": json.dumps(SECRET).replace("/", "\\/")[1:-1],
    "json with upper-case escapes": json.dumps(SECRET)[1:-1].replace("\\u00e9", "\\u00E9"),
    "json for html": GO,
    "json for html in json": json.dumps(GO)[1:-1],
    "html": html.escape(SECRET),
    "html with a number": html.escape(SECRET).replace("&quot;", "&#34;").replace("&#x27;", "&#39;"),
    "shell in single quotes": shlex.quote(SECRET)[1:-1],
    "hex": SECRET.encode().hex(),
    "upper-case hex": SECRET.encode().hex().upper(),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_secret_is_found_in_every_usual_spelling(name: str) -> None:
    redactor, spelled = Redactor([SECRET]), SPELLINGS[name]
    clean, count = redactor.text(f"before {spelled} after")
    assert count == 1
    assert MARK in clean
    assert spelled not in clean
    assert clean.startswith("before ")
    assert clean.endswith(" after")
    data, count = redactor.data(f"before {spelled} after".encode())
    assert count == 1
    assert spelled.encode() not in data


def escaped_by_others() -> list[bytes]:
    html_safe = json.dumps({"text": SECRET}).replace("<", "\\u003c").replace(">", "\\u003E").replace("&", "\\u0026")
    return [
        html_safe.encode(),
        html_safe.replace('\\"quo', "\\u0022quo").encode(),
        json.dumps({"text": SECRET}).replace("/", "\\/").encode(),
    ]


@pytest.mark.parametrize("line", escaped_by_others())
def test_a_line_is_caught_whatever_its_writer_chose_to_escape(line: bytes) -> None:
    assert Redactor([SECRET]).json(json.loads(line)) == ({"text": MARK}, 1)


@pytest.mark.parametrize(
    "key",
    [
        "sk-abcdefghijKLMNOPQRST1234",
        "sk-proj-ab_cd-EFGH1234ijklMNOPqrst",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "github_pat_11ABCDEFG0abcdefghijkl_mnop",
        "AKIAIOSFODNN7EXAMPLE",
        "AIzaSyA-bcdefghijk_mnopqr-tuvwxyz012345",
        "xoxb-123456789012-1234567890123-abcdefABCDEF0123456789ab",
        PEM.strip().rpartition("\n")[0],
    ],
)
def test_keys_are_known_by_their_looks(key: str) -> None:
    redactor = Redactor([])
    assert redactor.text(f'key="{key}"')[1] == 1
    assert key not in redactor.text(f'key="{key}"')[0]
    assert redactor.found(json.dumps({"text": "line\n" + key}).encode())
    assert not Redactor([], shapes=False).found(key.encode())


@pytest.mark.parametrize(
    "text",
    [
        "task-3fa85f64-5717-4562-b3fc-2c963f66afa6",
        "sk-learn-is-a-common-misspelling-of-a-library",
        "550e8400-e29b-41d4-a716-446655440000",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "toolu_01A09q90qw90lq917835lq9",
        "implementation of authentication and internationalization",
        "AKIAlowercase, ghp_short, xoxb-1, -----BEGIN CERTIFICATE-----",
        "the rough highlands",
    ],
)
def test_ordinary_words_and_ids_stay(text: str) -> None:
    assert Redactor(["another-secret"]).text(text) == (text, 0)


@given(st.text(min_size=6, max_size=30), st.text(max_size=4), st.text(max_size=4))
@example("0000\x7f\x80", "", "")
@example("a\\u0041bcdef", "", "")
def test_any_secret_in_any_json_is_found_before_and_after_it_is_parsed(secret: str, before: str, after: str) -> None:
    assume(len(secret.strip()) >= SECRET_CHARS_MIN)
    redactor = Redactor([secret])
    value = {"deep": [before + secret + after]}
    for line in (json.dumps(value), json.dumps(value, ensure_ascii=False), msgspec.json.encode(value).decode()):
        assert redactor.found(line.encode())
    clean, count = redactor.json(value)
    assert count == 1
    assert clean == {"deep": [redactor.text(before + secret + after)[0]]}
    assert MARK in clean["deep"][0]


def test_a_whole_read_is_looked_through_line_by_line() -> None:
    redactor, dull = Redactor(["0123456789abcdefghij"]), b'{"id":"toolu_01A09q90qw90lq917835lq9"}'
    for before in range(3):
        for after in range(3):
            lines = [dull] * before + [b'{"x":"0123456789abcdefghij"}'] + [dull] * after
            assert redactor.found(b"\n".join(lines))
    assert not redactor.found(b"\n".join([dull] * 5))
    assert not redactor.found(b'{"x":"0123456"}\n{"x":"789abcdefghij"}')


def test_the_mark_does_not_tell_how_long_a_secret_was() -> None:
    assert Redactor(["x" * 6]).text("x" * 6) == Redactor(["y" * 60]).text("y" * 60) == (MARK, 1)


def test_secrets_of_fewer_than_six_characters_are_not_replaced() -> None:
    assert SECRET_CHARS_MIN == 6
    assert Redactor(["", "a", "12345", " " * 8]).text("a 12345" + " " * 8) == ("a 12345" + " " * 8, 0)
    assert Redactor(["123456"]).text("a 123456") == (f"a {MARK}", 1)


def test_every_telling_line_of_a_secret_of_several_lines_is_a_secret() -> None:
    line = PEM.splitlines()[2]
    assert Redactor([PEM], shapes=False).text(f"| {line} |") == (f"| {MARK} |", 1)
    assert Redactor(["token-value\n"]).text("token-value") == (MARK, 1)


def test_overlapping_secrets_leave_nothing_of_either() -> None:
    assert Redactor(["abcdefgh", "efghijkl"]).text("-abcdefghijkl-") == (f"-{MARK}-", 1)


@given(st.text("ab", min_size=6, max_size=9), st.text("ab", max_size=60))
@example("ababab", "ab" * 30)
@example("abaaba", "abaaba-abaabaaba")
def test_places_that_overlap_or_touch_are_one(secret: str, text: str) -> None:
    hidden = [False] * len(text)
    for at in range(len(text)):
        if text.startswith(secret, at):
            hidden[at : at + len(secret)] = [True] * len(secret)
    groups = ((is_hidden, "".join(text[at] for at in places)) for is_hidden, places in _grouped(hidden))
    expected = [MARK if is_hidden else said for is_hidden, said in groups]
    assert Redactor([secret], shapes=False).text(text) == ("".join(expected), expected.count(MARK))


def _grouped(hidden: list[bool]) -> list[tuple[bool, list[int]]]:
    return [(kind, list(places)) for kind, places in itertools.groupby(range(len(hidden)), key=hidden.__getitem__)]


def test_json_is_redacted_in_values_and_in_names_and_keeps_every_member() -> None:
    redactor = Redactor(["hunter2!", "13371337"])
    value = {"hunter2!": 1, "hunter2!hunter2!": 2, "deep": [{"x": "a hunter2! b"}], "n": 13371337, "t": True}
    clean, count = redactor.json(value)
    assert clean == {MARK: 1, f"{MARK} 2": 2, "deep": [{"x": f"a {MARK} b"}], "n": MARK, "t": True}
    assert count == 4
    assert redactor.json({"a": 1}) == ({"a": 1}, 0)


def test_as_many_names_as_a_line_holds_may_become_one_and_all_members_are_kept_in_time() -> None:
    value = {f"ghp_{number:030}": number for number in range(30_000)}
    value |= {f"{MARK} {number}": number for number in range(2, 9)}
    began = time.process_time()
    clean, count = Redactor(()).json(value)
    # A second where it was written; every name held against every other took two minutes.
    assert time.process_time() - began < 10
    assert count == 30_000
    assert list(clean.values()) == list(value.values())
    assert list(clean)[:3] == [MARK, f"{MARK} 2", f"{MARK} 3"]
    assert list(clean)[-1] == f"{MARK} 8 2"


PLAIN_SHAPE = re.compile(
    r"(?:(?<![A-Za-z0-9])|(?<=\\[bfnrt])|(?<=\\u[0-9A-Fa-f]{4}))(?:"
    r"sk-(?=[A-Za-z_-]{0,64}[0-9])(?=[A-Za-z0-9_-]{0,64}[A-Za-z0-9]{14})[A-Za-z0-9_-]{20,}"
    r"|gh[pousr]_[A-Za-z0-9]{30,}"
    r"|github_pat_[A-Za-z0-9]{14}[A-Za-z0-9_]{8,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    r"|AIza[A-Za-z0-9_-]{35}"
    r"|xox[a-z]-(?=[A-Za-z0-9-]{0,64}[A-Za-z0-9]{14})[A-Za-z0-9-]{16,})"
    r"|-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----(?:[A-Za-z0-9+/=\s\\:,]|-(?!-)){64,16384}"
)
"""All looks of keys as one expression, tried wherever one of them may start."""
STARTS = ["sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "AKIA", "ASIA", "AIza", "xoxb-", "xoxoxp-"]
PIECES = [
    *STARTS,
    "-----BEGIN PRIVATE KEY-----",
    "-----BEGIN ",
    "RSA ",
    "a" * 13,
    "a" * 14,
    "A" * 16,
    "a" * 35,
    "ab:" * 22,
]
PIECES += [
    "a-" * 31,
    "_" * 64,
    "_" * 65,
    "-",
    "--",
    "1",
    "x",
    " ",
    "\\n",
    "\\\\u0041",
    "\n",
    "\0",
    ".",
    "é",
    "1.5e+10",
    "hunter2!",
]
KEYISH = st.lists(st.sampled_from(PIECES), max_size=9).map("".join)


def _spans_plainly(text: str, secrets: list[str]) -> list[tuple[int, int]]:
    places = [(at, at + len(secret)) for secret in secrets for at in range(len(text)) if text.startswith(secret, at)]
    for head in [head[:3] if head[0] == "x" else head for head in STARTS[:-1]] + ["-----BEGIN"]:
        at = text.find(head)
        while at != -1:
            match = PLAIN_SHAPE.match(text, at)
            places += [match.span()] if match is not None else []
            at = text.find(head, match.end() if match is not None else at + 1)
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(places):
        if merged and start <= merged[-1][1]:
            start, stop = merged[-1][0], max(stop, merged.pop()[1])
        merged.append((start, stop))
    return merged


@given(KEYISH)
@example("AIzask-AIza" + "a" * 35)
@settings(max_examples=150)
def test_keys_are_found_where_one_plain_expression_finds_them(text: str) -> None:
    data = text.encode()
    spans = Redactor([])._spans(data, whole=False)
    assert [(len(data[:at].decode()), len(data[:end].decode())) for at, end in spans] == _spans_plainly(text, [])


JSON_OF_KEYS = st.recursive(
    KEYISH | st.sampled_from([1.5e10, -1.5e10, True, None, 12, 1e300]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYISH, inner, max_size=5),
    max_leaves=12,
)


def _json_plainly(value: Any, redactor: Redactor, counted: list[int]) -> Any:
    """Each text by itself."""
    if isinstance(value, str):
        clean, count = redactor.text(value)
        counted[0] += count
        return clean
    if isinstance(value, dict):
        out: dict[str, Any] = {}
        for name, item in value.items():
            key = shown = _json_plainly(name, redactor, counted)
            copies = itertools.count(2)
            while key in out:
                key = f"{shown} {next(copies)}"
            out[key] = _json_plainly(item, redactor, counted)
        return out
    if isinstance(value, list):
        return [_json_plainly(item, redactor, counted) for item in value]
    if isinstance(value, float) and redactor.text(repr(value))[1]:
        counted[0] += 1
        return MARK
    return value


@given(
    JSON_OF_KEYS,
    st.lists(st.sampled_from(["hunter2!", "a-a-a-a-a", "50000000000.0", "nter2!\0", "\ud800aaaa"]), max_size=3),
)
@example({"\1ghp_" + "a" * 30: "\0ghp_" + "a" * 30}, [])
@settings(max_examples=150)
def test_the_texts_of_json_are_redacted_together_as_they_are_one_by_one(value: Any, secrets: list[str]) -> None:
    redactor, counted = Redactor(secrets), [0]
    plainly = _json_plainly(value, redactor, counted)
    assert redactor.json(value) == (plainly, counted[0])


def test_json_that_is_too_deep_is_replaced_where_it_gets_too_deep() -> None:
    value: object = "hunter2!"
    for _ in range(400):
        value = [value]
    clean, count = Redactor(["hunter2!"]).json(value)
    assert count == 1
    assert b"hunter2!" not in msgspec.json.encode(clean)


def test_an_event_keeps_its_type_its_time_and_its_numbers() -> None:
    redactor = Redactor(["tool_call", "2025-01-15T12:00:00Z", "123456"])
    event = ToolCall(ts=TS, tool_name="Bash", input={"command": "echo tool_call"}, tool_use_id="123456")
    clean, count = redactor.event(event)
    assert clean == ToolCall(ts=TS, tool_name="Bash", input={"command": f"echo {MARK}"}, tool_use_id=MARK)
    assert count == 2
    command = CommandExecuted(ts=TS, command="echo 123456", exit_code=123456)
    assert redactor.event(command) == (CommandExecuted(ts=TS, command=f"echo {MARK}", exit_code=123456), 1)
    more = AssistantMessage(ts=TS, text="plain", ext={"raw_message": {"key": "123456"}})
    assert redactor.event(more)[0].ext == {"raw_message": {"key": MARK}}
    untouched = AssistantMessage(ts=TS, text="plain")
    assert redactor.event(untouched)[0] is untouched


def test_bytes_that_are_no_text_stay_as_they_are_around_a_secret() -> None:
    assert Redactor(["hunter2!"]).data(b"\xff\x00hunter2!\xfe") == (b"\xff\x00" + MARK.encode() + b"\xfe", 1)
    assert Redactor(["hünter-2"]).data("\xff hünter-2".encode()) == ("\xff ".encode() + MARK.encode(), 1)
    assert Redactor(["hunter2!"]).data(b"\xff\x00") == (b"\xff\x00", 0)


# Streams --------------------------------------------------------------------------------------------------------------

LETTERS = st.sampled_from("ab01-/+")
SECRETS = st.lists(st.text(LETTERS, min_size=6, max_size=14), min_size=1, max_size=4)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Secrets, and deltas of a text that is full of them and of their beginnings."""
    secrets = draw(SECRETS)
    whole = st.sampled_from(secrets)
    part = whole.flatmap(lambda secret: st.integers(1, len(secret)).map(lambda size: secret[:size]))
    encoded = whole.map(lambda secret: base64.b64encode(secret.encode()).decode())
    text = "".join(draw(st.lists(whole | part | encoded | st.text(LETTERS, max_size=3), max_size=8)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return secrets, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(streams(), st.lists(st.booleans(), min_size=14, max_size=14))
@example((["abcabcabd"], ["abcabc", "abcabd"]), [True] * 14)
@example((["aaaaaa"], ["aaaaa", "aa", "aaaaa"]), [True] * 14)
def test_however_a_text_is_cut_no_secret_comes_through(stream: tuple[list[str], list[str]], waits: list[bool]) -> None:
    secrets, deltas = stream
    deltas_out = DeltaRedactor(Redactor(secrets))
    out = ""
    for delta, bound_passed in zip(deltas, waits, strict=False):
        out += deltas_out.feed(delta)[0]
        if bound_passed:
            out += deltas_out.flush()
    out += deltas_out.flush()
    assert not deltas_out.holding
    for secret in secrets:
        assert secret not in out
        assert base64.b64encode(secret.encode()).decode().rstrip("=") not in out


@given(st.lists(st.text(max_size=6)))
def test_a_stream_without_secrets_comes_through_whole(deltas: list[str]) -> None:
    stream = DeltaRedactor(Redactor(["\U0010ffff" * 8], shapes=False))
    out = "".join(stream.feed(delta)[0] for delta in deltas) + stream.flush()
    assert out == "".join(deltas)


def test_only_what_may_be_the_beginning_is_held_back() -> None:
    stream = DeltaRedactor(Redactor(["hunter2-and-more"]))
    assert stream.feed("I hunt") == ("I ", 0)
    assert stream.holding
    assert stream.feed("ed") == ("hunted", 0)
    assert not stream.holding


def test_what_was_let_go_still_counts_as_the_beginning() -> None:
    stream = DeltaRedactor(Redactor(["hunter2-and-more"]))
    assert stream.feed("it is hunter2") == ("it is ", 0)
    assert stream.flush() == "hunter2"
    assert stream.feed("-and") == ("", 0)
    assert stream.feed("-more, sir") == (f"{MARK}, sir", 1)


def test_a_secret_over_many_deltas_is_counted_once() -> None:
    stream = DeltaRedactor(Redactor(["hunter2-and-more"]))
    results = [stream.feed(letter) for letter in "x hunter2-and-more y"]
    assert "".join(text for text, _ in results) + stream.flush() == f"x {MARK} y"
    assert sum(count for _, count in results) == 1


def test_a_key_known_by_its_looks_is_caught_in_pieces_too() -> None:
    stream = DeltaRedactor(Redactor([]))
    key = "sk-abcdefghijKLMNOPQRST1234"
    pieces = [key[:15], key[15:], "56789zyxw", " and on"]
    out = "".join(stream.feed(piece)[0] for piece in pieces) + stream.flush()
    assert out == f"{key[:15]}{MARK} and on"


@pytest.mark.parametrize("secret", ["hunter2-and-more", "zzzzzzzz", "abcabcab", "sk-abcdefghijKLMNOPQRST1234"])
def test_no_piece_of_a_secret_is_left_wherever_bytes_are_cut(secret: str) -> None:
    redactor = Redactor([secret] if not secret.startswith("sk-") else [])
    data = f"..{secret}. {secret * 2}...{secret}.".encode()
    for start, stop in itertools.combinations(range(len(data) + 1), 2):
        clean, count = redactor.part(data, start, stop)
        assert set(clean.replace(MARK.encode(), b"")) <= set(b". ")
        assert clean.count(MARK.encode()) == count
        if stop == len(data):
            assert redactor.data(OutputTail(data[start:], data[:start])) == (clean, count)
    assert redactor.part(data) == redactor.data(data)


# Texts that somebody else cut -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [SECRET, PEM, "hunter2-and-more"])
def test_a_secret_that_was_cut_where_a_text_ends_is_redacted(secret: str) -> None:
    redactor = Redactor([secret])
    for form in redactor.forms:
        for size in {HEAD_BYTES, HEAD_BYTES + 1, len(form) // 2, len(form) - 1} - set(range(HEAD_BYTES)):
            text = "." * 40 + form[:size].decode(errors="ignore")
            assert redactor.text(text)[0].strip(".") in (MARK, "")
            if len(text.encode()) == 40 + size:
                assert redactor.text(text) == ("." * 40 + MARK, 1)
                if msgspec.json.encode(form.decode())[1:-1] in redactor.forms:
                    assert redactor.json({"a": [text]}) == ({"a": ["." * 40 + MARK]}, 1)


def test_names_short_words_and_pieces_of_a_running_text_are_not_taken_for_cut_secrets() -> None:
    redactor = Redactor(["postgres://user:pw@host/db"])
    assert redactor.text("connect to postgres") == ("connect to postgres", 0)
    begun = "x" * 200 + "postgres://user"
    pieces = [
        AssistantDelta(ts=TS, text=begun),
        carried(Warned(ts=TS, message="m", ext={"output": {"stream": "stdout", "text": begun}})),
        carried(AssistantDelta(ts=TS, text="", ext={"reasoning": {"text": begun}})),
    ]
    assert [redactor.event(piece) for piece in pieces] == [(piece, 0) for piece in pieces]
    cut = carried(Warned(ts=TS, message=begun, ext={"output": {"stream": "stdout", "text": begun}}))
    assert redactor.event(cut) == (msgspec.structs.replace(cut, message="x" * 200 + MARK), 1)
    assert redactor.event(AssistantMessage(ts=TS, text=begun))[1] == 1
