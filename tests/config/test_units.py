"""Quantities: read, written, and shown."""

import re
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yuan_train.config.errors import ConfigError
from yuan_train.config.load import adapter, format_quantity
from yuan_train.config.units import FACTORS, Kind, Unit, parse_quantity, show_bytes, show_seconds

KINDS: list[Kind] = ["bytes", "bytes/s", "seconds", "FLOP/s"]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("80 GiB", "bytes", 80 * 2**30),
        ("24 GB", "bytes", 24e9),
        ("24GB", "bytes", 24e9),
        ("1.5 KiB", "bytes", 1536),
        ("0 B", "bytes", 0),
        ("25 GB/s", "bytes/s", 25e9),
        ("200 Gb/s", "bytes/s", 25e9),  # the same network, in bits
        ("8 b/s", "bytes/s", 1),
        ("1 MiB/s", "bytes/s", 2**20),
        ("10 us", "seconds", 1e-5),
        ("2.5 ms", "seconds", 2.5e-3),
        ("2 min", "seconds", 120),
        ("1 h", "seconds", 3600),
        ("312 TFLOP/s", "FLOP/s", 312e12),
        ("1.3e3 GFLOP/s", "FLOP/s", 1.3e12),
    ],
)
def test_parse(text: str, kind: Kind, value: float) -> None:
    assert parse_quantity(text, kind) == value


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("80", "bytes", "wanted a number with a unit, such as 80 GiB or 24 GB; got '80'"),
        (80, "bytes", "wanted a number with a unit, such as 80 GiB or 24 GB; got 80"),
        (None, "bytes", "wanted a number with a unit, such as 80 GiB or 24 GB; got None"),
        (True, "seconds", "wanted a number with a unit, such as 10 us or 60 s; got True"),
        ("GiB", "bytes", "wanted a number with a unit"),
        ("1_000 GB", "bytes", "wanted a number with a unit"),
        ("nan GB", "bytes", "wanted a number with a unit"),
        ("80 gib", "bytes", "wanted bytes, such as 80 GiB or 24 GB; got the unit 'gib'"),
        ("80 Gb", "bytes", "wanted bytes, such as 80 GiB or 24 GB; got the unit 'Gb'"),
        ("25 GB", "bytes/s", "wanted bytes/s, such as 25 GB/s (bytes) or 200 Gb/s (bits); got the unit 'GB'"),
        ("25 GB/s", "bytes", "got the unit 'GB/s'"),
        ("10 GB/s", "seconds", "wanted seconds, such as 10 us or 60 s; got the unit 'GB/s'"),
        ("312 TFLOPS", "FLOP/s", "wanted FLOP/s, such as 312 TFLOP/s; got the unit 'TFLOPS'"),
        ("1e308 GB", "bytes", "wanted a finite quantity; got '1e308 GB'"),
        ("1e999999999 GB", "bytes", "wanted a finite quantity; got '1e999999999 GB'"),
    ],
)
def test_refused(text: object, kind: Kind, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_quantity(text, kind)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("1e308 s", "seconds", "wanted 0 to 1e+09 seconds; got '1e308 s'"),
        ("1e200 GiB", "bytes", "wanted 0 to 1e+18 bytes; got '1e200 GiB'"),
        ("1e200 GB/s", "bytes/s", "wanted 1 to 1e+18 bytes/s; got '1e200 GB/s'"),
        ("1e-200 GB/s", "bytes/s", "wanted 1 to 1e+18 bytes/s; got '1e-200 GB/s'"),
        ("1e200 TFLOP/s", "FLOP/s", "wanted 1 to 1e+21 FLOP/s; got '1e200 TFLOP/s'"),
    ],
)
def test_what_no_machine_has_is_refused_where_it_is_read(text: str, kind: Kind, message: str) -> None:
    """Sums of such figures are no numbers, on which the compiled core ended the process."""
    with pytest.raises(ValueError, match=re.escape(message)):
        adapter(Annotated[float, Unit(kind)]).validate_python(text)


@given(st.sampled_from(KINDS), st.floats(0, 1e24, allow_subnormal=False))
def test_format_and_parse_give_the_value_back(kind: Kind, value: float) -> None:
    exact = float(round(value)) if kind == "bytes" else value
    assert parse_quantity(format_quantity(exact, kind), kind) == exact


@given(st.sampled_from(KINDS), st.data(), st.integers(1, 999))
def test_every_unit_parses(kind: Kind, data: st.DataObject, number: int) -> None:
    unit = data.draw(st.sampled_from(sorted(FACTORS[kind])))
    assert parse_quantity(f"{number} {unit}", kind) == pytest.approx(number * FACTORS[kind][unit], rel=1e-15)


def test_written_as_people_write() -> None:
    assert format_quantity(80 * 2**30, "bytes") == "80 GiB"
    assert format_quantity(25e9, "bytes/s") == "25 GB/s"
    assert format_quantity(1e-5, "seconds") == "10 us"
    assert format_quantity(312e12, "FLOP/s") == "312 TFLOP/s"


def test_shown_short() -> None:
    assert show_bytes(66_250_000_000) == "61.7 GiB"
    assert show_bytes(12) == "12 B"
    assert show_seconds(0.0412) == "41.2 ms"
    assert show_seconds(0) == "0 s"
    assert show_seconds(1856.4) == "1,856 s" and show_seconds(0.9997) == "1,000 ms"
    assert show_seconds(3e-9) == show_seconds(-1e-14) == "0 s"
