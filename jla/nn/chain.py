"""Modules in a row, numbered as torch numbers them."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx


class Chain(nnx.List):
    """Modules applied one after another (torch's ``Sequential``, with its names 0, 1, ...)."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., D]`` through all of them."""
        for module in self:
            x = module(x)
        return x


def low_rank(linear: Callable, inputs: int, rank: int, outputs: int, **last) -> Chain:
    """A projection through a bottleneck: ``inputs -> rank -> outputs``.

    Args:
        linear: what :func:`jla.nn.init.linear` made.
        last: further options of the second projection, like ``use_bias``.
    """
    return Chain([linear(inputs, rank), linear(rank, outputs, **last)])
