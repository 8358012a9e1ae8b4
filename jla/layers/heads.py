"""What mixers with queries, keys, values and one state per head share.

Checkpoints name these parameters on the mixer itself, so these functions put them there and find
them there, instead of a submodule that would hold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from jla.layers import carry
from jla.layers.mixer import Cache
from jla.nn import GatedRMSNorm, ShortConvolution, convolve, head_norm, new_windows
from jla.nn.check import check_choice
from jla.ops.activation import ACTIVATIONS


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


check_mode = partial(check_choice, "mode", allowed=("chunk", "fused_recurrent"))


def share_width(
    hidden_size: int, expand_k: float, expand_v: float, num_heads: int, num_kv_heads: int
) -> tuple[int, int]:
    """The sizes ``(K, V)`` of heads that share ``hidden_size * expand`` channels.

    Heads of q must be a multiple of those of k and v.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads=} must be a multiple of {num_kv_heads=}")
    key = head_size("expand_k", expand_k, hidden_size, num_heads)
    return key, head_size("expand_v", expand_v, hidden_size, num_heads)


def head_size(name: str, expand: float, hidden_size: int, num_heads: int) -> int:
    """Channels of a head, where all heads together have ``hidden_size * expand``.

    Raises:
        ValueError: that is no positive multiple of ``num_heads``; it names the option ``name``.
    """
    width = round(hidden_size * expand)
    if not math.isclose(hidden_size * expand, width) or width % num_heads or width < 1:
        raise ValueError(
            f"{name}={expand} times hidden_size={hidden_size} must be a positive multiple of "
            f"num_heads={num_heads}, got {hidden_size * expand}"
        )
    return width // num_heads


def grouped_widths(mixer: Any) -> dict[str, int]:
    """Of q, k and v over all heads, where several heads of q share one of k and v."""
    queries, keys = mixer.num_heads, mixer.num_kv_heads
    return dict(q=queries * mixer.head_dim, k=keys * mixer.head_dim, v=keys * mixer.head_v_dim)


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
        widths: of q, k and v, or other streams of one letter, over all heads.
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
    v_activation: Callable = jax.nn.silu,
):
    """``q, k [B, T, H, K]``, ``v [B, T, Hv, V]`` of ``x [B, T, D]``, and the windows after it.

    What no convolution has activated gets ``qk_activation`` and ``v_activation``.
    """
    streams, windows = project(mixer, x, "qkv", segment_ids, cache)
    convs = _convolutions(mixer)

    def heads(name, activation, size):
        activated = name in convs and convs[name].activation is not None
        y = streams[name] if activated else activation(streams[name])
        return rearrange(y, "b t (h d) -> b t h d", d=size)

    q, k = (heads(name, qk_activation, mixer.head_dim) for name in "qk")
    return q, k, heads("v", v_activation, mixer.head_v_dim), windows


def project(
    mixer: Any, x: jax.Array, names: str, segment_ids: jax.Array | None, cache: Cache | None
):
    """Streams ``[B, T, width]`` by their letters, filtered over time where the mixer has
    convolutions, and the windows after them."""
    streams = {name: getattr(mixer, f"{name}_proj")(x) for name in names}
    convs = _convolutions(mixer)
    if not convs:
        return streams, None
    before = cache or {}
    return convolve(
        convs,
        streams,
        segment_ids=segment_ids,
        windows=before.get("conv_state"),
        state_positions=before.get("state_positions"),
    )


def _convolutions(mixer) -> dict[str, ShortConvolution]:
    found = {name: value for name, value in vars(mixer).items() if name.endswith("_conv1d")}
    return {name.removesuffix("_conv1d"): convolution for name, convolution in found.items()}


def read_out(mixer: Any, x: jax.Array, o: jax.Array) -> jax.Array:
    """``o [B, T, Hv, V]`` normalised per head, gated by ``x`` if the norm is, and projected."""
    if isinstance(mixer.o_norm, GatedRMSNorm):
        o = mixer.o_norm(o, mixer.g_proj(x).reshape(o.shape))
    else:
        o = mixer.o_norm(o)
    return mixer.o_proj(o.reshape(*x.shape[:2], -1))


def add_gated_output(
    mixer: Any,
    linear: Callable,
    *,
    gate_fn: str,
    use_output_gate: bool,
    fuse_norm: bool,
    norm_eps: float,
    elementwise_affine: bool | None,
    param_dtype,
) -> None:
    """Gives ``mixer`` what :func:`read_out` needs, by the options of FLA's GLA and RetNet.

    Their checkpoints name the norm by the kernel that FLA takes: ``mixer.fused_norm`` tells
    :func:`gated_output_names`.
    """
    width = mixer.num_heads * mixer.head_v_dim
    if use_output_gate:
        mixer.g_proj = linear(mixer.hidden_size, width)
    mixer.o_norm = head_norm(
        mixer.head_v_dim,
        gate_fn if use_output_gate else None,
        norm_eps,
        param_dtype,
        elementwise_affine=bool(elementwise_affine),
        allowed=ACTIVATIONS,
    )
    mixer.fused_norm = gate_fn == "swish" and fuse_norm and use_output_gate
    mixer.o_proj = linear(width, mixer.hidden_size)


def gated_output_names(mixer: Any) -> dict[str, str]:
    """``checkpoint_names`` of a mixer with :func:`add_gated_output`."""
    return {"o_norm": "g_norm_swish_gate" if mixer.fused_norm else "g_norm"}


def new_cache(mixer: Any, batch_size: int, dtype) -> Cache:
    """Zeros: the state ``[B, Hv, K, V]`` float32 and the windows ``[B, W-1, D]`` of q, k and v."""
    shape = (batch_size, mixer.num_v_heads, mixer.head_dim, mixer.head_v_dim)
    return carry.cache_after(
        [jnp.zeros(shape, jnp.float32)], empty_windows(mixer, batch_size, dtype)
    )


def empty_windows(mixer: Any, batch_size: int, dtype):
    """The windows of the mixer's convolutions before any token, None if it has none."""
    convs = _convolutions(mixer)
    return new_windows(convs, batch_size, dtype) if convs else None
