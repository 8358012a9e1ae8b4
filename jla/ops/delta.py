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

from jla.kernels import limits
from jla.kernels.sharding import RECURRENCE, per_device
from jla.ops import segments
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
    facts = dict(scale=scale, state_positions=options.get("state_positions"))
    choice = GATED_DELTA_RULE.choose(q, k, v, impl=options.get("impl", "auto"), **facts)
    if choice.impl == "mosaic":
        return _hopper(q, k, v, g, beta, scale, use_qk_l2norm, **options)
    g = jnp.zeros_like(beta, accumulator(v.dtype)) if g is None else g
    operands = _operands(q, k, v, beta, scale, use_qk_l2norm)
    return run(GATED_DELTA_RULE, operands, g[..., None], **options)


def _hopper(q, k, v, g, beta, scale, use_qk_l2norm, **options: Unpack[Options]):
    from jla.kernels import gated_delta_rule as kernels

    def kernel(q, k, v, per_token, state, marks):
        return kernels.gated_delta_rule(
            q,
            k,
            v,
            per_token["g"],
            per_token["beta"],
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            initial_state=state,
            marks=marks,
            use_qk_l2norm=use_qk_l2norm,
            output_final_state=bool(options.get("output_final_state")),
        )

    marks = segments.marks_or_none(options.get("segment_ids"), v)
    gates = dict(g=g, beta=beta)
    state = options.get("initial_state")
    return per_device(kernel, RECURRENCE, 2, q, k, v, gates, state, marks)


def delta_rule(q, k, v, beta, **options):
    """The delta rule without decay: :func:`gated_delta_rule` with ``g=None``, same options."""
    return gated_delta_rule(q, k, v, None, beta, **options)


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """Kimi Delta Attention: :func:`gated_delta_rule` with a gate per channel, ``g [B, T, H, K]``.

    Kimi Linear (arXiv:2510.26692), eq. 1.
    """
    state = options.get("initial_state")
    gates = dict(per_head={"beta": beta}, per_channel={"g": g})
    check_operands(q=q, k=k, v=v, **gates, initial_state=state)
    return run(KDA, _operands(q, k, v, beta, scale, use_qk_l2norm), g, **options)


def gdn2(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    b: jax.Array,
    w: jax.Array,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """Gated DeltaNet 2: :func:`kda` that erases and writes with a gate per channel each.

    arXiv:2605.22791:
    ``S_t = (I - k_t (b_t k_t)^T) diag(e^{g_t}) S_{t-1} + k_t (w_t v_t)^T``

    Args:
        q, k, v, g: as in :func:`kda`.
        b: ``[B, T, H, K]`` erase gate.
        w: ``[B, T, H, V]`` write gate.
        scale, use_qk_l2norm, **options: as in :func:`kda`.
    """
    state = options.get("initial_state")
    check_operands(q=q, k=k, v=v, per_channel={"g": g, "b": b}, initial_state=state)
    if w.shape != v.shape:
        raise ValueError(f"w must have v's shape {v.shape}, got {w.shape}")
    q, k = _queries_and_keys(q, k, scale, use_qk_l2norm)
    return run(GDN2, (q, k, v, b, w), g, **options)


def gated_delta_product(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array,
    *,
    num_householder: int,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    segment_ids: jax.Array | None = None,
    state_positions: jax.Array | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Several delta-rule writes per token, one decay and one read (arXiv:2502.10297).

    :func:`gated_delta_rule` over ``T * n`` writes: a token decays before its first and is read
    after its last.

    Args:
        q: ``[B, T, Hq, K]``.
        k, v: ``[B, T * n, Hq, K]``, ``[B, T * n, H, V]``, a token's n writes in a row.
        g: ``[B, T, H]`` log decay of the token, or None.
        beta: ``[B, T * n, H]``.
        num_householder: n.
        segment_ids, state_positions: of the T tokens.
        scale, use_qk_l2norm, **options: as in :func:`gated_delta_rule`.
    """
    n, (batch, length) = num_householder, q.shape[:2]
    if n < 1 or k.shape[:2] != (batch, length * n):
        raise ValueError(
            f"k must be [B, T * num_householder, Hq, K] with T={length}, {num_householder=}, "
            f"got shape {k.shape}"
        )

    def at_write(i, x):
        """``x [B, T, ...]`` at each token's write i of n, zeros at the others."""
        # Stacked, not scattered: zeros of x itself share its place on an Explicit mesh.
        spread = jnp.stack([x if j == i else jnp.zeros_like(x) for j in range(n)], axis=2)
        return spread.reshape(batch, length * n, *x.shape[2:])

    if segment_ids is not None:
        segment_ids = jnp.repeat(segment_ids, n, axis=1)
    if state_positions is not None:
        state_positions = state_positions * n + n - 1
    o, *states = gated_delta_rule(
        at_write(n - 1, q),
        k,
        v,
        None if g is None else at_write(0, g),
        beta,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        segment_ids=segment_ids,
        state_positions=state_positions,
        **options,
    )
    return o[:, n - 1 :: n], *states


def _queries_and_keys(q, k, scale, use_qk_l2norm):
    """``q`` times the output scale and ``k``, both normalised first if so asked."""
    if use_qk_l2norm:
        q, k = l2_norm(q), l2_norm(k)
    return scaled(q, scale), k


def _operands(q, k, v, beta, scale, use_qk_l2norm):
    """A rule's operands where one strength per head both erases and writes."""
    beta = beta.astype(accumulator(v.dtype))[..., None]
    return (*_queries_and_keys(q, k, scale, use_qk_l2norm), v, beta, beta)


def _step(q, k, v, erase, write, decay, state):
    state = state * decay
    error = write * v - jnp.einsum("bhkv,bhk->bhv", state, erase * k, precision="highest")
    state = state + k[..., :, None] * error[..., None, :]
    return jnp.einsum("bhkv,bhk->bhv", state, q, precision="highest"), state


def _within(q, k, v, erase, write, decay: Decay) -> Parts:
    dtype, erased = v.dtype, erase * k
    (scores,), (overlaps,) = decay.pairs([q, erased], [k], dtype)
    inverse = unit_lower_inverse(jnp.tril(overlaps, -1))
    return Parts(
        reads=decay.enter(q),
        scores=scores,
        keys=decay.leave(k),
        total=decay.total,
        pulls=product("...ij,...jk->...ik", inverse, decay.enter(erased), dtype),
        writes=product("...ij,...jv->...iv", inverse, write * v, dtype),
    )


GATED_DELTA_RULE = Recurrence("gated_delta_rule", _step, _within, limit=limits.gated_delta_rule)
KDA = Recurrence("kda", _step, _within)
GDN2 = Recurrence("gdn2", _step, _within)
