"""Runs one mixer of the table: a compiled call per length that answers outputs and gradients."""

from __future__ import annotations

import functools
from typing import NamedTuple

import cases
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers import random

BATCH = 3
CAPACITY = 80


class Answer(NamedTuple):
    """What a call gave; gradients are of ``sum(y * weights) + sum(cache_after * d_after)``.

    Of the cache only what later tokens can see counts.
    """

    y: np.ndarray
    cache: dict
    d_params: nnx.State
    d_x: np.ndarray
    d_cache: dict


def floats(tree):
    """The float leaves; others become None."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, tree)


class Probe:
    """A mixer of the table, split once, and its compiled call (one program per length)."""

    def __init__(self, row: str, **options):
        self.case = cases.MIXERS[row]
        self.mixer = cases.build(row, **options)
        self.graphdef, self.params = nnx.split(self.mixer)
        self.call = jax.jit(self._call)
        self.forward = jax.jit(self.pure)

    def pure(self, params, x, segment_ids=None, cache=None):
        mixer = nnx.merge(self.graphdef, params)
        return mixer(x, segment_ids=segment_ids, cache=cache)

    def new_cache(self, batch=BATCH):
        return self.mixer.new_cache(batch, CAPACITY)

    def _call(self, params, x, segment_ids, cache, weights, d_after):
        def loss(params, x, moving):
            given = jax.tree.map(
                lambda m, c: c if m is None else m, moving, cache, is_leaf=lambda m: m is None
            )
            y, after = self.pure(params, x, segment_ids, given)
            total = jnp.sum(y.astype(jnp.float32) * weights)
            seen = jax.tree.leaves(floats(self.case.meaningful(after)))
            pairs = zip(seen, jax.tree.leaves(d_after), strict=True)
            return total + sum(jnp.sum(a * d) for a, d in pairs), (y, after)

        grads, (y, after) = jax.grad(loss, (0, 1, 2), has_aux=True)(params, x, floats(cache))
        return Answer(y, after, *grads)

    def __call__(self, x, segment_ids=None, cache=None, weights=None, d_after=None) -> Answer:
        """Without weights only the outputs count; without a cache it starts from a new one."""
        cache = self.new_cache(x.shape[0]) if cache is None else cache
        weights = np.zeros(x.shape, np.float32) if weights is None else weights
        if d_after is None:
            d_after = jax.tree.map(jnp.zeros_like, floats(cache))
        if segment_ids is not None:
            segment_ids = np.asarray(segment_ids, np.int32)
        return jax.device_get(self.call(self.params, x, segment_ids, cache, weights, d_after))

    def random_like(self, seed, tree):
        """Random float leaves of a cache, others None: cotangents of a cache."""
        leaves, treedef = jax.tree.flatten(floats(tree))
        return treedef.unflatten(random(seed + i, leaf.shape) for i, leaf in enumerate(leaves))

    def seen(self, cache):
        """What of a cache later tokens can see, without the last id."""
        kept = self.case.meaningful(cache)
        return {name: leaf for name, leaf in kept.items() if name != "segment_id"}

    def warm(self, segment_id=1):
        """A cache that has seen 5 tokens of a document with this id."""
        ids = np.full((BATCH, 5), segment_id, np.int32)
        return self(random(99, (BATCH, 5, cases.HIDDEN)), ids).cache


@functools.cache
def probe(row: str, **options) -> Probe:
    return Probe(row, **options)


def sum_trees(trees):
    return functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), trees)
