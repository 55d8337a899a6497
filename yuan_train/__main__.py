"""Entry point of `python -m yuan_train`, the same as `yuan-train`."""

from yuan_train.cli.main import program

if __name__ == "__main__":
    program()
