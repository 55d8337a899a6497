"""Whether torch.compile works on this machine: what it needs, and a trial."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

from yuan_train.config.errors import ConfigError
from yuan_train.models import compiled


def check_compiler(device: torch.device) -> None:
    """Raise ConfigError unless torch.compile works on a device: the run asks for it (`train.compile`)."""
    fault = compiler_fault(device.type) or _trial_fault(device)
    if fault is not None:
        raise ConfigError(f"train.compile: true, but {fault}; or set train.compile: false")


def compiler_fault(device_type: str) -> str | None:
    """What torch.compile needs for a type of device and this machine lacks, with what to do; else None."""
    if device_type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed, which compiles for cards: install it"
        if _find(os.environ.get("CC"), "gcc", "clang") is None:
            return "there is no C compiler, with which triton starts its kernels: install gcc (or set CC)"
    elif _find(os.environ.get("CXX"), "g++") is None:
        return f"there is no C++ compiler ({os.environ.get('CXX', 'g++')}): install g++ (or set CXX)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers (Python.h) are not there: install them (python3-dev)"
    return None


def _find(*names: str | None) -> str | None:
    """The path of the first of some programs; only the first name counts if it is given."""
    if names[0]:
        return shutil.which(names[0])
    return next((path for name in names[1:] if name and (path := shutil.which(name))), None)


def _trial_fault(device: torch.device) -> str | None:
    """What a small function's compilation fails with; None if it does not."""
    function = torch.compile(torch.nn.functional.silu, backend=compiled.BACKEND, dynamic=False)
    try:
        function(torch.ones(64, device=device))
    except Exception as error:  # Compilers, linkers and file systems may raise anything.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"it fails on this machine ({type(error).__name__}: {' '.join(lines[:3])}): repair that"
    return None
