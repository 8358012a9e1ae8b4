"""RWKV-6 "Finch" (arXiv:2404.05892), FLA's ``RWKV6Attention``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx

from jla.layers import carry, heads
from jla.layers.mixer import Cache, TokenMixer
from jla.nn import GroupNorm, LerpLinear, LoRA, init
from jla.nn.check import check_choice
from jla.nn.lora import lerp
from jla.ops import rwkv6
from jla.ops.activation import ACTIVATIONS

STREAMS = "rwkvg"
# Xavier's uniform with gain 2^-2.5.
small_xavier = nnx.initializers.variance_scaling(2**-5, "fan_avg", "uniform")


class RWKV6Attention(TokenMixer):
    """Linear attention with a data-dependent decay per channel and a bonus for the token itself.

    Every projection reads its own mix of a token and the one before it, and the mix depends on the
    token (eq. 14). :func:`jla.ops.rwkv6` runs per head with log decay ``-exp(w)``; the output is
    group-normalised, gated and projected.

    Args:
        mode: FLA's ``"chunk"`` or ``"fused_recurrent"``, kept and without effect on the numbers.
        hidden_size: D.
        expand_k, expand_v: widths of keys and values over D; the products must be whole and
            multiples of ``num_heads``.
        num_heads: heads.
        gate_fn: of the output gate, a key of :data:`jla.ops.activation.ACTIVATIONS`.
        proj_low_rank_dim: bottleneck of each mix.
        gate_low_rank_dim: bottleneck of the decay.
        fuse_norm: FLA's switch, kept and without effect on the numbers.
        elementwise_affine: learn the group norm's scale and bias.
        norm_eps: of the group norm.
        layer_idx: FLA's argument, not needed here.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`; decays and the state
            ``[B, H, K, V]`` are float32 always.
        kernel_init: initialiser of kernels; Xavier's with gain 2^-2.5, as FLA's, if None.
        impl: implementation of the recurrence, see :func:`jla.ops.gated_delta_rule`.
        rngs: ``params`` stream.

    Raises:
        ValueError: sizes that do not divide, an unknown mode or activation.
    """

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "x_down": "x_proj.0",
        "x_up": "x_proj.2",
        **{f"{name}_proj": f"{name}_proj.linear" for name in STREAMS},
    }

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        gate_fn: str = "swish",
        proj_low_rank_dim: int = 32,
        gate_low_rank_dim: int = 64,
        fuse_norm: bool = True,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        *,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init: init.Initializer | None = None,
        impl: str = "auto",
        rngs: nnx.Rngs,
    ):
        heads.check_mode(mode)
        check_choice("gate_fn", gate_fn, ACTIVATIONS)
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.head_k_dim, self.head_v_dim = heads.share_width(
            hidden_size, expand_k, expand_v, num_heads, num_heads
        )
        key_dim, value_dim = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        self.mode, self.gate_fn, self.fuse_norm, self.impl = mode, gate_fn, fuse_norm, impl
        self.dtype, self.param_dtype = dtype, param_dtype

        linear = init.linear(dtype, param_dtype, precision, kernel_init or small_xavier, rngs)
        inner = len(STREAMS) * proj_low_rank_dim
        self.x_down = LerpLinear(linear, hidden_size, inner, param_dtype=param_dtype)
        self.x_up = linear(inner, hidden_size)
        self.x_bias = nnx.Param(jnp.zeros((len(STREAMS), hidden_size), param_dtype))
        self.r_proj = linear(hidden_size, key_dim)
        self.w_proj = LoRA(
            hidden_size,
            key_dim,
            gate_low_rank_dim,
            bias=jnp.zeros(key_dim),
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            rngs=rngs,
        )
        self.k_proj = linear(hidden_size, key_dim)
        self.v_proj = linear(hidden_size, value_dim)
        self.g_proj = linear(hidden_size, value_dim)
        self.bonus = nnx.Param(jnp.zeros((num_heads, self.head_k_dim), param_dtype))
        self.g_norm = GroupNorm(
            num_heads,
            value_dim,
            eps=norm_eps,
            elementwise_affine=bool(elementwise_affine),
            bias=True,
            param_dtype=param_dtype,
        )
        self.o_proj = linear(value_dim, hidden_size)

    def mix(self, x, *, segment_ids, positions, cache):
        """See :meth:`TokenMixer.mix`; the cache holds the state and the last token."""
        delta, last = carry.shifted(x, segment_ids, cache)
        shares = zip(STREAMS, self._shares(x, delta), strict=True)
        y = {name: getattr(self, f"{name}_proj")(lerp(x, delta, share)) for name, share in shares}
        r, k, v = (self._split(y[name]) for name in "rkv")
        o, *states = rwkv6(
            r,
            k,
            v,
            -jnp.exp(self._split(y["w"].astype(jnp.promote_types(x.dtype, jnp.float32)))),
            self.bonus[...],
            **carry.op_options(self, segment_ids, cache),
        )
        gate = ACTIVATIONS[self.gate_fn](y["g"])
        y = self.o_proj(self.g_norm(o.reshape(gate.shape)) * gate)
        return y, carry.cache_after(states, last)

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """State ``[B, H, K, V]`` float32 (FLA's layout) and the last token ``[B, D]``."""
        shape = (batch_size, self.num_heads, self.head_k_dim, self.head_v_dim)
        last = jnp.zeros((batch_size, self.hidden_size), dtype)
        return {"recurrent_state": jnp.zeros(shape, jnp.float32), "conv_state": last}

    def _shares(self, x, delta) -> list[jax.Array]:
        """How much of the token before each stream reads, ``[B, T, D]`` each."""
        inner = jnp.tanh(self.x_down(x, delta))
        inner = rearrange(inner, "b t (n r) -> b t n r", n=len(STREAMS))
        up = rearrange(self.x_up.kernel[...], "(n r) d -> n r d", n=len(STREAMS))
        up, bias = up.astype(inner.dtype), self.x_bias[...].astype(inner.dtype)
        shares = jnp.einsum("btnr,nrd->nbtd", inner, up, precision=self.x_up.precision)
        return list(shares + bias[:, None, None])

    def _split(self, x):
        return rearrange(x, "b t (h d) -> b t h d", h=self.num_heads)
