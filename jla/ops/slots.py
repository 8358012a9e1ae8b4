"""Gated slot attention (arXiv:2409.07146): attention over a memory of M slots that fade.

Per head, slots hold keys ``P [M, K]`` and values ``R [M, V]``, fade by ``g_t [M]`` and are written
with strengths ``s_t [M]``; a token attends to what they hold:

    P_t = diag(e^{g_t}) P_{t-1} + s_t k_t^T,    R_t = diag(e^{g_t}) R_{t-1} + s_t v_t^T
    o_t = R_t^T softmax(scale * P_t q_t)

Both are linear attention with a gate per slot. Values are read along the slots: that is GLA. Keys
are read along K, so the gates stand on the channels that come out.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jla.ops.chunking import accumulator, product, repeat_heads
from jla.ops.decay import Decay
from jla.ops.linear import GLA
from jla.ops.recurrence import Recurrence, check_operands, run, scaled


def gsa(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    s: jax.Array,
    g: jax.Array,
    *,
    scale: float | None = None,
    initial_state: tuple[jax.Array, jax.Array] | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Gated slot attention; see the module's docstring for the recurrence.

    Args:
        q, k: ``[B, T, Hq, K]``; ``H`` a multiple of ``Hq``.
        v: ``[B, T, H, V]``.
        s: how much each slot takes of a token ``[B, T, H, M]``.
        g: log decay of the slots ``[B, T, H, M]`` (natural log, at most 0).
        scale: factor of the attention's logits, ``K**-0.5`` if None.
        initial_state: ``(P [B, H, M, K], R [B, H, M, V])``; zeros if None. FLA keeps P transposed.
        **options: the others of :class:`jla.ops.Options`; the state is such a pair everywhere.

    Returns:
        As :func:`jla.ops.gated_delta_rule`, states as pairs.

    Raises:
        ValueError: shapes that disagree, an unknown impl or chunk size.
        ImplUnavailable: a named impl that cannot run this call.
    """
    _check(q, k, v, s, g, initial_state)
    keys, values = (None, None) if initial_state is None else initial_state
    k = repeat_heads(k, v.shape[2])
    logits, *slot_keys = run(KEYS, (scaled(q, scale), s, k), g, initial_state=keys, **options)
    weights = jax.nn.softmax(logits.astype(accumulator(v.dtype)), axis=-1).astype(v.dtype)
    o, *slot_values = run(VALUES, (weights, s, v), g, initial_state=values, **options)
    pairs = zip(slot_keys, slot_values, strict=True)
    return o, *(None if pair[0] is None else pair for pair in pairs)


class _SlotKeys(NamedTuple):
    """A chunk of the keys' pass without its entering state ``P [M, K]``, cf. ``Parts``:

        o = upto * (queries P^T) + within,   P' = diag(total) P + strengths^T keys

    Attributes:
        queries, keys: ``[C, K]``.
        strengths, upto, within: ``[C, M]``.
        total: ``[M]``.
    """

    queries: jax.Array
    strengths: jax.Array
    upto: jax.Array
    total: jax.Array
    within: jax.Array
    keys: jax.Array

    def narrowed(self, dtype) -> _SlotKeys:
        return self._replace(
            queries=self.queries.astype(dtype), strengths=self.strengths.astype(dtype)
        )

    def advance(self, state: jax.Array, dtype):
        read = product("...ck,...mk->...cm", self.queries, state.astype(dtype), dtype)
        update = product("...cm,...ck->...mk", self.strengths, self.keys, dtype)
        o = self.upto * read + self.within
        return o, state * self.total[..., None] + update, self.keys


def _keys_step(q, s, k, decay, state):
    state = state * decay + s[..., :, None] * k[..., None, :]
    return jnp.einsum("bhmk,bhk->bhm", state, q, precision="highest"), state


def _keys_within(q, s, k, decay: Decay) -> _SlotKeys:
    scores = product("...ik,...jk->...ij", q, k, k.dtype)
    return _SlotKeys(
        queries=q,
        strengths=decay.leave(s),
        upto=decay.upto,
        total=decay.total,
        within=decay.spread(scores, s, k.dtype),
        keys=k,
    )


def _check(q, k, v, s, g, initial_state):
    check_operands(q=q, k=k, v=v)
    wanted = v.shape[:3]
    if s.ndim != 4 or s.shape[:3] != wanted or not s.shape[3]:
        raise ValueError(f"s must be [B, T, H, M] with [B, T, H] = {wanted}, got shape {s.shape}")
    if g.shape != s.shape:
        raise ValueError(f"g must have s's shape {s.shape}, got {g.shape}")
    if initial_state is None:
        return
    shapes = [(v.shape[0], *v.shape[2:3], s.shape[3], x.shape[3]) for x in (k, v)]
    given = [x.shape for x in initial_state]
    if given != shapes:
        raise ValueError(
            f"initial_state must be (keys [B, H, M, K], values [B, H, M, V]) of shapes {shapes}, "
            f"got {given}"
        )


# Not ``Parts``, but with the same two methods.
KEYS = Recurrence("gsa", _keys_step, cast(Any, _keys_within))
VALUES = Recurrence("gsa", GLA.step, GLA.within)
