"""Mamba-3's recurrence (arXiv:2603.15569): trapezoidal steps, a rotating state, several ranks.

Per head, with step ``dt``, rate ``A``, mixing ``l = sigmoid(trap)``, and for each of R ranks keys
``k = turn(B)``, queries ``q = turn(C)`` and values ``v = x * mimo_x``:

    S_t = e^{dt_t A_t} (S_{t-1} + (1 - l_t) dt_t k_{t-1} v_{t-1}^T) + l_t dt_t k_t v_t^T
    y_t = q_t^T S_t + D v_t

(sums over the ranks of k and v). Keys and queries turn by the angle ``sum_s dt_s pi
tanh(angles_s)`` of their document so far, which is what a complex rate does to a real state.

A token's write is seen twice: by itself with ``l dt``, and by all later tokens with what the next
token's ``(1 - l) dt`` adds. Writing both at once, after the read, leaves a single write per token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jla.ops import segments
from jla.ops.chunking import accumulator, product
from jla.ops.decay import Decay
from jla.ops.dispatch import Choice
from jla.ops.recurrence import Parts, Recurrence, check_shapes, rank_major, run
from jla.ops.rotary import turn
from jla.ops.ssm import without_padding


class Mamba3State(NamedTuple):
    """What later tokens need, all float32 (float64 for float64 inputs).

    Attributes:
        angle: radians ``[B, H, S]``, within pi of 0.
        ssm: ``[B, H, N, P]`` (FLA's is ``[B, H, P, N]``).
        k: ``[B, H, R, N]`` the last token's keys, turned (FLA's is ``[B, R, H, N]``).
        v: ``[B, H, P]`` its x.
    """

    angle: jax.Array
    ssm: jax.Array
    k: jax.Array
    v: jax.Array


def mamba3(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    trap: jax.Array,
    angles: jax.Array,
    D: jax.Array | None = None,
    mimo_x: jax.Array | None = None,
    *,
    interleaved: bool = True,
    initial_state: Mamba3State | None = None,
    output_final_state: bool = False,
    state_positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[Any, ...]:
    """Mamba-3 over whole rows; see the module's docstring for the recurrence.

    Args:
        x: ``[B, T, H, P]``.
        dt: ``[B, T, H]`` step sizes, at least 0.
        A: ``[B, T, H]`` rates, at most 0.
        B, C: ``[B, T, H, R, N]`` with biases added, R ranks, N even.
        trap: ``[B, T, H]``, before its sigmoid.
        angles: ``[B, T, S]`` or ``[B, T, H, S]`` turning rates before their tanh, S at most N/2.
        D: ``[H]`` skip, or None.
        mimo_x: ``[H, R, P]`` factors that make the ranks' values from x, ones if None.
        interleaved: which channels turn together, see :func:`jla.ops.rotary.turn`; upstream's
            kernels of one rank interleave, those of several don't.
        initial_state, output_final_state, state_positions, segment_ids, chunk_size, impl: as in
            :class:`jla.ops.Options`, with a :class:`Mamba3State` for each state.

    Returns:
        ``(y, final_state)``; with ``state_positions`` ``(y, final_state, states)``. ``y`` is
        ``[B, T, H, R, P]`` in x's dtype and 0 at padding; the leaves of ``states`` are
        ``[B, S, ...]``.

    Raises:
        ValueError: shapes that disagree, an unknown impl or chunk size.
        ImplUnavailable: a named impl that cannot run this call.
    """
    _check(x, dt, A, B, C, trap, angles, D, mimo_x)
    dtype = accumulator(x.dtype)
    if segment_ids is not None:
        segment_ids = segments.check_segment_ids(segment_ids, x.shape[:2], x)
    # A step of size 0 neither writes nor decays nor turns.
    x, dt = (without_padding(each, segment_ids) for each in (x, dt.astype(dtype)))
    angles = angles[:, :, None] if angles.ndim == 3 else angles
    turns = jnp.pi * jnp.tanh(angles.astype(dtype)) * dt[..., None]
    before = _zeros(x, B, turns) if initial_state is None else initial_state
    angle = _accumulate(turns, segment_ids, before.angle)
    q, k = (turn(each, angle[..., None, :], interleaved=interleaved) for each in (C, B))
    values = x[..., None, :] if mimo_x is None else x[..., None, :] * mimo_x.astype(x.dtype)

    trap = trap.astype(dtype)
    own, late = dt * jax.nn.sigmoid(trap), dt * jax.nn.sigmoid(-trap)
    ahead = _of_next(late, segment_ids)
    scores = product("bthrn,bthsn->bthrs", C, B, x.dtype) * own[..., None, None]
    keys = (k * (own + ahead)[..., None, None]).astype(k.dtype)
    entering = before.ssm + _entry(before, late, mimo_x, segment_ids)
    y, ssm, *states = run(
        MAMBA3,
        (q, keys, values, scores),
        (dt * A)[..., None],
        initial_state=entering,
        output_final_state=True,
        state_positions=state_positions,
        segment_ids=segment_ids,
        chunk_size=chunk_size,
        impl=impl,
    )
    y = y.reshape(values.shape)
    if D is not None:
        y = (y + values * D[:, None, None]).astype(x.dtype)

    def state(at, ssm):
        return Mamba3State(
            angle=_take(angle, at, before.angle),
            ssm=ssm,
            k=_take(k.astype(dtype), at, before.k),
            v=_take(x.astype(dtype), at, before.v),
        )

    last = segments.last_real(jnp.full_like(dt[:, :1, 0], x.shape[1] - 1, jnp.int32), segment_ids)
    final = jax.tree.map(lambda leaf: leaf[:, 0], state(last, ssm[:, None]))
    outputs = (y, final if output_final_state else None)
    if state_positions is None:
        return outputs
    at = segments.last_real(jnp.clip(state_positions, 0, x.shape[1] - 1), segment_ids)
    # The engine's states hold what the next token adds to the last one's write.
    late_write = jnp.einsum(
        "bshrn,bshrp->bshnp",
        segments.take_time(k.astype(dtype) * ahead[..., None, None], at),
        segments.take_time(values.astype(dtype), at),
        precision="highest",
    )
    none = (at < 0)[..., None, None, None]
    ssm = jnp.where(none, before.ssm[:, None], states[0] - late_write)
    return (*outputs, state(at, ssm))


def choose_mamba3(x, *_, impl: str = "auto", **__) -> Choice:
    """Which implementation a call of :func:`mamba3` runs; decided from static facts only."""
    return MAMBA3.choose(x, x, x, impl=impl)


def _zeros(x, B, turns) -> Mamba3State:
    dtype = turns.dtype
    k, v = jnp.zeros_like(B[:, 0], dtype), jnp.zeros_like(x[:, 0], dtype)
    ssm = k[:, :, 0, :, None] * v[:, :, None, :]
    return Mamba3State(jnp.zeros_like(turns[:, 0]), ssm, k, v)


def _wrap(angle):
    """The same angle within pi of 0, with a derivative of 1."""
    return angle - 2 * np.pi * lax.stop_gradient(jnp.round(angle / (2 * np.pi)))


def _accumulate(turns, segment_ids, before):
    """Sums of ``turns [B, T, H, S]`` over the document so far; nothing is subtracted at starts."""
    starts = jnp.zeros_like(turns[..., :1], jnp.bool_)
    if segment_ids is not None:
        starts = starts | segments.document_starts(segment_ids)[..., None, None]
    turns = jnp.concatenate([turns[:, :1] + before[:, None], turns[:, 1:]], axis=1)

    def then(first, second):
        return _wrap(jnp.where(second[1], second[0], first[0] + second[0])), first[1] | second[1]

    return _wrap(lax.associative_scan(then, (turns, starts), axis=1)[0])


def _of_next(late, segment_ids):
    """``late [B, T, H]`` of the document's next token, 0 behind its last."""
    if segment_ids is None:
        return jnp.concatenate([late[:, 1:], jnp.zeros_like(late[:, :1])], axis=1)
    ahead = segments.next_real(segment_ids)
    starts = segments.take_time(segments.document_starts(segment_ids), ahead)
    goes_on = (ahead < late.shape[1]) & ~starts
    return jnp.where(goes_on[..., None], segments.take_time(late, ahead), 0)


