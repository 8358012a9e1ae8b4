"""Prints, on one line, the versions and the device that a result was obtained with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import jax

import jla


def versions() -> str:
    """Like ``Python 3.12.1, jax 0.11.2, flax 0.12.12 on cpu (AMD EPYC, 2 cores)``."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "flax"))
    return f"Python {platform.python_version()}, {packages}, jla {jla.__version__} on {device()}"


def device() -> str:
    """Backend and model of the default device."""
    first = jax.devices()[0]
    if first.platform != "cpu":
        return f"{first.platform} ({first.device_kind})"
    return f"cpu ({_cpu_model()}, {len(os.sched_getaffinity(0))} cores)"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    print(versions())
