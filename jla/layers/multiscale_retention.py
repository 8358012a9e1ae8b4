"""Multi-scale retention (RetNet, arXiv:2307.08621), FLA's ``MultiScaleRetention``."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jla.layers import carry, heads
from jla.layers.mixer import Cache, TokenMixer
from jla.nn import init, short_convolution
from jla.nn.check import check_choice
from jla.nn.feature_map import POINTWISE
from jla.ops import retention, rotate
from jla.ops.activation import ACTIVATIONS, identity
from jla.ops.chunking import repeat_heads
from jla.ops.positions import locate

# FLA takes this layer's activations from Transformers, where gelu is exact.
_EXACT = {"gelu": "exact_gelu"}


class MultiScaleRetention(TokenMixer):
    """A memory per head that fades at a rate of its own, read by rotated queries.

    :func:`jla.ops.retention` runs on q and k with rotary positions; its output is normalised, gated
    and projected back.

    Args:
        mode: FLA's ``"chunk"``, ``"fused_chunk"``, ``"parallel"`` or ``"fused_recurrent"``, kept
            and without effect on the numbers.
        hidden_size: D.
        expand_k, expand_v: widths of all keys and of all values over D.
        num_heads: heads of q; K must be even and at most 256.
        num_kv_heads: heads of k and v, a divisor of ``num_heads``; ``num_heads`` if None.
        feature_map: activation of q and k before the rotation; none if None.
        use_short_conv: filter q, k, v over time first.
        conv_size: taps of the convolutions.
        conv_bias: give them a bias.
        use_output_gate: gate the output.
        gate_fn: activation of that gate.
        elementwise_affine: learn the scale of the output norm.
        norm_eps: of the output norm.
        fuse_norm: FLA's switch, see :class:`jla.layers.GatedLinearAttention`.
        layer_idx: FLA's argument, not needed here.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`; the state ``[B, H, K, V]`` is
            float32 always.
        kernel_init: initialiser of kernels; torch's defaults, as FLA's layer alone has, if None.
        impl: implementation of the recurrence, see :func:`jla.ops.retention`.
        rngs: ``params`` stream.

    Raises:
        ValueError: sizes that do not divide or cannot be rotated, an unknown mode or activation.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 2.0,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
        *,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init: init.Initializer | None = None,
        impl: str = "auto",
        rngs: nnx.Rngs,
    ):
        check_choice("mode", mode, ("chunk", "fused_chunk", "parallel", "fused_recurrent"))
        check_choice("feature_map", feature_map, (None, *ACTIVATIONS))
        check_choice("gate_fn", gate_fn, ACTIVATIONS)
        self.mode, self.hidden_size, self.impl = mode, hidden_size, impl
        self.feature_map = _EXACT.get(feature_map or "identity", feature_map or "identity")
        self.dtype, self.param_dtype = dtype, param_dtype
        self.num_heads = self.num_v_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim, self.head_v_dim = heads.share_width(
            hidden_size, expand_k, expand_v, num_heads, self.num_kv_heads
        )
        if self.head_dim % 2 or self.head_dim > 256:
            raise ValueError(
                f"rotated keys of a head must be even and at most 256, got {self.head_dim}"
            )

        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        conv = short_convolution(conv_size, conv_bias, param_dtype, kernel_init, rngs)
        heads.add_qkv(self, heads.grouped_widths(self), linear, conv if use_short_conv else None)
        heads.add_gated_output(
            self,
            linear,
            gate_fn=_EXACT.get(gate_fn, gate_fn),
            use_output_gate=use_output_gate,
            fuse_norm=fuse_norm,
            norm_eps=norm_eps,
            elementwise_affine=elementwise_affine,
            param_dtype=param_dtype,
        )

    @property
    def checkpoint_names(self) -> dict[str, str]:
        """FLA's name of the output norm."""
        return heads.gated_output_names(self)

    def mix(self, x, *, segment_ids, positions, cache):
        """See :meth:`TokenMixer.mix`; the cache holds state, windows and the document's length."""
        before = cache or {}
        at = before.get("state_positions")
        place = locate(x.shape[:2], segment_ids, before.get("length"), at)
        positions = place.position if positions is None else positions
        q, k, v, windows = heads.project_qkv(self, x, segment_ids, cache, identity, identity)
        q, k = (rotate(POINTWISE[self.feature_map](y), positions) for y in (q, k))
        k, v = (repeat_heads(y, self.num_heads) for y in (k, v))
        o, *states = retention(q, k, v, **carry.op_options(self, segment_ids, cache))
        after = carry.cache_after(states, windows)
        return heads.read_out(self, x, o), after and {"length": place.length, **after}

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """State ``[B, H, K, V]`` float32, as FLA's; windows of q, k, v; lengths int32 ``[B]``."""
        length = jnp.zeros((batch_size,), jnp.int32)
        return {"length": length, **heads.new_cache(self, batch_size, dtype)}