def _entry(before, late, mimo_x, segment_ids):
    """What the row's first token adds to the write of the token before the row."""
    first = jnp.zeros_like(late[:, :1, 0], jnp.int32)
    if segment_ids is not None:
        first = jnp.argmax(segment_ids != 0, axis=1)[:, None]
    v = before.v[:, :, None] if mimo_x is None else before.v[:, :, None] * mimo_x
    keys = before.k * segments.take_time(late, first)[:, 0, :, None, None]
    return jnp.einsum("bhrn,bhrp->bhnp", keys, v, precision="highest")


def _take(x, at, before):
    """``x [B, T, ...]`` at tokens ``[B, S]``, ``before [B, ...]`` where the token is -1."""
    none = (at < 0).reshape(*at.shape, *(1,) * (x.ndim - 2))
    return jnp.where(none, before[:, None], segments.take_time(x, at))


def _check(x, dt, A, B, C, trap, angles, D, mimo_x):
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(f"x must be [B, T, H, P] and not empty, got shape {x.shape}")
    if B.ndim != 5 or B.shape[:3] != x.shape[:3] or B.shape[-1] % 2:
        raise ValueError(
            f"B must be [B, T, H, R, N] with [B, T, H] = {x.shape[:3]} and N even, "
            f"got shape {B.shape}"
        )
    *_, heads, ranks, size = B.shape
    tokens = x.shape[:3]
    lead = x.shape[:2] if angles.ndim == 3 else tokens
    if angles.shape[:-1] != lead or not 0 < angles.shape[-1] <= size // 2:
        raise ValueError(
            f"angles must be [B, T, S] or [B, T, H, S] with [B, T, H] = {tokens} and S at most "
            f"N/2 = {size // 2}, got shape {angles.shape}"
        )
    check_shapes(
        dt=(dt, "[B, T, H]", tokens),
        A=(A, "[B, T, H]", tokens),
        C=(C, "[B, T, H, R, N]", B.shape),
        trap=(trap, "[B, T, H]", tokens),
        D=(D, "[H]", (heads,)),
        mimo_x=(mimo_x, "[H, R, P]", (heads, ranks, x.shape[-1])),
    )
    if mimo_x is None and ranks != 1:
        raise ValueError(f"mimo_x must be given for B's {ranks} ranks")


