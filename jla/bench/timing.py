"""How long an op takes, and on what."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
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


def device_ms(call: Callable, calls: int = BATCHES) -> float:
    """Median ms that a call keeps the GPU: from its first kernel's start to its last one's end.

    By the profiler, one call at a time. Host time between the kernels of a call is in it, before
    and after them it is not.

    Raises:
        RuntimeError: the profile shows no kernels (no GPU), or not the same number a call.
    """
    spans = sorted((start, end) for _, start, end in _profile(call, calls))
    if not spans or len(spans) % calls:
        raise RuntimeError(f"{calls} calls left {len(spans)} kernels in the profile")
    each = len(spans) // calls
    kernels = [spans[first : first + each] for first in range(0, len(spans), each)]
    return statistics.median(max(end for _, end in k) - k[0][0] for k in kernels) / 1e6


def kernels_ms(call: Callable, calls: int = BATCHES) -> dict[str, tuple[float, float]]:
    """How often a call runs each GPU kernel and for how many ms in all, the longest first."""
    found: dict[str, list[float]] = {}
    for name, start, end in _profile(call, calls):
        found.setdefault(name, []).append((end - start) / 1e6)
    rows = {name: (len(ms) / calls, sum(ms) / calls) for name, ms in found.items()}
    return dict(sorted(rows.items(), key=lambda row: -row[1][1]))


def _profile(call, calls):
    """(name, start, end in ns) of every kernel that ``calls`` calls run on the GPU."""
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(call())
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    return [
        (event.name, event.start_ns, event.start_ns + event.duration_ns)
        for plane in profile.planes
        for line in plane.lines
        if plane.name.startswith("/device:GPU") and line.name.startswith("Stream")
        for event in line.events
    ]


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
