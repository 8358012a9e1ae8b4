"""What each Hopper kernel can run, from static facts alone. Imports no Pallas.

A limit answers None, or the reason why a call cannot run.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Mosaic GPU's interface changes with every JAX release: kernels run where their gates passed.
JAX_VERSIONS = ("0.11.2",)
HOPPER = "9.0"
NO_KERNEL = "no Hopper kernel is offered yet"


def gated_delta_rule(q, k, v, *, scale=None, state_positions=None) -> str | None:
    """Limit of ``jla.kernels.gated_delta_rule`` for ``q, k [B, T, Hq, K]``, ``v [B, T, H, V]``."""
    if scale is not None and not scale > 0:
        return f"scale must be above 0 (it is folded into a log decay), got {scale}"
    return _heads(q, k, v, state_positions) or hopper()


def simple_gla(q, k, v, *, scale=None, state_positions=None) -> str | None:
    """Limit of ``jla.kernels.linear_attention`` for the same shapes."""
    return _heads(q, k, v, state_positions) or hopper()


def _heads(q, k, v, state_positions) -> str | None:
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not q.dtype == k.dtype == v.dtype:
        return f"q, k, v must all be bfloat16 or float16, got {q.dtype}, {k.dtype}, {v.dtype}"
    if max(q.shape[3], v.shape[3]) > 128:
        return f"head sizes may be at most 128, got K={q.shape[3]} and V={v.shape[3]}"
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
    if len(devices) > 1:
        return f"it does not partition itself yet, and {len(devices)} devices are visible"
    return None
