"""Helper of the launch scripts: the optimizer steps that read a corpus so many times."""

import argparse
import sys

from yuan_train.config.errors import YuanError
from yuan_train.config.run import load_run
from yuan_train.data.indexed import IndexedDataset


def main(arguments: list[str] | None = None) -> int:
    """Print the number. Returns the exit code: 2, with the reason on stderr, if the input is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("prefix")
    parser.add_argument("epochs", type=float)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    try:
        run = load_run(options.config, tuple(options.overrides))
        tokens = IndexedDataset(options.prefix).num_tokens
    except YuanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    per_step = run.train.global_batch_size * run.data.sequence_length
    print(max(1, round(tokens * options.epochs / per_step)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
