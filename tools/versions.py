"""Prints, on one line, the versions and the device that a result was obtained with."""

from __future__ import annotations

import platform
from importlib.metadata import version

import jla
from jla.bench.timing import device


def versions() -> str:
    """Like ``Python 3.12.1, jax 0.11.2, flax 0.12.12 on cpu (AMD EPYC, 2 cores)``."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "flax"))
    return f"Python {platform.python_version()}, {packages}, jla {jla.__version__} on {device()}"


if __name__ == "__main__":
    print(versions())
