"""What mixers with queries, keys, values and one state per head share.

Checkpoints name these parameters on the mixer itself, so these functions put them there and find
them there, instead of a submodule that would hold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from jla.layers.mixer import Cache
from jla.nn import GatedRMSNorm, ShortConvolution, convolve, new_windows
from jla.ops import Options


def check_heads(head_dim: int, expand_v: float, num_heads: int, num_v_heads: int) -> int:
    """The value head size ``head_dim * expand_v``; heads of v must be a multiple of those of q."""
    value = head_dim * expand_v
    if not math.isclose(value, round(value), rel_tol=1e-5):
        raise ValueError(
            f"expand_v={expand_v} times head_dim={head_dim} must be a whole number, got {value}"
        )
    if num_v_heads % num_heads:
        raise ValueError(f"num_v_heads={num_v_heads} must be a multiple of num_heads={num_heads}")
    return round(value)


def check_choice(name: str, given: str, accepted: Iterable[str]) -> None:
    """Raises unless ``given`` is one of the ``accepted``."""
    if given not in accepted:
        raise ValueError(f"{name} must be {' or '.join(map(repr, accepted))}, got {given!r}")


check_mode = partial(check_choice, "mode", accepted=("chunk", "fused_recurrent"))


def add_qkv(
    mixer: Any,
    widths: Mapping[str, int],
    linear: Callable,
    convolution: Callable | None,
    bare: str = "",
) -> None:
    """Gives ``mixer`` its ``{q,k,v}_proj`` and, unless it has none, its ``{q,k,v}_conv1d``.

    Args:
        mixer: has ``hidden_size``.
        widths: of q, k and v over all heads.
        linear: what :func:`jla.nn.init.linear` made.
        convolution: what :func:`jla.nn.short_convolution` made, or None.
        bare: streams whose convolution applies no SiLU.
    """
    for name, width in widths.items():
        setattr(mixer, f"{name}_proj", linear(mixer.hidden_size, width))
        if convolution is not None:
            activation = None if name in bare else "silu"
            setattr(mixer, f"{name}_conv1d", convolution(width, activation=activation))
    mixer.use_short_conv = convolution is not None


def project_qkv(
    mixer: Any,
    x: jax.Array,
    segment_ids: jax.Array | None,
    cache: Cache | None,
    qk_activation: Callable = jax.nn.silu,
):
    """``q, k [B, T, H, K]``, ``v [B, T, Hv, V]`` of ``x [B, T, D]``, and the windows after it.

    What no convolution has activated gets ``qk_activation``, values SiLU.
    """
    streams = {name: getattr(mixer, f"{name}_proj")(x) for name in "qkv"}
    convs, windows = _convolutions(mixer), None
    if convs:
        before = None if cache is None else cache["conv_state"]
        streams, windows = convolve(convs, streams, segment_ids=segment_ids, windows=before)

    def heads(name, activation, size):
        activated = name in convs and convs[name].activation is not None
        y = streams[name] if activated else activation(streams[name])
        return rearrange(y, "b t (h d) -> b t h d", d=size)

    q, k = (heads(name, qk_activation, mixer.head_dim) for name in "qk")
    return q, k, heads("v", jax.nn.silu, mixer.head_v_dim), windows


def _convolutions(mixer) -> dict[str, ShortConvolution]:
    names = "qkv" if mixer.use_short_conv else ""
    return {name: getattr(mixer, f"{name}_conv1d") for name in names}


def op_options(mixer: Any, segment_ids: jax.Array | None, cache: Cache | None) -> Options:
    """What every recurrence takes besides its operands."""
    return Options(
        initial_state=None if cache is None else cache["recurrent_state"],
        output_final_state=cache is not None,
        segment_ids=segment_ids,
        impl=mixer.impl,
    )


def read_out(mixer: Any, x: jax.Array, o: jax.Array) -> jax.Array:
    """``o [B, T, Hv, V]`` normalised per head, gated by ``x`` if the norm is, and projected."""
    if isinstance(mixer.o_norm, GatedRMSNorm):
        o = mixer.o_norm(o, mixer.g_proj(x).reshape(o.shape))
    else:
        o = mixer.o_norm(o)
    return mixer.o_proj(o.reshape(*x.shape[:2], -1))


def cache_after(state: jax.Array | None, windows) -> Cache | None:
    """The mixer's cache after a call, None where none was asked for."""
    if state is None:
        return None
    return {"recurrent_state": state} | ({} if windows is None else {"conv_state": windows})


def new_cache(mixer: Any, batch_size: int, dtype) -> Cache:
    """Zeros: the state ``[B, Hv, K, V]`` float32 and the windows ``[B, W-1, D]`` of q, k and v."""
    shape = (batch_size, mixer.num_v_heads, mixer.head_dim, mixer.head_v_dim)
    convs = _convolutions(mixer)
    windows = new_windows(convs, batch_size, dtype) if convs else None
    return cache_after(jnp.zeros(shape, jnp.float32), windows)
