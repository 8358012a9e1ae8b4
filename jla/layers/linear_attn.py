"""Linear attention (arXiv:2006.16236), FLA's ``LinearAttention``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from jla.layers import carry, heads
from jla.layers.mixer import Cache, TokenMixer
from jla.nn import RMSNorm, init
from jla.nn.check import check_choice
from jla.nn.feature_map import count_features
from jla.nn.feature_map import feature_map as make_feature_map
from jla.ops import linear_attn
from jla.ops.activation import identity
from jla.ops.chunking import repeat_heads

FEATURE_MAPS = ("hedgehog", "t2r", "elementwise_product", "dpfp", "elu", "relu", "identity")


class LinearAttention(TokenMixer):
    """A memory per head that never fades, written and read through a feature map.

    :func:`jla.ops.linear_attn` runs on the features of q and k; its output is normalised and
    projected back.

    Args:
        mode: FLA's ``"chunk"``, ``"fused_chunk"`` or ``"fused_recurrent"``, kept and without effect
            on the numbers.
        hidden_size: D.
        expand_k, expand_v: widths of all keys and of all values over D.
        num_heads: heads of q.
        num_kv_heads: heads of k and v, a divisor of ``num_heads``; ``num_heads`` if None.
        feature_map: of q and k, see :func:`jla.nn.feature_map.feature_map`.
        tie_feature_map_qk: one learned map for both, kept and saved as ``feature_map_q``.
        output_norm: ``"rmsnorm"`` per head, or ``"identity"``.
        norm_q, norm_k: divide features by their sum, plus 1e-4.
        do_feature_map_norm: divide the output by the sum of its weights.
        elementwise_affine: learn the scale of the output norm.
        norm_eps: of the output norm.
        layer_idx: FLA's argument, not needed here.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`; the state is float32 always.
        kernel_init: initialiser of kernels; torch's defaults, as FLA's layer alone has, if None.
        impl: implementation of the recurrence, see :func:`jla.ops.linear_attn`.
        rngs: ``params`` stream.

    FLA's model of these layers lets packed documents see each other; here they never do.

    Raises:
        ValueError: sizes that do not divide, an unknown mode, feature map or norm.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        feature_map: str = "elementwise_product",
        tie_feature_map_qk: bool = False,
        output_norm: str = "rmsnorm",
        norm_q: bool = False,
        norm_k: bool = False,
        do_feature_map_norm: bool = False,
        elementwise_affine: bool = True,
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
        check_choice("mode", mode, ("chunk", "fused_chunk", "fused_recurrent"))
        check_choice("feature_map", feature_map, FEATURE_MAPS)
        check_choice("output_norm", output_norm, ("rmsnorm", "identity"))
        self.mode, self.hidden_size, self.impl = mode, hidden_size, impl
        self.norm_q, self.norm_k, self.normalize = norm_q, norm_k, do_feature_map_norm
        self.dtype, self.param_dtype = dtype, param_dtype
        self.num_heads = self.num_v_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim, self.head_v_dim = heads.share_width(
            hidden_size, expand_k, expand_v, num_heads, self.num_kv_heads
        )

        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        self.tied, self.features = tie_feature_map_qk, count_features(feature_map, self.head_dim)
        self.feature_map_q = make_feature_map(feature_map, self.head_dim, linear, kernel_init)
        if not tie_feature_map_qk:
            self.feature_map_k = make_feature_map(feature_map, self.head_dim, linear, kernel_init)
        heads.add_qkv(self, heads.grouped_widths(self), linear, None)
        norm: dict[str, Any] = dict(eps=norm_eps, elementwise_affine=elementwise_affine)
        norm["param_dtype"] = param_dtype
        self.norm = RMSNorm(self.head_v_dim, **norm) if output_norm == "rmsnorm" else None
        self.o_proj = linear(num_heads * self.head_v_dim, hidden_size)

    def mix(self, x, *, segment_ids, positions, cache):
        """See :meth:`TokenMixer.mix`; the cache holds the state."""
        q, k, v, _ = heads.project_qkv(self, x, segment_ids, cache, identity, identity)
        q = self.feature_map_q(q)
        k = self.feature_map_q(k) if self.tied else self.feature_map_k(k)
        q, k = (_shares(y) if on else y for y, on in ((q, self.norm_q), (k, self.norm_k)))
        k, v = (repeat_heads(y, self.num_heads) for y in (k, v))
        options = carry.op_options(self, segment_ids, cache)
        o, *states = linear_attn(q, k, v, normalize=self.normalize, **options)
        o = o if self.norm is None else self.norm(o)
        return self.o_proj(o.reshape(*x.shape[:2], -1)), carry.cache_after(states)

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """State float32 ``[B, H, features of K, V]``, as FLA's; with ``do_feature_map_norm`` it has
        the sum of keys as a column more, which FLA keeps apart."""
        columns = self.head_v_dim + self.normalize
        shape = (batch_size, self.num_heads, self.features, columns)
        return {"recurrent_state": jnp.zeros(shape, jnp.float32)}


def _shares(x):
    """Features over their sum."""
    return x / (jnp.sum(x, axis=-1, keepdims=True) + 1e-4)
