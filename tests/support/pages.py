"""The commands of a page, as a reader would copy them."""

import re
import shlex
from collections.abc import Iterator


def blocks(text: str) -> Iterator[tuple[str, bool]]:
    """The blocks of commands of a page, and whether each is run."""
    for found in re.finditer(
        r"^(<!-- not run: [^\n]+ -->\n)?```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL
    ):
        yield found[2], found[1] is None


def commands(block: str) -> Iterator[str]:
    """Its commands: lines that end in a backslash, and here-documents, are one with what follows."""
    lines = iter(block.splitlines())
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        while line.endswith("\\"):
            line = line[:-1] + next(lines).lstrip()
        if "<<'END'" in line:
            for more in lines:
                line += "\n" + more
                if more == "END":
                    break
        yield line


def ours(command: str) -> list[str] | None:
    """The words of a command of ours; None of others."""
    if not command.startswith("yuan-train "):
        return None
    words = shlex.split(command.partition("<<")[0], comments=True)
    end = min([words.index(sign) for sign in ("|", "&") if sign in words], default=len(words))
    return words[1:end]
