"""Kernels on several devices: every device runs its own rows and heads. Imports no Pallas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def several() -> str | None:
    """Why a kernel that knows nothing of devices cannot run, or None."""
    if jax.sharding.get_abstract_mesh().are_all_axes_manual or len(jax.devices()) == 1:
        return None
    return (
        f"{len(jax.devices())} devices are visible: it runs on one of them, or inside of "
        "jax.shard_map(check_vma=False)"
    )


def refusal(v: jax.Array) -> str | None:
    """Why a call with values ``v [B, T, H, V]`` cannot be divided among devices, or None."""
    if several() is None:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.axis_types) != {AxisType.Explicit}:
        return (
            f"{len(jax.devices())} devices are visible, and what lies where is only known on a "
            "mesh of Explicit axes (jax.set_mesh) or inside of jax.shard_map(check_vma=False)"
        )
    _, time, _, channels = _spec(v)
    if time is not None or channels is not None:
        return f"only rows and heads may be divided among devices, got v as {jax.typeof(v)}"
    return None


def per_device(
    kernel: Callable,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    per_token: Mapping[str, jax.Array | None],
    state: jax.Array | None,
    marks: jax.Array | None,
):
    """``kernel(q, k, v, per_token, state, marks)`` on every device's rows and heads of ``v``.

    ``per_token`` are ``[B, T, H]``, ``state [B, H, K, V]``, ``marks [B, T]``. Returns outputs
    ``[B, T, H, V]`` and states ``[B, H, K, V]`` (or None), divided as ``v`` is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or several() is None:
        return kernel(q, k, v, per_token, state, marks)
    rows, _, heads, _ = _spec(v)
    names = heads if isinstance(heads, tuple) else (heads,)
    if heads is not None and q.shape[2] % math.prod(mesh.shape[name] for name in names):
        q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    token, whole = P(rows, None, heads), P(rows, heads)
    operands = (q, k, v, per_token, state, marks)
    specs = (token, token, token, token, whole, P(rows))
    operands = tuple(
        jax.tree.map(lambda x, spec=spec: jax.sharding.reshard(x, spec), each)
        for each, spec in zip(operands, specs, strict=True)
    )
    run = jax.shard_map(
        kernel, mesh=mesh, in_specs=specs, out_specs=(token, whole), check_vma=False
    )
    return run(*operands)


def _spec(x):
    spec = tuple(jax.typeof(x).sharding.spec)
    return (*spec, *(None,) * (x.ndim - len(spec)))
