"""The delta rule and its gated form: a memory that is corrected before it is read.

Per head, with state ``S [K, V]``, log decay ``g`` and write strength ``beta``:

    S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T
    o_t = scale * S_t^T q_t

The decay comes before the error (Gated DeltaNet, arXiv:2412.06464, eq. 10; DeltaNet, arXiv:
2406.06484, is ``g = 0``). In chunks, with ``D_ij`` the decay from after j to i and
``A_ij = beta_i D_ij (k_i . k_j)`` below the diagonal, ``T = (I + A)^-1`` gives every correction of
a chunk at once: ``E = T beta (V - D_0 K S)`` (the WY form of both papers).
"""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jla.ops.chunking import accumulator, product, unit_lower_inverse
from jla.ops.decay import Decay
from jla.ops.norm import l2_norm
from jla.ops.recurrence import Options, Parts, Recurrence, check_operands, run, scaled


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """Gated delta rule over whole rows; see the module's docstring for the recurrence.

    Args:
        q, k: ``[B, T, Hq, K]``; ``H`` a multiple of ``Hq``: head h reads group ``h // (H // Hq)``.
        v: ``[B, T, H, V]``.
        g: ``[B, T, H]`` log decay (natural log, at most 0; ``-inf`` empties the state), or None.
        beta: ``[B, T, H]`` write strength.
        scale: factor of the outputs, ``K**-0.5`` if None.
        use_qk_l2norm: normalise q and k over K first (:func:`jla.ops.l2_norm`).
        **options: :class:`jla.ops.Options`: ``initial_state``, ``output_final_state``,
            ``state_positions``, ``segment_ids``, ``chunk_size``, ``impl``.

    Returns:
        ``(o, final_state)``; with ``state_positions`` ``(o, final_state, states)``. ``o`` is
        ``[B, T, H, V]`` in v's dtype and 0 at padding; states are float32 ``[B, H, K, V]`` (None
        unless asked for) and ``[B, S, H, K, V]``. float64 inputs give float64 states.

    Raises:
        ValueError: shapes that disagree, an unknown impl or chunk size.
        ImplUnavailable: a named impl that cannot run this call.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> gate = -0.1 * jnp.ones((1, 3, 2))
        >>> o, state = gated_delta_rule(x, x, x, gate, -gate, output_final_state=True)
        >>> o.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    state = options.get("initial_state")
    check_operands(q=q, k=k, v=v, per_head={"g": g, "beta": beta}, initial_state=state)
    if use_qk_l2norm:
        q, k = l2_norm(q), l2_norm(k)
    dtype = accumulator(v.dtype)
    g = jnp.zeros_like(beta, dtype) if g is None else g
    operands = (scaled(q, scale), k, v, beta.astype(dtype)[..., None])
    return run(GATED_DELTA_RULE, operands, g[..., None], **options)


def delta_rule(q, k, v, beta, **options):
    """The delta rule without decay: :func:`gated_delta_rule` with ``g=None``, same options."""
    return gated_delta_rule(q, k, v, None, beta, **options)


def _step(q, k, v, beta, decay, state):
    state = state * decay
    error = beta * (v - jnp.einsum("bhkv,bhk->bhv", state, k, precision="highest"))
    state = state + k[..., :, None] * error[..., None, :]
    return jnp.einsum("bhkv,bhk->bhv", state, q, precision="highest"), state


def _within(q, k, v, beta, decay: Decay) -> Parts:
    dtype = v.dtype
    inverse = unit_lower_inverse(jnp.tril(beta * decay.pairs(k, k, dtype), -1))
    weighted = inverse * jnp.swapaxes(beta, -1, -2)
    return Parts(
        reads=decay.enter(q),
        scores=decay.pairs(q, k, dtype),
        keys=decay.leave(k),
        total=decay.total,
        pulls=product("...ij,...jk->...ik", weighted, decay.enter(k), dtype),
        writes=product("...ij,...jv->...iv", weighted, v, dtype),
    )


GATED_DELTA_RULE = Recurrence("gated_delta_rule", _step, _within)
