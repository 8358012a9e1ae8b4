"""Linear attention with decay: every token adds to a state that fades.

Per head, with state ``S [K, V]`` and log decay ``g``, one per head or one per key channel:

    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T,    o_t = scale * q_t^T S_t

One gate per head is simple GLA, and with constant gates retention (arXiv:2307.08621) and lightning
attention; Mamba-2's SSD (arXiv:2405.21060) reads ``q = C``, ``k = B``, ``v = dt x``. One gate per
channel is GLA (arXiv:2312.06635, eq. 3). RWKV-6 (arXiv:2404.05892) reads before it writes.
"""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jla.kernels import limits
from jla.kernels.sharding import RECURRENCE, Layout, per_device
from jla.ops import segments
from jla.ops.chunking import accumulator
from jla.ops.decay import Decay, back, forth
from jla.ops.recurrence import Options, Parts, Recurrence, check_operands, run, scaled


def simple_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None = None,
    *,
    scale: float | None = None,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """Linear attention with a gate per head; see the module's docstring for the recurrence.

    Args:
        q, k: ``[B, T, Hq, K]``; ``H`` a multiple of ``Hq``: head h reads group ``h // (H // Hq)``.
        v: ``[B, T, H, V]``.
        g: log decay (natural log, at most 0; ``-inf`` empties the state), ``[B, T, H]``, or ``[H]``
            for gates that never change, or None for no decay.
        scale: factor of the outputs, ``K**-0.5`` if None.
        **options: :class:`jla.ops.Options`.

    Returns:
        As :func:`jla.ops.gated_delta_rule`.

    Raises:
        ValueError: shapes that disagree, an unknown impl or chunk size.
        ImplUnavailable: a named impl that cannot run this call.
    """
    dtype = accumulator(v.dtype)
    if g is not None and g.ndim == 1 and v.ndim == 4:
        if g.shape != v.shape[2:3]:
            raise ValueError(f"g must be [B, T, H] or [H] with H={v.shape[2]}, got {g.shape}")
        g = jnp.zeros_like(v[..., 0], dtype) + g
    check_operands(q=q, k=k, v=v, per_head={"g": g}, initial_state=options.get("initial_state"))
    facts = dict(scale=scale, state_positions=options.get("state_positions"))
    if SIMPLE_GLA.choose(q, k, v, impl=options.get("impl", "auto"), **facts).impl == "mosaic":
        return on_hopper(q, k, v, g, scale=scale, **options)
    g = jnp.zeros_like(v[..., 0], dtype) if g is None else g
    return run(SIMPLE_GLA, (scaled(q, scale), k, v), g[..., None], **options)


def on_hopper(q, k, v, g, *, scale=None, weights=None, skip=None, **options: Unpack[Options]):
    """:func:`simple_gla` by its kernel.

    ``weights [B, T, H]`` are factors of the values in the state; ``skip [H]``, only with weights,
    is how much of the values themselves is added to the outputs.
    """
    from jla.kernels import linear_attention as kernels

    def kernel(q, k, v, per_token, state, marks, skip):
        o, state = kernels.linear_attention(
            q,
            k,
            v,
            per_token["g"],
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            initial_state=state,
            marks=marks,
            v_scale=per_token["weights"],
            skip=skip,
        )
        return o, state if options.get("output_final_state") else None

    marks = segments.marks_or_none(options.get("segment_ids"), v)
    gates = dict(g=g, weights=weights)
    state = options.get("initial_state")
    layout = Layout((*RECURRENCE.operands, "h"), RECURRENCE.results)
    return per_device(kernel, layout, 2, q, k, v, gates, state, marks, skip)


def gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    *,
    scale: float | None = None,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """Gated linear attention: :func:`simple_gla` with a gate per channel, ``g [B, T, H, K]``."""
    check_operands(q=q, k=k, v=v, per_channel={"g": g}, initial_state=options.get("initial_state"))
    return run(GLA, (scaled(q, scale), k, v), g, **options)


def rwkv6(
    r: jax.Array,
    k: jax.Array,
    v: jax.Array,
    w: jax.Array,
    u: jax.Array,
    *,
    scale: float = 1.0,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """RWKV-6: the state is read before a token writes, the token itself with a bonus ``u``.

    ``o_t = scale * r_t^T (S_{t-1} + diag(u) k_t v_t^T)``, then ``S_t = diag(e^{w_t}) S_{t-1} +
    k_t v_t^T`` (arXiv:2404.05892, eq. 19).

    Args:
        r, k: ``[B, T, Hq, K]``.
        v: ``[B, T, H, V]``.
        w: ``[B, T, H, K]`` log decay (natural log, at most 0).
        u: ``[H, K]`` bonus.
        scale: factor of the outputs.
        **options: :class:`jla.ops.Options`.
    """
    check_operands(q=r, k=k, v=v, per_channel={"w": w}, initial_state=options.get("initial_state"))
    if u.shape != w.shape[2:]:
        raise ValueError(f"u must be [H, K] = {w.shape[2:]}, got shape {u.shape}")
    bonus = jnp.zeros_like(w, accumulator(v.dtype)) + u
    r = scaled(r, scale)
    return run(RWKV6, (r, k, v, bonus, r), w, **options)


def _step(q, k, v, decay, state):
    state = state * decay + k[..., :, None] * v[..., None, :]
    return jnp.einsum("bhkv,bhk->bhv", state, q, precision="highest"), state


def _within(q, k, v, decay: Decay) -> Parts:
    ((scores,),) = decay.pairs([q], [k], v.dtype)
    return Parts(
        reads=decay.enter(q),
        scores=scores,
        keys=decay.leave(k),
        total=decay.total,
        values=v,
    )


def _rwkv6_step(r, k, v, u, reader, decay, state):
    own = jnp.sum(r * u * k, axis=-1, keepdims=True) * v
    o = own + jnp.einsum("bhkv,bhk->bhv", state, reader, precision="highest")
    return o, state * decay + k[..., :, None] * v[..., None, :]


def _rwkv6_within(r, k, v, u, reader, decay: Decay) -> Parts:
    wide = accumulator(v.dtype)
    own = jnp.sum(r.astype(wide) * u * k.astype(wide), axis=-1)
    ((scores,),) = decay.pairs([back(reader)], [k], v.dtype)
    return Parts(
        reads=decay.enter_before(reader),
        scores=forth(scores) + own[..., None] * jnp.eye(own.shape[-1]),
        keys=decay.leave(k),
        total=decay.total,
        values=v,
    )


SIMPLE_GLA = Recurrence("simple_gla", _step, _within, limit=limits.simple_gla)
GLA = Recurrence("gla", _step, _within)
RWKV6 = Recurrence("rwkv6", _rwkv6_step, _rwkv6_within, readers=(4,))
