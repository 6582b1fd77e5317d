"""Numbers of JSON, read and printed exactly, against a slow reader of the standard library."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.contract import canonical
from backplane.protocol.lines import strict

LITERALS = [
    *("0", "-0", "-0.0", "0e0", "-0e5", "-0E-0", "1e-0", "1E-07", "-10", "-0.5", "1e5", "1E+5", "1e16", "123e22"),
    *("true", "false", "null", "1e300", "1.5e308", "5e-324", "1e-400", "2.2250738585072011360574097967091e-308"),
    *("18446744073709551615", "18446744073709551616", "-9223372036854775808", "-9223372036854775809", "1" * 309),
    *("0.0000012345678901234567", "1234567890123456.5", "9007199254740993.0", "1e23", "0." + "0" * 320 + "5"),
]
TEXTS = ["", "\\", '"', '\\"', ',1e5"', "[-0,", '\\",-0', "{[", "]}", "\x01\x02", "\\\\", "e5", "é😀", "-0", ":1e5,"]
NUMBER = st.one_of(
    st.sampled_from(LITERALS),
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
)
TEXT = (st.sampled_from(TEXTS) | st.text(alphabet='\\"[]{},:-0e1\x01\n', max_size=6)).map(json.dumps)
ANY = st.recursive(
    NUMBER | TEXT,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6).map(lambda items: f"[{', '.join(items)}]"),
        st.lists(st.tuples(TEXT, inner), max_size=6).map(
            lambda pairs: f"{{{','.join(f'{key}:{value}' for key, value in pairs)}}}"
        ),
    ),
    max_leaves=40,
)


def _slowly(text: str) -> Any:
    return json.loads(text, parse_int=lambda digits: -0.0 if digits == "-0" else int(digits))


def _printed_slowly(value: Any) -> str:
    if isinstance(value, dict):
        members = [f"{canonical_text(key)}:{_printed_slowly(value[key])}" for key in sorted(value)]
        return f"{{{','.join(members)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_printed_slowly, value))}]"
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return canonical_text(value)
    if isinstance(value, int) and canonical.INT_MIN <= value <= canonical.INT_MAX:
        return str(value)
    return _float_slowly(float(value))


def canonical_text(value: Any) -> str:
    return canonical.encode([value]).decode()[1:-1]


def _float_slowly(value: float) -> str:
    """The shortest digits as Python finds them; where the exponent stands is the contract's."""
    mantissa, _, exponent = f"{value!r}".partition("e")
    if exponent and int(exponent) > 0:
        return f"{mantissa.removesuffix('.0')}e+{int(exponent)}"
    return canonical_text(value) if exponent or abs(value) < 1e-3 else mantissa


def _exactly_alike(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


@given(ANY)
def test_json_is_read_exactly_as_the_slow_reader_reads_it(text: str) -> None:
    assert _exactly_alike(canonical.decode(text), _slowly(text))
    assert _exactly_alike(canonical.decode(f"[{text},{'[],' * 2000}-0]")[0], _slowly(text))


@given(ANY)
def test_json_is_printed_exactly_as_the_slow_writer_prints_it(text: str) -> None:
    value = _slowly(text)
    assert canonical.encode(value).decode() == _printed_slowly(value)


def test_a_long_line_of_slow_floats_is_read_exactly_and_its_odd_members_too() -> None:
    text = f'[{"1e308,5e-324,1e23,-1e308," * 1000}-0,1e-0,",1e308","\\\\",18446744073709551616]'
    assert _exactly_alike(canonical.decode(text), _slowly(text))


@pytest.mark.parametrize("number", ["1e309", "-1e400", "1e+999999999999", "01", "1.", "1e308.5", "NaN", "-Infinity"])
def test_what_is_no_number_or_out_of_range_is_refused_among_slow_floats_without_a_quote(number: str) -> None:
    with pytest.raises(ValueError, match=r"range|malformed") as refused:
        canonical.decode(f"[{'1e308,' * 2000}{number}]")
    assert number not in str(refused.value)


def test_texts_are_told_from_what_is_between_them() -> None:
    text = json.dumps([['"\\,[{' * 30, 1] for _ in range(2000)])
    zeros = text.replace(", 1]", ", -0]")
    value = canonical.decode(zeros)
    assert _exactly_alike(value, _slowly(zeros))
    assert all(math.copysign(1, zero) < 0 for _, zero in value)


@pytest.mark.parametrize("digits", [309, 310, 4299, 5000, 100_000])
@pytest.mark.parametrize("sign", ["", "-"])
def test_an_integer_that_no_float_holds_is_refused(digits: int, sign: str) -> None:
    for text in (f"{sign}{'9' * digits}", f'{{"a": {sign}{"9" * digits}}}'):
        with pytest.raises(ValueError, match=r"308 digits|out of range"):
            strict(text.encode())


@pytest.mark.parametrize("text", ["1" + "0" * 308, "[" + "9" * 400 + "e-200]", "0." + "1" * 400, f'"{"9" * 400}"'])
def test_long_numbers_that_a_float_holds_are_not_refused(text: str) -> None:
    assert _exactly_alike(strict(text.encode()), _slowly(text))
