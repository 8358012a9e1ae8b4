"""Runs any recurrence with a matrix state: token by token, or chunk-parallel.

Every family steps ``S_t = diag(e^{g_t}) S_{t-1} + (writes)`` and reads ``o_t = q_t^T S_t``. It
tells, in a :class:`Recurrence`, one token's step (the oracle) and what a chunk needs besides the
state that enters it; packing, padding, heads, states and the scan over chunks are here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax import lax

from jla.kernels import limits
from jla.ops import segments
from jla.ops.chunking import accumulator, from_chunks, pick_chunk, product, repeat_heads, to_chunks
from jla.ops.decay import Decay
from jla.ops.dispatch import Choice, select


class Parts(NamedTuple):
    """A chunk without its entering state S; leading axes ``[N, B, H]``, M written rows.

        E = [values; writes - pulls S],   o = reads S + scores E,   S' = diag(total) S + keys^T E

    A token may read R times, and write R times per stream: then R C rows, those of a rank together
    (:func:`rank_major`).

    Attributes:
        reads: ``[R C, K]``.
        scores: ``[R C, M]``.
        keys: ``[M, K]``.
        total: ``[X]``, X = 1 or K.
        values: ``[.., V]`` rows that do not depend on S, or None.
        pulls: ``[.., K]`` and
        writes: ``[.., V]`` of the rows that do, or None.
    """

    reads: jax.Array
    scores: jax.Array
    keys: jax.Array
    total: jax.Array
    values: jax.Array | None = None
    pulls: jax.Array | None = None
    writes: jax.Array | None = None

    def narrowed(self, dtype) -> Parts:
        """With the operands of the scan's products in ``dtype``; what is added stays wide."""
        pulls = None if self.pulls is None else self.pulls.astype(dtype)
        reads, scores, keys = (x.astype(dtype) for x in (self.reads, self.scores, self.keys))
        return self._replace(reads=reads, scores=scores, keys=keys, pulls=pulls)

    def advance(self, state: jax.Array, dtype):
        """``(o, state after, written rows)`` of the chunk that ``state [..., K, V]`` enters."""
        narrow = state.astype(dtype)
        rows = [] if self.values is None else [self.values]
        if self.pulls is not None and self.writes is not None:
            rows.append(self.writes - product("...ck,...kv->...cv", self.pulls, narrow, dtype))
        written = rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=-2)
        o = product("...ck,...kv->...cv", self.reads, narrow, dtype)
        o = o + product("...cm,...mv->...cv", self.scores, written, dtype)
        update = product("...mk,...mv->...kv", self.keys, written, dtype)
        return o, state * self.total[..., None] + update, written


@dataclass(frozen=True)
class Recurrence:
    """A family of recurrences.

    Attributes:
        name: of the op.
        step: ``(operands of one token..., decay, S) -> (o, S)``, in S's dtype; decay is
            ``e^g [B, H, X, 1]``.
        within: ``(operands of chunks..., decay: Decay) -> Parts``.
        streams: which operands are the keys of the written rows, in :class:`Parts`' order.
        readers: which operands read the state before their token decays it; a document's first
            token finds nothing to read.
        limit: of the family's Hopper kernel, see :mod:`jla.kernels.limits`; None: it has none.
    """

    name: str
    step: Callable
    within: Callable[..., Parts]
    streams: tuple[int, ...] = (1,)
    readers: tuple[int, ...] = ()
    limit: Callable[..., str | None] | None = None

    def choose(
        self, q, k, v, *_, impl: str = "auto", scale=None, state_positions=None, **__
    ) -> Choice:
        """Which implementation a call runs; decided from static facts only."""
        refusal = limits.NO_KERNEL
        if self.limit is not None:
            refusal = self.limit(q, k, v, scale=scale, state_positions=state_positions)
        offers = {"reference": None, "chunk": None, "mosaic": refusal}
        # One token is one step of the recurrence: nothing to be parallel over.
        order = ("reference",) if q.shape[1] == 1 else ("mosaic", "chunk", "reference")
        return select(self.name, impl, offers, order)


class Options(TypedDict, total=False):
    """What every op takes besides its operands.

    Attributes:
        initial_state: ``[B, H, K, V]``, belongs to the row's first document; zeros if None.
        output_final_state: also return the state after the row's last real token.
        state_positions: int ``[B, S]``: also return the states after these tokens of the row.
        segment_ids: int ``[B, T]``, 0 = padding, a change = new document.
        chunk_size: 16, 32, 64 or 128 tokens, for ``impl="chunk"``; None takes 32 on CPUs (where
            fewer operations win) and 64 elsewhere.
        impl: ``"auto"``, ``"reference"`` (token by token), ``"chunk"`` (chunk-parallel, any
            backend, memory linear in T) or ``"mosaic"`` (Hopper kernel).
    """

    initial_state: jax.Array | None
    output_final_state: bool
    state_positions: jax.Array | None
    segment_ids: jax.Array | None
    chunk_size: int | None
    impl: str


