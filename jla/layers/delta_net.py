"""DeltaNet (arXiv:2406.06484), FLA's ``DeltaNet``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jla.layers import carry, heads
from jla.layers.mixer import Cache, TokenMixer
from jla.nn import head_norm, init, short_convolution
from jla.nn.check import check_choice
from jla.ops import delta_rule, l1_norm
from jla.ops.gates import write_strength

QK_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "elu": lambda x: jax.nn.elu(x) + 1,
    "identity": lambda x: x,
}
QK_NORMS = ("l2", "sum")


class DeltaNet(TokenMixer):
    """A memory per head that never fades: every write corrects what its key recalls.

    With ``q, k`` activated and normalised and write strength ``beta = sigmoid(b_proj(x))``,
    :func:`jla.ops.delta_rule` runs per head; its output is normalised and projected back.

    Args:
        mode: FLA's ``"chunk"`` or ``"fused_recurrent"``, kept and without effect on the numbers.
        d_model: FLA's other name of ``hidden_size``, which it overrides.
        hidden_size: D.
        expand_k, expand_v: widths of all keys and values over D; D times each must be a multiple of
            ``num_heads``.
        num_heads: heads.
        use_beta: learn the write strength; else it is 1.
        use_gate: gate the output.
        use_short_conv: filter q, k, v over time first.
        conv_size: taps of the convolutions.
        conv_bias: give them a bias.
        allow_neg_eigval: double the write strength.
        layer_idx: FLA's argument, not needed here.
        qk_activation: ``"silu"``, ``"relu"``, ``"elu"`` (plus 1) or ``"identity"``.
        qk_norm: ``"l2"`` or ``"sum"``: which norm of q and k is 1.
        norm_eps: of the output norm.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`; the state ``[B, H, K, V]`` is
            float32 always.
        kernel_init: initialiser of kernels; torch's defaults, as FLA's layer alone has, if None.
        impl: implementation of the recurrence, see :func:`jla.ops.gated_delta_rule`.
        rngs: ``params`` stream.

    Raises:
        ValueError: sizes that do not divide, an unknown mode, activation or norm.

    Example:
        >>> mixer = DeltaNet(hidden_size=32, num_heads=2, rngs=nnx.Rngs(0))
        >>> mixer(jnp.ones((2, 5, 32))).shape
        (2, 5, 32)
    """

    def __init__(
        self,
        mode: str = "chunk",
        d_model: int | None = None,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_beta: bool = True,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        layer_idx: int | None = None,
        qk_activation: str = "silu",
        qk_norm: str = "l2",
        norm_eps: float = 1e-5,
        *,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init: init.Initializer | None = None,
        impl: str = "auto",
        rngs: nnx.Rngs,
    ):
        hidden_size = hidden_size if d_model is None else d_model
        heads.check_mode(mode)
        check_choice("qk_activation", qk_activation, QK_ACTIVATIONS)
        check_choice("qk_norm", qk_norm, QK_NORMS)
        self.head_dim = heads.head_size("expand_k", expand_k, hidden_size, num_heads)
        self.head_v_dim = heads.head_size("expand_v", expand_v, hidden_size, num_heads)
        self.hidden_size, self.mode, self.impl = hidden_size, mode, impl
        self.num_heads = self.num_v_heads = num_heads
        self.qk_activation, self.qk_norm = qk_activation, qk_norm
        self.use_beta, self.use_gate, self.allow_neg_eigval = use_beta, use_gate, allow_neg_eigval
        self.dtype, self.param_dtype = dtype, param_dtype
        key_dim, value_dim = num_heads * self.head_dim, num_heads * self.head_v_dim

        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        conv = short_convolution(conv_size, conv_bias, param_dtype, kernel_init, rngs)
        widths = dict(q=key_dim, k=key_dim, v=value_dim)
        bare = "" if qk_activation == "silu" else "qk"
        heads.add_qkv(self, widths, linear, conv if use_short_conv else None, bare)
        if use_beta:
            self.b_proj = linear(hidden_size, num_heads)
        if use_gate:
            self.g_proj = linear(hidden_size, value_dim)
        self.o_norm = head_norm(
            self.head_v_dim, "swish" if use_gate else None, norm_eps, param_dtype
        )
        self.o_proj = linear(value_dim, hidden_size)

    def mix(self, x, *, segment_ids, positions, cache):
        """See :meth:`TokenMixer.mix`; the cache holds three windows and the state."""
        activation = QK_ACTIVATIONS[self.qk_activation]
        q, k, v, windows = heads.project_qkv(self, x, segment_ids, cache, activation)
        if self.qk_norm == "sum":
            q, k = l1_norm(q), l1_norm(k)
        o, *states = delta_rule(
            q,
            k,
            v,
            self._beta(x),
            use_qk_l2norm=self.qk_norm == "l2",
            **carry.op_options(self, segment_ids, cache),
        )
        return heads.read_out(self, x, o), carry.cache_after(states, windows)

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """State ``[B, H, K, V]`` float32 and windows ``[B, W-1, D]`` of q, k, v."""
        return heads.new_cache(self, batch_size, dtype)

    def _beta(self, x):
        if self.use_beta:
            return write_strength(self.b_proj(x), self.allow_neg_eigval)
        # Built from x, to share its sharding.
        ones = jnp.ones_like(x[..., :1], jnp.float32).repeat(self.num_heads, axis=-1)
        return ones * 2 if self.allow_neg_eigval else ones
