"""State space models with selective parameters: Mamba's scan and Mamba-2's SSD.

A continuous system ``h' = A h + B x``, ``y = C h + D x`` is held over a step ``dt`` that, like B
and C, depends on the token: ``h_t = e^{dt_t A} h_{t-1} + dt_t B_t x_t``.

Mamba (arXiv:2312.00752, eq. 2-4) has a rate per channel and state, so nothing in its scan is a
matrix product. Mamba-2 (arXiv:2405.21060, section 6) has one rate per head, which makes it linear
attention with a gate per head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from jla.ops import segments
from jla.ops.chunking import accumulator, from_chunks, pick_chunk, to_chunks
from jla.ops.dispatch import Choice, select_scan
from jla.ops.linear import SIMPLE_GLA, on_hopper, simple_gla
from jla.ops.recurrence import Options, check_operands, check_shapes


def step_sizes(
    dt: jax.Array,
    dt_bias: jax.Array | None = None,
    *,
    softplus: bool = False,
    limit: Sequence[float] = (0.0, math.inf),
) -> jax.Array:
    """Steps ``[..., H]``, at least float32: ``dt`` plus its bias, made positive, within limits."""
    dt = dt.astype(accumulator(dt.dtype))
    dt = dt if dt_bias is None else dt + dt_bias
    dt = jax.nn.softplus(dt) if softplus else dt
    return dt if tuple(limit) == (0.0, math.inf) else jnp.clip(dt, *limit)


def without_padding(x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """``x [B, T, ...]`` with 0 at padding."""
    if segment_ids is None:
        return x
    return jnp.where((segment_ids != 0).reshape(*x.shape[:2], *(1,) * (x.ndim - 2)), x, 0)


def ssd(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    *,
    dt_bias: jax.Array | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] = (0.0, math.inf),
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """Mamba-2's recurrence, which is :func:`jla.ops.simple_gla` with other names.

    ``S_t = e^{dt_t A} S_{t-1} + B_t (dt_t x_t)^T,  y_t = C_t^T S_t + D x_t``: queries are C, keys
    are B, values ``dt x`` and log decays ``dt A``.

    Args:
        x: ``[B, T, H, P]``.
        dt: ``[B, T, H]`` step sizes.
        A: ``[H]`` rates, at most 0.
        B, C: ``[B, T, G, N]``; ``H`` a multiple of ``G``: head h reads group ``h // (H // G)``.
        D: ``[H]`` or ``[H, P]`` skip, or None.
        dt_bias: ``[H]``, added to ``dt`` first, or None.
        dt_softplus: then take the softplus.
        dt_limit: then clip to this range.
        **options: :class:`jla.ops.Options`; the state is ``[B, H, N, P]`` (FLA's is
            ``[B, H, P, N]``).

    Returns:
        As :func:`jla.ops.gated_delta_rule`.

    Raises:
        ValueError: shapes that disagree, an unknown impl or chunk size.
        ImplUnavailable: a named impl that cannot run this call.
    """
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(f"x must be [B, T, H, P] and not empty, got shape {x.shape}")
    if B.ndim != 4 or B.shape[:2] != x.shape[:2] or 0 in B.shape or x.shape[2] % B.shape[2]:
        raise ValueError(
            f"B must be [B, T, G, N] with [B, T] = {x.shape[:2]} and G a divisor of x's "
            f"{x.shape[2]} heads, got shape {B.shape}"
        )
    heads = x.shape[2:3]
    check_shapes(
        C=(C, "[B, T, G, N]", B.shape),
        dt=(dt, "[B, T, H]", x.shape[:3]),
        A=(A, "[H]", heads),
        dt_bias=(dt_bias, "[H]", heads),
        D=(D, "[H] or [H, P]", x.shape[2:] if D is not None and D.ndim == 2 else heads),
    )
    dt = step_sizes(dt, dt_bias, softplus=dt_softplus, limit=dt_limit)
    x = without_padding(x, options.get("segment_ids"))
    positions = options.get("state_positions")
    choice = choose_ssd(x, dt, A, B, C, impl=options.get("impl", "auto"), state_positions=positions)
    if choice.impl == "mosaic":
        check_operands(q=C, k=B, v=x, initial_state=options.get("initial_state"))
        per_head = D is not None and D.ndim == 1  # the kernel adds such a skip itself
        skip, D = (D, None) if per_head else (None, D)
        y, *states = on_hopper(C, B, x, dt * A, scale=1.0, weights=dt, skip=skip, **options)
    else:
        values = (dt[..., None] * x).astype(x.dtype)
        y, *states = simple_gla(C, B, values, dt * A, scale=1.0, **options)
    if D is not None:
        y = (y + x * (D if D.ndim == 2 else D[:, None])).astype(x.dtype)
    return y, *states


def choose_ssd(x, dt=None, A=None, B=None, C=None, *_, impl: str = "auto", **options) -> Choice:
    """Which implementation a call of :func:`ssd` runs; decided from static facts only."""
    facts = dict(scale=1.0, state_positions=options.get("state_positions"))
    return SIMPLE_GLA.choose(x if C is None else C, x if B is None else B, x, impl=impl, **facts)


def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    *,
    dt_bias: jax.Array | None = None,
    dt_softplus: bool = False,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    state_positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[Any, ...]:
    """Mamba's recurrence: every channel d is a system of N states of its own.

        h_t[d] = e^{dt_t[d] A[d]} h_{t-1}[d] + dt_t[d] x_t[d] B_t
        y_t[d] = C_t . h_t[d] + D[d] x_t[d]

    Args:
        x, dt: ``[B, T, D]`` inputs and step sizes.
        A: ``[D, N]`` rates, at most 0.
        B, C: ``[B, T, N]``, shared by the channels.
        D: ``[D]`` skip, or None.
        dt_bias: ``[D]``, added to ``dt`` first, or None.
        dt_softplus: then take the softplus.
        initial_state, output_final_state, state_positions, segment_ids, chunk_size, impl: as in
            :class:`jla.ops.Options`, with states ``[B, D, N]``. Of all tokens' states only one
            chunk's are held at a time, in the backward too.

    Returns:
        ``(y, final_state)``; with ``state_positions`` ``(y, final_state, states)``. ``y`` is
        ``[B, T, D]`` in x's dtype and 0 at padding; states are float32 ``[B, D, N]`` (None unless
        asked for) and ``[B, S, D, N]``. float64 inputs give float64 states.

    Raises:
        ValueError: shapes that disagree, an unknown impl or chunk size.
        ImplUnavailable: a named impl that cannot run this call.
    """
    _check_scan(x, dt, A, B, C, D, dt_bias, initial_state)
    choice = choose_selective_scan(x, impl=impl)
    chunk = pick_chunk(x.shape[1], chunk_size, "chunk_size of selective_scan")
    dtype = accumulator(x.dtype)
    dt = step_sizes(dt, dt_bias, softplus=dt_softplus).astype(dtype)
    starts = jnp.zeros_like(x[..., 0], jnp.bool_)
    if segment_ids is not None:
        # A step of size 0 changes nothing.
        segment_ids = segments.check_segment_ids(segment_ids, x.shape[:2], x)
        x, dt, C = (without_padding(each, segment_ids) for each in (x, dt, C))
        starts = segments.document_starts(segment_ids)
    if initial_state is None:
        initial_state = jnp.zeros_like(x[:, 0, :, None], dtype) * jnp.zeros_like(B[:, 0, None])
    operands = (x, dt, B, C, starts)
    carried = (A.astype(dtype), initial_state.astype(dtype), state_positions)
    if choice.impl == "reference":
        y, final, states = _token_by_token(operands, *carried)
    else:
        y, final, states = _chunk_by_chunk(operands, *carried, chunk=chunk)
    y = (y if D is None else y + x * D).astype(x.dtype)
    outputs = (y, final if output_final_state else None)
    return outputs if state_positions is None else (*outputs, states)


def choose_selective_scan(x, *_, impl: str = "auto", **__) -> Choice:
    """Which implementation a call of :func:`selective_scan` runs; from static facts only."""
    return select_scan("selective_scan", impl, x.shape[1])


def _check_scan(x, dt, A, B, C, D, dt_bias, initial_state):
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(f"x must be [B, T, D] and not empty, got shape {x.shape}")
    if A.ndim != 2:
        raise ValueError(f"A must be [D, N], got shape {A.shape}")
    channels, size = x.shape[2:], A.shape[1]
    check_shapes(
        dt=(dt, "[B, T, D]", x.shape),
        A=(A, "[D, N]", (*channels, size)),
        B=(B, "[B, T, N]", (*x.shape[:2], size)),
        C=(C, "[B, T, N]", (*x.shape[:2], size)),
        D=(D, "[D]", channels),
        dt_bias=(dt_bias, "[D]", channels),
        initial_state=(initial_state, "[B, D, N]", (x.shape[0], *channels, size)),
    )


def _discretise(operands, A):
    """Factors and terms ``[..., D, N]`` of the tokens' steps, and C, from operands ``[..., D]``."""
    x, dt, B, C, starts = operands
    decay = jnp.exp(dt[..., None] * A)
    decay = jnp.where(starts[..., None, None], 0, decay)
    write = (dt * x)[..., None] * B.astype(dt.dtype)[..., None, :]
    return decay, write, C.astype(dt.dtype)


