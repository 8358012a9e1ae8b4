"""What each Hopper kernel can run, from static facts alone. Imports no Pallas.

A limit answers None, or the reason why a call cannot run.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jla.kernels import sharding

# Mosaic GPU's interface changes with every JAX release: kernels run where their gates passed.
JAX_VERSIONS = ("0.11.2",)
HOPPER = "9.0"
NO_KERNEL = "no Hopper kernel is offered yet"


def gated_delta_rule(q, k, v, *, scale=None, state_positions=None) -> str | None:
    """Limit of ``jla.kernels.gated_delta_rule`` for ``q, k [B, T, Hq, K]``, ``v [B, T, H, V]``."""
    if scale is not None and not scale > 0:
        return f"scale must be above 0 (it is folded into a log decay), got {scale}"
    return _heads(q, k, v, 128, state_positions) or hopper() or sharding.refusal(v)


def simple_gla(q, k, v, *, scale=None, state_positions=None) -> str | None:
    """Limit of ``jla.kernels.linear_attention`` for the same shapes."""
    return _heads(q, k, v, 512, state_positions) or hopper() or sharding.refusal(v)


def _heads(q, k, v, widest_key, state_positions) -> str | None:
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not q.dtype == k.dtype == v.dtype:
        return f"q, k, v must all be bfloat16 or float16, got {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[3] > widest_key or v.shape[3] > 512:
        sizes = f"K={q.shape[3]} and V={v.shape[3]}"
        return f"head sizes may be at most K={widest_key} and V=512, got {sizes}"
    return None if state_positions is None else "it has no state_positions"


def hopper() -> str | None:
    """Why no Hopper kernel can run in this process, or None."""
    if jax.__version__ not in JAX_VERSIONS:
        return f"kernels run on JAX {', '.join(JAX_VERSIONS)}, this is {jax.__version__}"
    if jax.default_backend() != "gpu":
        return f"needs a Hopper GPU, the default backend is {jax.default_backend()!r}"
    devices = jax.devices()
    if devices[0].compute_capability != HOPPER:
        return f"needs compute capability {HOPPER}, got {devices[0].compute_capability}"
    return None
