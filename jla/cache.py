"""Caches are plain pytrees, rows first; one function picks rows of any.

A mixer's is a dict of arrays; a model's a tuple with a dict per block: its mixers', by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class Stacked(NamedTuple):
    """The caches of layers that are scanned: each leaf ``[layers, B, ...]``."""

    layers: Any


def select(cache: Any, rows: jax.Array | slice) -> Any:
    """The cache of the chosen rows, of a mixer or a model.

    Reorder with a permutation (beams), repeat with repeated indices (best-of-n from one prefix),
    slice with a slice.

    Args:
        cache: what ``new_cache`` or a call returned.
        rows: int ``[R]`` row indices, or a slice of rows.

    Returns:
        A cache of the same form for R rows.

    Example:
        >>> import jax.numpy as jnp
        >>> select({"state": jnp.arange(3)}, jnp.array([2, 2, 0]))["state"].tolist()
        [2, 2, 0]
    """

    def pick(node):
        if isinstance(node, Stacked):
            return Stacked(jax.tree.map(lambda leaf: leaf[:, rows], node.layers))
        return node[rows]

    return jax.tree.map(pick, cache, is_leaf=lambda node: isinstance(node, Stacked))