# Compiled as one: outside of jit a call would else run, and trace, operation by operation.
@jax.jit
def _token_by_token(operands, A, state, state_positions):
    def token(state, operands):
        decay, write, C = _discretise(operands, A)
        state = decay * state + write
        y = jnp.einsum("bdn,bn->bd", state, C, precision="highest")
        return state, (y, None if state_positions is None else state)

    # Recomputed in the backward: the states of all tokens would outweigh the inputs N times.
    @jax.checkpoint
    def piece(state, operands):
        return lax.scan(token, state, operands)

    batch, length = operands[0].shape[:2]
    # Of equal length, to be filled up with as few steps of size 0 as can be.
    size = -(-length // -(-length // 64))
    cut = tuple(to_chunks(each[:, :, None], size)[:, :, 0] for each in operands)
    state, out = lax.scan(piece, state, jax.tree.map(lambda each: jnp.moveaxis(each, 2, 1), cut))
    y, states = jax.tree.map(lambda each: each.reshape(-1, batch, *each.shape[3:])[:length], out)
    if states is not None:
        states = segments.take_time(jnp.moveaxis(states, 0, 1), state_positions)
    return jnp.moveaxis(y, 0, 1), state, states


@partial(jax.jit, static_argnames="chunk")
def _chunk_by_chunk(operands, A, state, state_positions, *, chunk):
    length = operands[0].shape[1]
    wanted = operands[-1][:, :0].astype(jnp.int32) if state_positions is None else state_positions
    wanted = jnp.clip(wanted, 0, length - 1)
    cut = tuple(to_chunks(each[:, :, None], chunk)[:, :, 0] for each in operands)

    def then(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    # Recomputed in the backward: the states of all tokens would outweigh the inputs N times.
    @jax.checkpoint
    def advance(carry, piece):
        (state, found), (index, operands) = carry, piece
        decay, write, C = _discretise(operands, A)
        decay, write = lax.associative_scan(then, (decay, write), axis=1)
        states = decay * state[:, None] + write
        y = jnp.einsum("btdn,btn->btd", states, C, precision="highest")
        here = (wanted // chunk == index)[..., None, None]
        found = jnp.where(here, segments.take_time(states, wanted % chunk), found)
        return (states[:, -1], found), y

    found = jnp.zeros_like(state[:, None]).repeat(wanted.shape[1], axis=1)
    pieces = (jnp.arange(cut[0].shape[0]), cut)
    (state, found), y = lax.scan(advance, (state, found), pieces)
    y = from_chunks(y[:, :, None], length)[:, :, 0]
    return y, state, None if state_positions is None else found
