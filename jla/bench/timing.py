"""How long an op takes, and on what."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax

from jla.bench import cases

BATCHES = 12


class Times(NamedTuple):
    """ms of a forward where no gradient is wanted, and of a forward and every gradient."""

    fwd: float
    fb: float


def median_ms(call: Callable, seconds: float = 0.02, batches: int = BATCHES) -> float:
    """Median ms of a call, over batches that each last about ``seconds``.

    The calls of a batch go back to back, so that host time is hidden.
    """

    def batch(count):
        start = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / count

    batch(2)
    count = max(2, min(200, int(seconds / batch(2))))
    return statistics.median(batch(count) for _ in range(batches)) * 1e3


def times(op: str, p: cases.Shape, impl: str, dtype) -> Times:
    """Of an op at a shape; ``dtype`` is that of its 16-bit inputs (q, k, v and their like).

    Raises:
        jla.ops.ImplUnavailable: ``impl`` cannot run this.
    """
    forward, both = map(jax.jit, cases.functions(op, p, impl))
    inputs = cases.make_inputs(op, p, dtype)
    cotangent = cases.make_cotangent(op, p, dtype)
    return Times(median_ms(lambda: forward(inputs)), median_ms(lambda: both(inputs, cotangent)))


def device() -> str:
    """Backend and model of the default device, like ``cpu (AMD EPYC, 2 cores)``."""
    first = jax.devices()[0]
    if first.platform != "cpu":
        return f"{first.platform} ({first.device_kind})"
    return f"cpu ({_cpu_model()}, {_cores()} cores)"


def _cores() -> int:
    # Those that this process may use; not every system tells.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
