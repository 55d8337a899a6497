"""Cases of a test as lines of a table: what people write, and what they are told."""

import re

import pytest


def table(text: str) -> pytest.MarkDecorator:
    """A test for each line of a text but the first one, which names its columns: `written | told`.

    Columns end at ` | ` or ` => `. An indented line goes on with the one before; `\\n` is the end of a line.
    """
    names, *rows = (re.split(r" => | [|] ", line) for line in re.sub(r"\n +", " ", text).strip().split("\n"))
    assert all(len(row) == len(names) for row in rows), "a line with another number of columns"
    cases = [[word.replace("\\n", "\n").replace("\\t", "\t") for word in row] for row in rows]
    return pytest.mark.parametrize(names, cases, ids=[row[-2] for row in rows])