def scaled(q: jax.Array, scale: float | None) -> jax.Array:
    """``q`` times the output scale, ``K**-0.5`` if None."""
    return q * jnp.asarray(q.shape[-1] ** -0.5 if scale is None else scale, q.dtype)


def run(
    recurrence: Recurrence,
    operands: tuple[jax.Array, ...],
    g: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    state_positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[Any, ...]:
    """Runs a recurrence on operands ``[B, T, H', ...]`` (q, k, v first) and gates ``[B, T, H, X]``.

    Operands with fewer heads than v are repeated; further arguments are :class:`Options`. Returns
    ``(o, final_state)`` or, with ``state_positions``, ``(o, final_state, states)``.
    """
    q, k, v, *_ = operands
    choice = recurrence.choose(q, k, v, impl=impl)
    dtype = accumulator(v.dtype)
    operands = tuple(repeat_heads(x, v.shape[2]) for x in operands)
    operands, g = prepare_gates(segment_ids, operands, g.astype(dtype), recurrence.readers)
    state = zero_state(operands[1], v) if initial_state is None else initial_state.astype(dtype)
    if choice.impl == "reference":
        form = _token_by_token
    else:
        chunk = pick_chunk(q.shape[1], chunk_size, f"chunk_size of {recurrence.name}")
        at_once = jax.default_backend() != "cpu"
        form = partial(_chunk_by_chunk, chunk=chunk, at_once=at_once)
    o, final, states = form(recurrence, operands, g, state, state_positions)
    outputs = (o.astype(v.dtype), final if output_final_state else None)
    return outputs if state_positions is None else (*outputs, states)


# Compiled as one: outside of jit a call would else run, and trace, operation by operation.
@partial(jax.jit, static_argnums=0)
def _token_by_token(recurrence, operands, g, state, state_positions):
    def token(state, inputs):
        operands, g = inputs
        o, state = recurrence.step(*operands, jnp.exp(g)[..., None], state)
        return state, (o, None if state_positions is None else state)

    dtype = state.dtype
    inputs = jax.tree.map(lambda x: jnp.moveaxis(x.astype(dtype), 1, 0), (operands, g))
    state, (o, states) = lax.scan(token, state, inputs)
    if states is not None:
        states = segments.take_time(jnp.moveaxis(states, 0, 1), state_positions)
    return jnp.moveaxis(o, 0, 1), state, states


@partial(jax.jit, static_argnums=0, static_argnames=("chunk", "at_once"))
def _chunk_by_chunk(recurrence, operands, g, state, state_positions, *, chunk, at_once):
    """``at_once`` prepares all chunks side by side, which keeps a wide device busy; else each is
    prepared when its turn comes, and everything about it stays in a CPU's cache."""
    length, dtype = g.shape[1], operands[2].dtype
    operands, g = tuple(to_chunks(x, chunk) for x in operands), to_chunks(g, chunk)

    def prepare(operands, g):
        return recurrence.within(*operands, Decay(g)).narrowed(dtype)

    def advance(state, parts):
        o, after, rows = parts.advance(state, dtype)
        return after, (o.astype(dtype), None if state_positions is None else (state, rows))

    # Checkpoints: the C x C matrices would outweigh the inputs, so the backward makes them anew.
    if at_once:
        parts = jax.checkpoint(prepare)(operands, g)
        final, (o, kept) = lax.scan(advance, state, parts)
    else:
        chunk_alone = jax.checkpoint(lambda state, inputs: advance(state, prepare(*inputs)))
        final, (o, kept) = lax.scan(chunk_alone, state, (operands, g))
    states = None
    if kept is not None:
        entries, written = kept
        keys = [operands[i] for i in recurrence.streams]
        keys = [rank_major(x) if x.ndim > g.ndim else x for x in keys]
        keys = jnp.concatenate(keys, axis=-2)
        states = _read_states(state_positions, entries, written, keys, g)
    return from_chunks(_by_token(o, chunk), length), final, states


def rank_major(x: jax.Array) -> jax.Array:
    """Several rows a token, ``[..., C, R, K]``, as rows of a chunk ``[..., R C, K]``."""
    *lead, chunk, ranks, size = x.shape
    return jnp.swapaxes(x, -3, -2).reshape(*lead, ranks * chunk, size)


def _by_token(o, chunk):
    """The way back of :func:`rank_major`, for outputs; a single rank gets no axis."""
    *lead, rows, size = o.shape
    if rows == chunk:
        return o
    return jnp.swapaxes(o.reshape(*lead, rows // chunk, chunk, size), -3, -2)


def _read_states(positions, entries, rows, keys, g):
    """States after chosen tokens ``[B, S]``, from what the chunked pass knows: ``[B, S, H, K, V]``.

    ``entries [N, B, H, K, V]`` enter the chunks, ``rows [N, B, H, M, V]`` were written along
    ``keys [N, B, H, M, K]``, with gates ``g [N, B, H, C, X]``.
    """
    chunk = g.shape[-2]
    index, offset = positions // chunk, positions % chunk
    entry, rows, keys, g = (
        segments.take_time(jnp.moveaxis(x, 0, 1), index) for x in (entries, rows, keys, g)
    )
    # Tokens behind the chosen one neither decay nor write.
    done = (jnp.arange(chunk) <= offset[..., None, None])[..., None]
    decay = Decay(jnp.where(done, g, 0))
    streams = keys.shape[-2] // chunk
    after = jnp.concatenate([jnp.where(done, decay.after, 0)] * streams, axis=-2)
    wide = entry.dtype
    written = product("...mk,...mv->...kv", keys * after, rows, wide)
    return entry * decay.total[..., None] + written


def zero_state(k: jax.Array, v: jax.Array) -> jax.Array:
    """Zeros ``[B, H, K, V]``, built from the inputs so that they share their sharding."""
    dtype = accumulator(v.dtype)
    rows, columns = jnp.zeros_like(k[:, 0], dtype), jnp.zeros_like(v[:, 0], dtype)
    return rows[..., :, None] * columns[..., None, :]


def check_operands(
    *,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    per_head: Mapping[str, jax.Array | None] | None = None,
    per_channel: Mapping[str, jax.Array | None] | None = None,
    initial_state: jax.Array | None = None,
) -> None:
    """Raises ValueError, naming the argument, unless the shapes agree.

    ``q, k [B, T, Hq, K]``, ``v [B, T, H, V]`` with H a multiple of Hq, each of ``per_head``
    ``[B, T, H]`` or None, of ``per_channel`` ``[B, T, H, K]`` or None, ``initial_state``
    ``[B, H, K, V]`` or None.
    """
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, T, H, D], got shape {x.shape}")
    if k.shape != q.shape:
        raise ValueError(f"k must have q's shape {q.shape}, got {k.shape}")
    if v.shape[:2] != q.shape[:2]:
        raise ValueError(f"v must start with q's [B, T] = {q.shape[:2]}, got shape {v.shape}")
    if 0 in q.shape or 0 in v.shape:
        raise ValueError(f"q, k, v must not be empty, got shapes {q.shape} and {v.shape}")
    heads = v.shape[2]
    if heads % q.shape[2]:
        raise ValueError(f"v's {heads} heads must be a multiple of q's and k's {q.shape[2]}")
    wanted = {name: (x, "[B, T, H]", v.shape[:3]) for name, x in (per_head or {}).items()}
    full = (*v.shape[:3], q.shape[3])
    wanted |= {name: (x, "[B, T, H, K]", full) for name, x in (per_channel or {}).items()}
    state = (v.shape[0], heads, q.shape[3], v.shape[3])
    wanted["initial_state"] = (initial_state, "[B, H, K, V]", state)
    check_shapes(**wanted)


def check_shapes(**wanted: tuple[jax.Array | None, str, tuple[int, ...]]) -> None:
    """Raises ValueError unless every ``name=(array, letters, shape)`` is None or has its shape."""
    for name, (x, letters, shape) in wanted.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} must be {letters} = {shape}, got shape {x.shape}")


def prepare_gates(
    segment_ids, operands: tuple[jax.Array, ...], g: jax.Array, readers: tuple[int, ...] = ()
):
    """Turns packing and padding into ``operands, g`` with nothing left to mask.

    Padding becomes a step with zero operands and no decay, which changes nothing and outputs 0; a
    document's first token gets the log decay ``-inf``, which empties the state. The ``readers``
    among the operands see the state before that, so theirs is 0 there.
    """
    if segment_ids is None:
        return operands, g
    first = operands[0]
    segment_ids = segments.check_segment_ids(segment_ids, first.shape[:2], like=first)
    real, starts = segment_ids != 0, segments.document_starts(segment_ids)

    def over(mask, x):
        return mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))

    kept = [real & ~starts if i in readers else real for i in range(len(operands))]
    masked = tuple(jnp.where(over(m, x), x, 0) for m, x in zip(kept, operands, strict=True))
    g = jnp.where(over(starts, g), -jnp.inf, jnp.where(over(real, g), g, 0))
    return masked, g
