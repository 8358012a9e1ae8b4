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
# Rows lie along a grid axis that holds 65535 blocks, up to two a row.
MOST_ROWS = 65535 // 2
NO_KERNEL = "no Hopper kernel is offered yet"


def gated_delta_rule(q, k, v, *, scale=None, state_positions=None) -> str | None:
    """Limit of ``jla.kernels.gated_delta_rule`` for ``q, k [B, T, Hq, K]``, ``v [B, T, H, V]``."""
    if scale is not None and not scale > 0:
        return f"scale must be above 0 (it is folded into a log decay), got {scale}"
    return _heads(q, k, v, (256, 512), state_positions) or hopper() or sharding.refusal(v, "b.h")


def simple_gla(q, k, v, *, scale=None, state_positions=None) -> str | None:
    """Limit of ``jla.kernels.linear_attention`` for the same shapes."""
    return _heads(q, k, v, (512, 512), state_positions) or hopper() or sharding.refusal(v, "b.h")


def _heads(q, k, v, widest, state_positions) -> str | None:
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not q.dtype == k.dtype == v.dtype:
        return f"q, k, v must all be bfloat16 or float16, got {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[3] > widest[0] or v.shape[3] > widest[1]:
        sizes = f"K={q.shape[3]} and V={v.shape[3]}"
        return f"head sizes may be at most K={widest[0]} and V={widest[1]}, got {sizes}"
    if q.shape[0] > MOST_ROWS:
        return _rows(q)
    return None if state_positions is None else "it has no state_positions"


def _rows(x) -> str:
    return f"there may be at most {MOST_ROWS} rows, got {x.shape[0]}"


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


def short_conv(x, kernel) -> str | None:
    """Limit of ``jla.kernels.short_conv`` for ``x [B, T, D]`` and ``kernel [W, D]``."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x must be bfloat16 or float16, got {x.dtype}"
    if kernel.shape[0] not in (2, 3, 4):
        return f"it has 2, 3 or 4 taps, got {kernel.shape[0]}"
    if x.shape[2] % 128:
        return f"D must be a multiple of 128, got {x.shape[2]}"
    if x.shape[0] > MOST_ROWS:
        return _rows(x)
    return hopper() or sharding.refusal(x, "b.h", 128)


def gated_norm(
    x, *, gate=None, activation="swish", eps=1e-5, norm_before_gate=True, group_size=None
) -> str | None:
    """Limit of ``jla.kernels.gated_norm`` for ``x`` and ``gate [..., D]``."""
    if gate is None:
        return "it is for gated norms, there is no gate"
    if x.dtype not in (jnp.bfloat16, jnp.float16) or gate.dtype != x.dtype:
        return f"x and gate must both be bfloat16 or float16, got {x.dtype}, {gate.dtype}"
    if gate.shape != x.shape:
        return f"x and gate must agree, got {x.shape}, {gate.shape}"
    group = group_size or x.shape[-1]
    if norm_before_gate and (group != x.shape[-1] or group not in (64, 128, 256)):
        return f"before the gate it normalises all of D = 64, 128 or 256, got {x.shape}, {group=}"
    if not norm_before_gate and (group % 256 or group > 4096 or x.shape[-1] % group):
        return f"after the gate it normalises groups of 256, 512 .. 4096 channels, got {group}"
    if activation not in ("swish", "silu", "sigmoid"):
        return f"the gate's activation must be swish, silu or sigmoid, got {activation!r}"
    if not eps > 0:
        return f"eps must be above 0, got {eps}"
    return hopper() or sharding.refusal(x, "b" * (x.ndim - 1))
