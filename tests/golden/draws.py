"""torch's random initial weights, drawn again with numpy.

The golden weights are what torch drew from a seed, rounded to 5 significant bits. A tensor that was
drawn is therefore kept as (seed, place in the stream, scale), which is exact and takes no room;
``trim.py`` verifies every bit of it before it relies on that.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

SIGNIFICANT_BITS = 5
_STREAM = 4_000_000
_SEARCHED = 12


class Draw(NamedTuple):
    """Where a tensor comes from: ``kind`` is ``"normal"`` or ``"uniform"`` (-scale to scale)."""

    kind: str
    offset: int
    scale: float


@functools.lru_cache(maxsize=2)
def stream(seed: int) -> np.ndarray:
    """The first float32 uniforms in [0, 1) of torch's CPU generator, float64 (they are exact)."""
    words = np.frombuffer(np.random.RandomState(seed).bytes(4 * _STREAM), dtype="<u4")
    return (words & 0xFFFFFF) / 2.0**24


def draw(seed: int, recipe: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 tensor that a recipe stands for."""
    size = int(np.prod(shape))
    return rounded(recipe.scale * _standard(seed, recipe.kind, recipe.offset, size)).reshape(shape)


def _standard(seed, kind, offset, size):
    uniforms = stream(seed)[offset:]
    if kind == "uniform":
        return 2 * uniforms[:size] - 1
    values = np.empty(size)
    whole = size - size % 16
    values[:whole] = _box_muller(uniforms[:whole].reshape(-1, 16)).ravel()
    if size % 16:
        # torch draws the last 16 anew where the size is no multiple of 16.
        values[-16:] = _box_muller(uniforms[whole + size % 16 :][None, :16]).ravel()
    return values


def _box_muller(u):
    """torch's ``normal_fill``: 16 uniforms to 16 normals, cosines first, sines behind."""
    radius, angle = np.sqrt(-2 * np.log(1 - u[:, :8])), 2 * np.pi * u[:, 8:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


def rounded(x: np.ndarray) -> np.ndarray:
    """float32 with ``SIGNIFICANT_BITS`` significant bits."""
    mantissa, exponent = np.frexp(x)
    grid = 2.0**SIGNIFICANT_BITS
    return np.ldexp(np.rint(mantissa * grid) / grid, exponent).astype(np.float32)


def find(seed: int, tensor: np.ndarray) -> Draw | None:
    """The recipe that gives (nearly all of) ``tensor``, or None."""
    values = tensor.ravel().astype(np.float64)
    if values.size < 128 or not np.all(values[:_SEARCHED]):
        return None
    for kind in ("normal", "uniform"):
        for offset in _places(stream(seed), kind, values):
            scale = _scale(_standard(seed, kind, int(offset), values.size), values)
            recipe = Draw(kind, int(offset), scale)
            if np.mean(draw(seed, recipe, tensor.shape) == tensor) > 0.98:
                return recipe
    return None


def _places(u, kind, values):
    with np.errstate(divide="ignore", invalid="ignore"):
        if kind == "normal":
            unit = np.sqrt(-2 * np.log(1 - u[:-8])) * np.cos(2 * np.pi * u[8:])
            count = 8
        else:
            unit, count = 2 * u - 1, _SEARCHED
        at = np.arange(len(unit) - values.size - 16)
        scale = values[0] / unit[at]
        keep = (scale > 0) & (scale < 100)
        at, scale = at[keep], scale[keep]
        for i in range(1, count):
            near = np.abs(values[i] - scale * unit[at + i]) < 0.08 * np.abs(values[i]) + 1e-9
            at, scale = at[near], scale[near]
    return at[:20]


def _scale(unit, values):
    """The middle of the scales for which every entry rounds as it did."""
    size = np.abs(values)
    step = np.ldexp(1.0, np.frexp(size)[1] - SIGNIFICANT_BITS)
    seen = (size > 0) & (np.abs(unit) > 1e-3)
    low = ((size - step / 2) / np.abs(unit))[seen]
    high = ((size + step / 2) / np.abs(unit))[seen]
    return float((np.quantile(low, 0.999) + np.quantile(high, 0.001)) / 2)
