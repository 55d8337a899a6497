"""Plain values as lines of YAML: the bytes that PyYAML writes, in a part of the time.

PyYAML passes every value through events and a state machine, which takes seconds for a plan of thousands of
ranks. Nearly all of such a plan is short: rows of a few values that occur again and again. These are written
here; what would be continued on another line, or needs more than a plain text, is left to PyYAML.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from yuan_train.config.document import is_list, is_mapping

LONGEST_KEY = 100
"""Characters; YAML writes far longer keys in another way."""


class YamlLines:
    """Writes values whose every line is shorter than `width`. `show` gives a scalar as it stands in a row,
    None if only PyYAML writes it."""

    def __init__(self, show: Callable[[Any], str | None], width: int) -> None:
        self.show, self.width = show, width
        self.known: dict[tuple[str, str], str | None] = {}

    def of_key(self, key: str, value: Any) -> str | None:
        """The lines of one key of the document; None if they are not written here."""
        lines: list[str] = []
        if not self._pair(key, value, "", "", lines):
            return None
        return "\n".join([*lines, ""])

    def _scalar(self, value: Any) -> str | None:
        """The text of a scalar that stands the same in rows and in blocks, without quotes; else None."""
        if type(value) not in (str, int, float, bool):
            return None
        # By its text: 0.0 and -0.0 are equal, and so are 1 and True.
        key = (str(value), "text") if isinstance(value, str) else (repr(value), "")
        if key not in self.known:
            self.known[key] = self.show(value)
        text = self.known[key]
        return None if not text or "\n" in text or text[0] in "'\"|>?" else text

    def _row(self, value: Any) -> str | None:
        """A list or mapping of scalars on one line; None if it has others."""
        if is_mapping(value):
            pairs = [(self._scalar(key), self._scalar(item)) for key, item in value.items()]
            if any(key is None or item is None or len(key) > LONGEST_KEY for key, item in pairs):
                return None
            return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
        items = [self._scalar(item) for item in value]
        return None if None in items else "[" + ", ".join(item for item in items if item is not None) + "]"

    def _is_row(self, value: Any) -> bool:
        inside = [*value.keys(), *value.values()] if is_mapping(value) else value
        return not any(is_mapping(item) or is_list(item) for item in inside)

    def _add(self, text: str | None, lines: list[str]) -> bool:
        """Add a line; False if there is none, or it is too long."""
        if text is None or len(text) >= self.width:
            return False
        lines.append(text)
        return True

    def _pair(self, key: Any, value: Any, first: str, indent: str, lines: list[str]) -> bool:
        """Add a key of a block and its value; `first` begins the first line, `indent` the others."""
        name = self._scalar(key)
        if name is None or len(name) > LONGEST_KEY:
            return False
        if not (is_mapping(value) or is_list(value)):
            text = self._scalar(value)
            return text is not None and self._add(f"{first}{name}: {text}", lines)
        if self._is_row(value):
            text = self._row(value)
            return text is not None and self._add(f"{first}{name}: {text}", lines)
        lines.append(f"{first}{name}:")
        # A list stands no deeper than the key that it belongs to.
        inside = indent + "  " if is_mapping(value) else indent
        return self._block(value, inside, inside, lines)

    def _block(self, value: Any, first: str, indent: str, lines: list[str]) -> bool:
        """Add a list or mapping that has others inside."""
        if is_mapping(value):
            for i, (key, item) in enumerate(value.items()):
                if not self._pair(key, item, indent if i else first, indent, lines):
                    return False
            return True
        for i, item in enumerate(value):
            start = indent if i else first
            if not (is_mapping(item) or is_list(item)):
                text = self._scalar(item)
                if text is None or not self._add(f"{start}- {text}", lines):
                    return False
            elif self._is_row(item):
                text = self._row(item)
                if text is None or not self._add(f"{start}- {text}", lines):
                    return False
            elif not self._block(item, f"{start}- ", indent + "  ", lines):
                return False
        return True
