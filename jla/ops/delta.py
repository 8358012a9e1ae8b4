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

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jla.ops import segments
from jla.ops.chunking import (
    accumulator,
    from_chunks,
    pick_chunk,
    product,
    repeat_heads,
    scalar_decay,
    to_chunks,
    unit_lower_inverse,
)
from jla.ops.dispatch import Choice, select
from jla.ops.norm import l2_norm
from jla.ops.recurrence import check_heads, prepare_gates, read_states


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    state_positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int | None = None,
    impl: str = "auto",
):
    """Gated delta rule over whole rows; see the module's docstring for the recurrence.

    Args:
        q, k: ``[B, T, Hq, K]``; ``H`` a multiple of ``Hq``: head h reads group ``h // (H // Hq)``.
        v: ``[B, T, H, V]``.
        g: ``[B, T, H]`` log decay (natural log, at most 0; ``-inf`` empties the state), or None.
        beta: ``[B, T, H]`` write strength.
        scale: factor of the outputs, ``K**-0.5`` if None.
        initial_state: ``[B, H, K, V]``, belongs to the row's first document; zeros if None.
        output_final_state: also return the state after the row's last real token.
        state_positions: int ``[B, S]``: also return the states after these tokens of the row.
        segment_ids: int ``[B, T]``, 0 = padding, a change = new document.
        use_qk_l2norm: normalise q and k over K first (:func:`jla.ops.l2_norm`).
        chunk_size: 16, 32, 64 or 128 tokens, for ``impl="chunk"``; None takes 32 on CPUs (where
            fewer operations win) and 64 elsewhere.
        impl: ``"auto"``, ``"reference"`` (token by token), ``"chunk"`` (chunk-parallel, any
            backend, memory linear in T) or ``"mosaic"``.

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
    check_heads(q=q, k=k, v=v, per_head={"g": g, "beta": beta}, initial_state=initial_state)
    choice = choose("gated_delta_rule", q, k, v, impl=impl)
    if use_qk_l2norm:
        q, k = l2_norm(q), l2_norm(k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype, heads = accumulator(v.dtype), v.shape[2]
    q, k = repeat_heads(q, heads), repeat_heads(k, heads)
    g = jnp.zeros(beta.shape, dtype) if g is None else g.astype(dtype)
    q, k, v, beta, g = prepare_gates(segment_ids, (q, k, v, beta.astype(dtype)), g)
    state = zero_state(k, v) if initial_state is None else initial_state.astype(dtype)
    run = _reference if choice.impl == "reference" else partial(_chunk, chunk_size=chunk_size)
    o, final, states = run(q, k, v, g, beta, state, scale, state_positions)
    outputs = (o.astype(v.dtype), final if output_final_state else None)
    return outputs if state_positions is None else (*outputs, states)


def delta_rule(q, k, v, beta, **options):
    """The delta rule without decay: :func:`gated_delta_rule` with ``g=None``, same options."""
    return gated_delta_rule(q, k, v, None, beta, **options)


def choose(op: str, q, k, v, *_, impl: str = "auto", **__) -> Choice:
    """Which implementation a call with these arguments runs; decided from static facts only."""
    offers = {"reference": None, "chunk": None, "mosaic": "no Hopper kernel is offered yet"}
    # One token is one step of the recurrence: nothing to be parallel over.
    order = ("mosaic", "reference") if q.shape[1] == 1 else ("mosaic", "chunk", "reference")
    return select(op, impl, offers, order)


def zero_state(k: jax.Array, v: jax.Array) -> jax.Array:
    """Zeros ``[B, H, K, V]``, built from the inputs so that they share their sharding."""
    dtype = accumulator(v.dtype)
    rows, columns = jnp.zeros_like(k[:, 0], dtype), jnp.zeros_like(v[:, 0], dtype)
    return rows[..., :, None] * columns[..., None, :]


def step(q, k, v, g, beta, state):
    """One token of the recurrence: ``[B, H, K]``, ``[B, H, V]``, ``[B, H]``, ``[B, H, K, V]``."""
    precise = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    state = state * jnp.exp(g)[..., None, None]
    error = beta[..., None] * (v - precise("bhkv,bhk->bhv", state, k))
    state = state + k[..., :, None] * error[..., None, :]
    return precise("bhkv,bhk->bhv", state, q), state


def _reference(q, k, v, g, beta, state, scale, state_positions):
    def token(state, inputs):
        o, state = step(*inputs, state)
        return state, (o, None if state_positions is None else state)

    wide = [jnp.moveaxis(x.astype(state.dtype), 1, 0) for x in (q * scale, k, v, g, beta)]
    state, (o, states) = lax.scan(token, state, tuple(wide))
    if state_positions is not None:
        states = segments.take_time(jnp.moveaxis(states, 0, 1), state_positions)
    return jnp.moveaxis(o, 0, 1), state, states


def _chunk(q, k, v, g, beta, state, scale, state_positions, *, chunk_size):
    length, dtype = q.shape[1], v.dtype
    chunk = pick_chunk(length, chunk_size, "chunk_size of gated_delta_rule")
    q, k, v, g, beta = (to_chunks(x, chunk) for x in (q, k, v, g, beta))
    # Recomputed in the backward: its C x C matrices would outweigh the inputs.
    parts = jax.checkpoint(partial(_within_chunks, scale=scale))(q, k, v, g, beta)

    def advance(state, chunk_parts):
        reads, scores, pulls, writes, keys, total = chunk_parts
        narrow = state.astype(dtype)
        errors = writes - product("bhck,bhkv->bhcv", pulls, narrow, dtype)
        o = product("bhck,bhkv->bhcv", reads, narrow, dtype)
        o = o + product("bhij,bhjv->bhiv", scores, errors, dtype)
        after = state * total[..., None, None] + product("bhck,bhcv->bhkv", keys, errors, dtype)
        kept = None if state_positions is None else (state, errors)
        return after, (o.astype(dtype), kept)

    final, (o, kept) = lax.scan(advance, state, parts)
    states = None
    if state_positions is not None:
        states = read_states(state_positions, *kept, k, g)
    return from_chunks(o, length), final, states


def _within_chunks(q, k, v, g, beta, *, scale):
    """Everything of a chunk that does not depend on the state that enters it, ``[N, B, H, ...]``.

    Returns reads ``[C, K]`` (decayed queries), scores ``[C, C]``, pulls ``[C, K]`` and writes
    ``[C, V]`` (``E = writes - pulls S``), keys ``[C, K]`` decayed to the chunk's end, total decay.
    """
    dtype = v.dtype
    decay = scalar_decay(g)
    overlap = product("nbhik,nbhjk->nbhij", k, k, dtype)
    inverse = unit_lower_inverse(jnp.tril(overlap * decay.pairs * beta[..., None], -1))
    weighted = inverse * beta[..., None, :]
    scores = scale * product("nbhik,nbhjk->nbhij", q, k, dtype) * decay.pairs
    entry = decay.from_start[..., None]
    pulls = product("nbhij,nbhjk->nbhik", weighted, k * entry, dtype)
    writes = product("nbhij,nbhjv->nbhiv", weighted, v, dtype)
    narrow = [x.astype(dtype) for x in (scale * q * entry, scores, pulls)]
    keys = (k * decay.to_end[..., None]).astype(dtype)
    return (*narrow, writes, keys, decay.total)
