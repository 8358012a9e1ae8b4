"""Delta rules whose transition is diagonal plus low rank, RWKV-7 among them.

Per head, with state ``S [K, V]``, log decay ``g`` per key channel and directions ``a``, ``b``:

    S_t = diag(e^{g_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T,    o_t = scale * q_t^T S_t

``a`` reads the state *before* it decays (RWKV-7, arXiv:2503.14456, eq. 16, transposed: its state is
``[V, K]``). Without decay this is the identity plus low rank. What ``a`` reads inside a chunk is
found at once through ``(I - A_ab)^-1``, as the delta rule's corrections are.
"""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jla.ops.chunking import accumulator, product, unit_lower_inverse
from jla.ops.decay import Decay, back, forth
from jla.ops.recurrence import Options, Parts, Recurrence, check_operands, run, scaled


def dplr_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array,
    g: jax.Array | None = None,
    *,
    scale: float | None = None,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """Diagonal plus low rank; see the module's docstring for the recurrence.

    Args:
        q, k: ``[B, T, Hq, K]``; ``H`` a multiple of ``Hq``.
        v: ``[B, T, H, V]``.
        a, b: ``[B, T, H, K]``, what is read and along what it is written.
        g: ``[B, T, H, K]`` log decay (natural log, at most 0), or None: identity plus low rank.
        scale: factor of the outputs, ``K**-0.5`` if None.
        **options: :class:`jla.ops.Options`.

    Returns:
        As :func:`jla.ops.gated_delta_rule`.

    Raises:
        ValueError: shapes that disagree, an unknown impl or chunk size.
        ImplUnavailable: a named impl that cannot run this call.
    """
    state = options.get("initial_state")
    check_operands(q=q, k=k, v=v, per_channel={"a": a, "b": b, "g": g}, initial_state=state)
    g = jnp.zeros_like(a[..., :1], accumulator(v.dtype)) if g is None else g
    return run(DPLR, (scaled(q, scale), k, v, a, b), g, **options)


def iplr_delta_rule(q, k, v, a, b, **options):
    """Identity plus low rank: :func:`dplr_delta_rule` with ``g=None``, same options."""
    return dplr_delta_rule(q, k, v, a, b, None, **options)


def rwkv7(r, w, k, v, a, b, *, scale: float = 1.0, **options: Unpack[Options]) -> tuple[Any, ...]:
    """RWKV-7's recurrence in its argument order: receptance r, log decay w, k, v, a, b.

    :func:`dplr_delta_rule` with ``q=r``, ``g=w`` and a scale of 1.
    """
    return dplr_delta_rule(r, k, v, a, b, w, scale=scale, **options)


def _step(q, k, v, a, b, decay, state):
    read = jnp.einsum("bhkv,bhk->bhv", state, a, precision="highest")
    state = state * decay + b[..., :, None] * read[..., None, :] + k[..., :, None] * v[..., None, :]
    return jnp.einsum("bhkv,bhk->bhv", state, q, precision="highest"), state


def _within(q, k, v, a, b, decay: Decay) -> Parts:
    dtype = v.dtype
    scores, reads = decay.pairs([q, back(a)], [k, b], dtype)
    of_k, of_b = map(forth, reads)
    inverse = unit_lower_inverse(-of_b)
    read = product("...ij,...jv->...iv", of_k, v, dtype)
    return Parts(
        reads=decay.enter(q),
        scores=jnp.concatenate(scores, axis=-1),
        keys=jnp.concatenate([decay.leave(k), decay.leave(b)], axis=-2),
        total=decay.total,
        values=v,
        pulls=-product("...ij,...jk->...ik", inverse, decay.enter_before(a), dtype),
        writes=product("...ij,...jv->...iv", inverse, read, dtype),
    )


DPLR = Recurrence("dplr_delta_rule", _step, _within, streams=(1, 4), readers=(3,))
