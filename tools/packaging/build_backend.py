"""setuptools' build, which asks for a C compiler from the package index where the machine has none."""

import runpy
from pathlib import Path

from setuptools import build_meta

build_editable = build_meta.build_editable
build_sdist = build_meta.build_sdist
build_wheel = build_meta.build_wheel
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel

COMPILER = "ziglang>=0.13"
LIBRARY = Path(__file__).parents[2] / "yuan_train/planner/native/library.py"


def _compiler() -> list[str]:
    return [] if runpy.run_path(str(LIBRARY))["find_compiler"]() else [COMPILER]


def get_requires_for_build_wheel(config_settings=None):
    """What a wheel needs to be built."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_compiler()]


def get_requires_for_build_editable(config_settings=None):
    """What an editable installation needs to be built."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_compiler()]
