"""HGRN's recurrence (arXiv:2311.04823, eq. 4): a gated sum in every channel by itself.

    h_t = e^{g_t} h_{t-1} + x_t,    o_t = h_t

There is no product of keys and values, so a chunk is no matrix product but an associative scan.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jla.ops import segments
from jla.ops.chunking import accumulator, from_chunks, pick_chunk, to_chunks
from jla.ops.dispatch import Choice, select_scan
from jla.ops.recurrence import prepare_gates


def hgrn(
    x: jax.Array,
    g: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    state_positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[Any, ...]:
    """The gated sum; see the module's docstring for the recurrence.

    Args:
        x: inputs ``[B, T, D]``.
        g: log decay ``[B, T, D]`` (natural log, at most 0; ``-inf`` empties the state).
        initial_state: ``[B, D]``, belongs to the row's first document; zeros if None.
        output_final_state, state_positions, segment_ids, chunk_size, impl: as in
            :class:`jla.ops.Options`; there is no Hopper kernel.

    Returns:
        ``o [B, T, D]`` in x's dtype and the final state ``[B, D]`` float32 (None unless asked for);
        with ``state_positions [B, S]`` also the states ``[B, S, D]`` after these tokens.

    Raises:
        ValueError: shapes that disagree, an unknown impl or chunk size.
        ImplUnavailable: a named impl that cannot run this call.
    """
    _check(x, g, initial_state)
    choice = choose(x, g, impl=impl)
    chunk = pick_chunk(x.shape[1], chunk_size, "chunk_size of hgrn")
    wide = accumulator(x.dtype)
    (moved,), g = prepare_gates(segment_ids, (x.astype(wide),), g.astype(wide))
    state = jnp.zeros_like(moved[:, 0]) if initial_state is None else initial_state.astype(wide)
    if choice.impl == "reference":
        h = _token_by_token(moved, g, state)
    else:
        h = _chunk_by_chunk(moved, g, state, chunk=chunk)
    o = h
    if segment_ids is not None:
        ids = segments.check_segment_ids(segment_ids, x.shape[:2], like=x)
        o = jnp.where((ids != 0)[..., None], h, 0)
    outputs = (o.astype(x.dtype), h[:, -1] if output_final_state else None)
    if state_positions is None:
        return outputs
    return *outputs, segments.take_time(h, state_positions)


def choose(x, *_, impl: str = "auto", **__) -> Choice:
    """Which implementation a call runs; decided from static facts only."""
    return select_scan("hgrn", impl, x.shape[1])


@jax.jit
def _token_by_token(x, g, state):
    def token(state, inputs):
        x, decay = inputs
        state = decay * state + x
        return state, state

    inputs = (jnp.moveaxis(x, 1, 0), jnp.moveaxis(jnp.exp(g), 1, 0))
    return jnp.moveaxis(lax.scan(token, state, inputs)[1], 0, 1)


@partial(jax.jit, static_argnames="chunk")
def _chunk_by_chunk(x, g, state, *, chunk):
    # Recomputed in the backward: an associative scan keeps every level of its tree.
    @jax.checkpoint
    def within(x, g):
        """Decays from the chunk's entry, and sums of the chunk alone: ``[N, B, D, C]``."""
        return lax.associative_scan(_join, (jnp.exp(g), x), axis=-1)

    def advance(state, chunk):
        decay, own = chunk
        h = own + decay * state[..., None]
        return h[..., -1], h

    chunks = within(to_chunks(x, chunk), to_chunks(g, chunk))
    return from_chunks(lax.scan(advance, state, chunks)[1], x.shape[1])


def _join(earlier, later):
    (decay, x), (further, y) = earlier, later
    return decay * further, further * x + y


def _check(x, g, initial_state):
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(f"x must be [B, T, D] and not empty, got shape {x.shape}")
    if g.shape != x.shape:
        raise ValueError(f"g must have x's shape {x.shape}, got {g.shape}")
    if initial_state is not None and initial_state.shape != (x.shape[0], x.shape[2]):
        wanted = (x.shape[0], x.shape[2])
        raise ValueError(
            f"initial_state must be [B, D] = {wanted}, got shape {initial_state.shape}"
        )
