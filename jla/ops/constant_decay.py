"""Linear attention whose decay does not depend on the token: none, or a rate per head.

All of it is :func:`jla.ops.simple_gla`, whose docstring has the recurrence.
"""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jla.ops.chunking import accumulator
from jla.ops.dispatch import Choice
from jla.ops.linear import SIMPLE_GLA, simple_gla
from jla.ops.recurrence import Options, Recurrence, check_operands, run, scaled


def retention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """Retention: :func:`simple_gla` where head h always decays by ``1 - 2^(-5-h)`` a token
    (arXiv:2307.08621, eq. 8)."""
    check_operands(q=q, k=k, v=v)
    g = jnp.log1p(-jnp.exp2(-5.0 - jnp.arange(v.shape[2], dtype=accumulator(v.dtype))))
    return simple_gla(q, k, v, g, scale=scale, **options)


def lightning_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """Lightning attention: :func:`simple_gla` where head h of H always has the log decay
    ``-8 h / H * (1 - layer_idx / num_layers)`` (arXiv:2401.04658, as FLA has it)."""
    check_operands(q=q, k=k, v=v)
    heads = jnp.arange(v.shape[2], dtype=accumulator(v.dtype))
    g = -8 / v.shape[2] * (1 - layer_idx / num_layers) * heads
    return simple_gla(q, k, v, g, scale=scale, **options)


def linear_attn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    normalize: bool = True,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    """Linear attention without decay, divided by the sum of its weights (arXiv:2006.16236, eq. 12).

    ``o_t = q_t^T S_t / (q_t^T z_t + 1e-10)`` with ``z_t`` the sum of keys; q and k should be
    features at least 0. The sum is one more column of values, all 1.

    Args:
        q, k, v, scale: as in :func:`simple_gla`.
        normalize: divide; without, this is :func:`simple_gla` without gates.
        **options: :class:`jla.ops.Options`; with ``normalize`` the state is ``[B, H, K, V + 1]``,
            its last column ``z``.
    """
    if not normalize:
        return simple_gla(q, k, v, scale=scale, **options)
    v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
    check_operands(q=q, k=k, v=v, initial_state=options.get("initial_state"))
    wide = accumulator(v.dtype)
    no_decay = jnp.zeros_like(v[..., :1], wide)
    o, *states = run(LINEAR_ATTN, (scaled(q, scale), k, v), no_decay, **options)
    o = o.astype(wide)
    return (o[..., :-1] / (o[..., -1:] + 1e-10)).astype(v.dtype), *states


def choose_linear_attn(q, k, v, *args, normalize: bool = True, **options) -> Choice:
    """Which implementation :func:`linear_attn` runs."""
    return (LINEAR_ATTN if normalize else SIMPLE_GLA).choose(q, k, v, *args, **options)


LINEAR_ATTN = Recurrence("linear_attn", SIMPLE_GLA.step, SIMPLE_GLA.within)
