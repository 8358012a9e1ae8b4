"""Which layers of a stack are alike and can share one traced body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class Run(NamedTuple):
    """``repeats`` times the ``period`` kinds from layer ``start`` on; layers around stand alone."""

    start: int
    period: int
    repeats: int


def find_run(kinds: Sequence[object]) -> Run:
    """The repetition that leaves the fewest bodies to trace; one repeat where nothing repeats."""
    depth, best = len(kinds), Run(0, len(kinds), 1)
    for start in range(depth):
        for period in range(1, (depth - start) // 2 + 1):
            repeats = 1
            while kinds[start : start + period] == _piece(kinds, start, period, repeats):
                repeats += 1
            if period * (repeats - 1) > best.period * (best.repeats - 1):
                best = Run(start, period, repeats)
    return best


def _piece(kinds, start, period, index):
    return kinds[start + index * period : start + (index + 1) * period]


def stack_alike(blocks: Sequence[nnx.Module]) -> tuple[list[nnx.Module], Run]:
    """Stacks repeated blocks into blocks whose every leaf is ``[repeats, ...]``.

    A block's ``layer_ids`` tells which layers it holds, in the order of the leading axis.
    """
    run = find_run([_kind(block) for block in blocks])
    if run.repeats == 1:
        return list(blocks), Run(0, 0, 1)
    stop = run.start + run.period * run.repeats
    stacked = [_stack(blocks[run.start + i : stop : run.period]) for i in range(run.period)]
    return [*blocks[: run.start], *stacked, *blocks[stop:]], run


def _kind(block):
    """Everything that shapes a block's trace: its structure and statics, and its leaves' shapes."""
    ids, block.layer_ids = block.layer_ids, ()
    graphdef, state = nnx.split(block)
    block.layer_ids = ids
    return graphdef, tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state))


def _stack(blocks):
    ids = tuple(layer for block in blocks for layer in block.layer_ids)
    for block in blocks:
        block.layer_ids = ids
    graphdef, first = nnx.split(blocks[0])
    states = [first, *(nnx.state(block) for block in blocks[1:])]
    return nnx.merge(graphdef, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
