"""Quantities with units (`80 GiB`, `200 Gb/s`, `10 us`) from and to SI units, and how state lies on disks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

from yuan_train.config.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema


Kind = Literal["bytes", "bytes/s", "seconds", "FLOP/s"]

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SIZES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_BIT_SIZES = {f"{prefix}b": factor / 8 for prefix, factor in _DECIMAL.items()}

FACTORS: dict[Kind, dict[str, float]] = {
    "bytes": _SIZES,
    "bytes/s": {f"{unit}/s": factor for unit, factor in (_SIZES | _BIT_SIZES).items()},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0},
    "FLOP/s": {f"{prefix}FLOP/s": factor for prefix, factor in _DECIMAL.items()},
}
_EXAMPLES: dict[Kind, str] = {
    "bytes": "80 GiB or 24 GB",
    "bytes/s": "25 GB/s (bytes) or 200 Gb/s (bits)",
    "seconds": "10 us or 60 s",
    "FLOP/s": "312 TFLOP/s",
}
_LEAST: dict[Kind, float] = {"bytes/s": 1.0, "FLOP/s": 1.0}
_MOST: dict[Kind, float] = {"bytes": 1e18, "bytes/s": 1e18, "seconds": 1e9, "FLOP/s": 1e21}
"""What files may say above 0: sums, differences and quotients of these stay finite."""
_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-z/]+)\s*")


def parse_quantity(text: object, kind: Kind) -> float:
    """Return `text` in bytes, bytes/s, seconds or FLOP/s.

    Raises ConfigError if it is not a number with a unit of this kind.
    """
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"wanted a number with a unit, such as {_EXAMPLES[kind]}; got {text!r}")
    number, unit = match.groups()
    factors = FACTORS[kind]
    if unit not in factors:
        raise ConfigError(f"wanted {kind}, such as {_EXAMPLES[kind]}; got the unit {unit!r}")
    if not math.isfinite(float(number)) or not math.isfinite(float(number) * factors[unit]):
        raise ConfigError(f"wanted a finite quantity; got {text!r}")
    # In floats, 10 * 1e-6 is not 1e-5.
    return float(Decimal(number) * Decimal(repr(factors[unit])))


def show_bytes(value: float) -> str:
    """Bytes for display: one decimal and a binary unit, such as `61.7 GiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(value) >= FACTORS["bytes"][unit]:
            return f"{value / FACTORS['bytes'][unit]:.1f} {unit}"
    return f"{value:.0f} B"


def show_seconds(value: float) -> str:
    """Seconds for display: three digits and a unit, such as `41.2 ms`; `0 s` below a microsecond."""
    for unit in ("s", "ms", "us"):
        if abs(value) >= FACTORS["seconds"][unit]:
            number = value / FACTORS["seconds"][unit]
            return f"{number:,.0f} {unit}" if abs(number) >= 999.5 else f"{number:.3g} {unit}"
    # What is shorter than that comes of rounding, of sums or of clocks.
    return "0 s"


def show_duration(seconds: float) -> str:
    """`3.3 hours`, `12 days`; below a minute as times of steps are shown."""
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            number = seconds / length
            return f"{number:,.0f} {unit}" if number >= 20 else f"{number:.1f} {unit}"
    return show_seconds(seconds)


@dataclass(frozen=True)
class Unit:
    """Marks a field as a quantity: `Annotated[int, Gt(0), Unit("bytes")]`."""

    kind: Kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Parse the text before pydantic checks the field's own constraints; called by pydantic only."""
        from pydantic_core import core_schema

        def read(text: object) -> float:
            value, least, most = parse_quantity(text, self.kind), _LEAST.get(self.kind, 0.0), _MOST[self.kind]
            if value > 0 and not least <= value <= most:
                raise ConfigError(f"wanted {least:g} to {most:g} {self.kind}; got {text!r}")
            return round(value) if self.kind == "bytes" else value

        return core_schema.no_info_before_validator_function(read, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """A text, not a number, as it stands in files; called by pydantic only."""
        units = "|".join(FACTORS[self.kind])
        number = r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
        pattern = rf"^\s*{number}\s*({units})\s*$"
        return {"type": "string", "pattern": pattern, "examples": _EXAMPLES[self.kind].split(" or ")}


DISK_CHUNK = 1 << 20
"""Elements of a chunk: requests of 4 MiB, with which a few threads keep an NVMe disk busy."""
DISK_SLOTS = 4
"""Chunks of a rank in host memory at a time: two that are read, one that is stepped, one that is written."""
DISK_STATES = 3
"""What the disk holds of an element: its master and AdamW's two moments."""

DAY_SECONDS = 86400.0


def written_words(bytes_of_step: float, step_seconds: float | None) -> str:
    """`12.0 GiB written a step, 33.4 TiB a day`: a drive lasts for so many bytes. `step_seconds`: None if not
    known."""
    words = f"{show_bytes(bytes_of_step)} written a step"
    if not step_seconds:
        return words
    return f"{words}, {show_bytes(bytes_of_step * DAY_SECONDS / step_seconds)} a day"