def _step(q, k, v, own, decay, state):
    state = state * decay
    y = jnp.einsum("bhnp,bhrn->bhrp", state, q, precision="highest")
    y = y + jnp.einsum("bhrs,bhsp->bhrp", own, v, precision="highest")
    return y, state + jnp.einsum("bhrn,bhrp->bhnp", k, v, precision="highest")


def _within(q, k, v, own, decay: Decay) -> Parts:
    ranks, chunk = q.shape[-2], q.shape[-3]
    q, k = rank_major(q), rank_major(k)
    tiled = lambda x: jnp.concatenate([x] * ranks, axis=-2)  # noqa: E731
    earlier = jnp.tile(jnp.tril(decay.between(), -1), (ranks, ranks))
    # A token's own ranks stand on the diagonals of the blocks of ranks.
    blocks = jnp.moveaxis(own, -3, -1)[..., None] * jnp.eye(chunk, dtype=own.dtype)
    blocks = jnp.swapaxes(blocks, -3, -2)
    # On an Explicit mesh a reshape may join one pair of axes.
    blocks = blocks.reshape(*blocks.shape[:-2], ranks * chunk).reshape(earlier.shape)
    return Parts(
        reads=q * tiled(decay.upto),
        scores=product("...ik,...jk->...ij", q, k, v.dtype) * earlier + blocks,
        keys=k * tiled(decay.after),
        total=decay.total,
        values=rank_major(v),
    )


MAMBA3 = Recurrence("mamba3", _step, _within)
