"""RWKV-7 "Goose" (arXiv:2503.14456), FLA's ``RWKV7Attention``."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx

from jla.layers import carry, heads
from jla.layers.mixer import Cache, TokenMixer
from jla.nn import GroupNorm, LoRA, init
from jla.nn.lora import lerp
from jla.ops import l2_norm, rwkv7

STRONGEST = -math.exp(-0.5)  # log decay: a step keeps more than e^-0.6065 = 0.545 of the state
STREAMS = "rwkvag"


class RWKV7Attention(TokenMixer):
    """A delta rule whose decay, removal and write strengths are all per channel and learned.

    Every projection reads its own mix of a token and the one before it. With removal key
    ``kappa = k * k_k`` (normalised per head) and in-context learning rate ``a``,

        S_t = S_{t-1} diag(w_t) - S_{t-1} kappa_t (a_t * kappa_t)^T + v_t k_t^T

    runs per head (eq. 16; here transposed, :func:`jla.ops.rwkv7`); the output is group-normalised,
    gets the token's own value with weight ``r . (r_k * k)``, is gated and projected.

    All layers but a model's first mix their values with the first's: it shares ``v_first
    [..., T, Dv]``. A layer that is given none is a first layer itself.

    Args:
        mode: FLA's ``"chunk"`` or ``"fused_recurrent"``, kept and without effect on the numbers.
        hidden_size: D.
        head_dim: K, a divisor of D; if None, ``D / num_heads``.
        num_heads: heads, if ``head_dim`` is None.
        decay_low_rank_dim, gate_low_rank_dim, a_low_rank_dim, v_low_rank_dim: bottlenecks; grow
            with ``sqrt(D)`` if None.
        elementwise_affine: learn the group norm's scale and bias.
        norm_eps: of the group norm, times K.
        layer_idx: of ``num_hidden_layers``, for the initial values (0 of 1 if None); layer 0 has no
            ``v_lora``.
        fuse_norm: FLA's switch, kept and without effect on the numbers: removal keys are normalised
            with 1e-6 under the root, where FLA without it has a smallest norm of 1e-12.
        value_dim: Dv, D if None.
        num_hidden_layers: depth of the model.
        first: whether the layer ignores a given ``v_first``; ``layer_idx == 0`` if None.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`; gates and the state
            ``[B, H, K, V]`` (FLA's layout) are float32 always.
        kernel_init: initialiser of the projections to r, k, v and the output; RWKV-7's own
            (orthogonal, the output 0) if None.
        impl: implementation of the recurrence, see :func:`jla.ops.gated_delta_rule`.
        rngs: ``params`` stream.

    Raises:
        ValueError: sizes that do not divide, an unknown mode, neither head size nor heads.
    """

    shares = True

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        head_dim: int | None = 64,
        num_heads: int | None = None,
        decay_low_rank_dim: int | None = None,
        gate_low_rank_dim: int | None = None,
        a_low_rank_dim: int | None = None,
        v_low_rank_dim: int | None = None,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        fuse_norm: bool = False,
        value_dim: int | None = None,
        num_hidden_layers: int | None = None,
        *,
        first: bool | None = None,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init: init.Initializer | None = None,
        impl: str = "auto",
        rngs: nnx.Rngs,
    ):
        heads.check_mode(mode)
        self.hidden_size, self.value_dim = hidden_size, value_dim or hidden_size
        self.head_dim, self.num_heads = _heads(hidden_size, head_dim, num_heads, self.value_dim)
        self.first = layer_idx == 0 if first is None else first
        self.mode, self.fuse_norm, self.impl = mode, fuse_norm, impl
        self.dtype, self.param_dtype = dtype, param_dtype

        start = _Start(hidden_size, self.head_dim, layer_idx or 0, num_hidden_layers or 1)
        for name in STREAMS:
            setattr(self, f"x_{name}", nnx.Param(start.shift(name).astype(param_dtype)))
        self.k_k = nnx.Param((0.71 - 0.1 * start.ramp).astype(param_dtype))
        self.k_a = nnx.Param(jnp.full((hidden_size,), 1.02, param_dtype))
        self.r_k = nnx.Param(jnp.full((self.num_heads, self.head_dim), -0.04, param_dtype))

        def linear(inputs, outputs, own):
            make = init.linear(dtype, param_dtype, precision, kernel_init or own, rngs)
            return make(inputs, outputs)

        self.r_proj = linear(hidden_size, hidden_size, init.orthogonal(1.0))
        self.k_proj = linear(hidden_size, hidden_size, init.orthogonal(0.1))
        self.v_proj = linear(hidden_size, self.value_dim, init.orthogonal(1.0))
        self.o_proj = linear(self.value_dim, hidden_size, nnx.initializers.zeros)

        def lora(outputs, rank, growth, activation, bias):
            rank = growth_rank(hidden_size, growth) if rank is None else rank
            settings: dict[str, Any] = dict(
                dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=rngs
            )
            return LoRA(hidden_size, outputs, rank, activation, bias, **settings)

        factor = self.head_dim / 64
        width = hidden_size
        self.w_lora = lora(width, decay_low_rank_dim, 2.5 * factor, "tanh", start.decay_bias)
        if layer_idx == 0:
            self.v_lora = None
        else:
            bias = 0.73 - 0.4 * _ramp(self.value_dim)
            self.v_lora = lora(self.value_dim, v_low_rank_dim, 1.7 * factor, None, bias)
        self.a_lora = lora(width, a_low_rank_dim, 2.5 * factor, None, start.rate_bias)
        self.g_lora = lora(self.value_dim, gate_low_rank_dim, 5.0, "sigmoid", None)
        self.g_norm = GroupNorm(
            self.num_heads,
            self.value_dim,
            eps=self.head_dim * norm_eps,
            elementwise_affine=bool(elementwise_affine),
            bias=True,
            param_dtype=param_dtype,
        )
        if self.g_norm.scale is not None:
            self.g_norm.scale[...] *= start.norm_scale

    def mix(self, x, *, segment_ids, positions, cache, shared: dict[str, Any] | None = None):
        """See :meth:`TokenMixer.mix`; the cache holds the state and the last token."""
        shared = {} if shared is None else shared
        delta, last = carry.shifted(x, segment_ids, cache)
        mixed = {name: lerp(x, delta, getattr(self, f"x_{name}")) for name in STREAMS}
        a = _sigmoid(self.a_lora(mixed["a"]))
        v = self._values(mixed["v"], shared)
        k = self.k_proj(mixed["k"])
        removed = l2_norm(self._split(k * self.k_k[...].astype(k.dtype)))
        k = (k * (1 + (a - 1) * self.k_a[...])).astype(k.dtype)
        r, k, v, a = map(self._split, (self.r_proj(mixed["r"]), k, v, a))
        w = self._split(STRONGEST * _sigmoid(self.w_lora(mixed["w"])))
        o, *states = rwkv7(
            r,
            w,
            k,
            v,
            -removed,
            removed * a,
            **carry.op_options(self, segment_ids, cache),
        )
        o = self.g_norm(o.reshape(*x.shape[:2], -1)).reshape(o.shape)
        o = o + jnp.sum(r * k * self.r_k[...].astype(k.dtype), axis=-1, keepdims=True) * v
        y = self.o_proj(o.reshape(*x.shape[:2], -1) * self.g_lora(mixed["g"]))
        return y, carry.cache_after(states, last)

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """State ``[B, H, K, V]`` float32 and the last token ``[B, D]``."""
        shape = (batch_size, self.num_heads, self.head_dim, self.value_dim // self.num_heads)
        last = jnp.zeros((batch_size, self.hidden_size), dtype)
        return {"recurrent_state": jnp.zeros(shape, jnp.float32), "conv_state": last}

    def _values(self, x, shared):
        """``[B, T, Dv]``, drawn towards those of the model's first layer."""
        v = self.v_proj(x)
        if self.first or self.v_lora is None or "v_first" not in shared:
            shared["v_first"] = v
            return v
        pull = _sigmoid(self.v_lora(x))
        return (v + (shared["v_first"] - v) * pull).astype(v.dtype)

    def _split(self, x):
        return rearrange(x, "b t (h d) -> b t h d", h=self.num_heads)


class _Start:
    """RWKV-7's initial values, which depend on the channel and on the layer's depth."""

    def __init__(self, hidden_size: int, head_dim: int, layer_idx: int, num_layers: int):
        self.layer_idx, self.num_layers = layer_idx, num_layers
        channel = jnp.arange(hidden_size)
        self.share = channel / hidden_size
        self.ramp = _ramp(hidden_size)  # -0.5 to 0.5 over all channels
        zigzag = 2 * _ramp(head_dim)[channel % head_dim]  # -1 to 1 within each head
        zigzag = zigzag * jnp.abs(zigzag)
        depth = layer_idx / max(num_layers - 1, 1)
        slow_to_fast = -6 + 6 * (self.ramp + 0.5) ** (1 + depth**0.3)
        self.decay_bias = slow_to_fast + 0.5 + 2.5 * zigzag
        self.rate_bias = -0.19 + 0.3 * zigzag + 0.4 * self.ramp
        self.norm_scale = ((layer_idx + 1) / num_layers) ** 0.7

    def shift(self, name: str) -> jax.Array:
        """How much of the token before a stream reads ``[D]``."""
        power = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}[name]
        return 1 - self.share ** (power * (1 - self.layer_idx / self.num_layers))


def _ramp(size: int) -> jax.Array:
    return jnp.arange(size) / max(size - 1, 1) - 0.5


def growth_rank(hidden_size: int, growth: float) -> int:
    """A bottleneck of about ``growth * sqrt(D)``, a multiple of 32."""
    return max(32, round(growth * hidden_size**0.5 / 32) * 32)


def _sigmoid(x):
    return jax.nn.sigmoid(x.astype(jnp.promote_types(x.dtype, jnp.float32)))


def _heads(hidden_size, head_dim, num_heads, value_dim) -> tuple[int, int]:
    if head_dim is None and num_heads is None:
        raise ValueError("give head_dim or num_heads, both are None")
    if head_dim is None:
        head_dim, rest = divmod(hidden_size, num_heads)
    else:
        num_heads, rest = divmod(hidden_size, head_dim)
    if rest or not num_heads:
        raise ValueError(
            f"{hidden_size=} must be a multiple of head_dim, or of num_heads where head_dim is "
            f"None, got {head_dim=}, {num_heads=}"
        )
    if value_dim % num_heads:
        raise ValueError(f"{value_dim=} must be a multiple of num_heads={num_heads}")
    return head_dim, num_heads
