"""The feed-forwards of the RWKV models: mixers, for they see the token before each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jla.layers import carry
from jla.layers.mixer import Cache, TokenMixer
from jla.nn import LerpLinear, init
from jla.nn.check import check_choice
from jla.nn.lora import lerp
from jla.ops.activation import ACTIVATIONS


class _ChannelMixing(TokenMixer):
    """``forward(x, delta)`` with the difference to the token before; the cache holds the last."""

    def __init__(self, hidden_size: int, hidden_act: str, dtype, param_dtype):
        check_choice("hidden_act", hidden_act, ACTIVATIONS)
        self.hidden_size, self.hidden_act = hidden_size, hidden_act
        self.dtype, self.param_dtype = dtype, param_dtype

    def mix(self, x, *, segment_ids, positions, cache):
        """See :meth:`TokenMixer.mix`."""
        delta, last = carry.shifted(x, segment_ids, cache, "ffn_state")
        return self.forward(x, delta), None if cache is None else {"ffn_state": last}

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """The last token ``[B, D]``."""
        return {"ffn_state": jnp.zeros((batch_size, self.hidden_size), dtype)}

    def forward(self, x: jax.Array, delta: jax.Array) -> jax.Array:
        """``x`` and ``delta`` ``[B, T, D]`` to ``[B, T, D]``."""
        raise NotImplementedError

    def activated(self, x: jax.Array) -> jax.Array:
        """The activation, in float32."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return ACTIVATIONS[self.hidden_act](wide).astype(x.dtype)


class RWKV6FeedForward(_ChannelMixing):
    """``sigmoid(receptance(x)) * value(act(key(x)))`` (arXiv:2404.05892, FLA's class).

    Args:
        hidden_size: D.
        hidden_ratio: inner width over D, 3.5 if None.
        intermediate_size: inner width; if None, ``hidden_ratio * D`` up to the next 32.
        hidden_act: a key of :data:`jla.ops.activation.ACTIVATIONS`.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`.
        kernel_init: initialiser of kernels; torch's default if None.
        rngs: ``params`` stream.

    Raises:
        ValueError: unknown activation.
    """

    def __init__(
        self,
        hidden_size: int,
        hidden_ratio: float | None = None,
        intermediate_size: int | None = None,
        hidden_act: str = "sqrelu",
        *,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init: init.Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(hidden_size, hidden_act, dtype, param_dtype)
        inner = intermediate_size or _inner(hidden_size, hidden_ratio, 3.5)
        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        self.key = LerpLinear(linear, hidden_size, inner, param_dtype=param_dtype)
        self.value = linear(inner, hidden_size)
        self.receptance = LerpLinear(linear, hidden_size, hidden_size, param_dtype=param_dtype)

    def forward(self, x, delta):
        """See :meth:`_ChannelMixing.forward`."""
        value = self.value(self.activated(self.key(x, delta)))
        return jax.nn.sigmoid(self.receptance(x, delta)) * value


class RWKV7FeedForward(_ChannelMixing):
    """``value(act(key(x)))`` (arXiv:2503.14456, FLA's class); the block starts as the identity.

    Args:
        hidden_size, intermediate_size, hidden_act, dtype, param_dtype, precision, rngs: as of
            :class:`RWKV6FeedForward`.
        hidden_ratio: inner width over D, 4 if None.
        layer_idx, num_hidden_layers: for the initial mix of tokens.
        kernel_init: initialiser of kernels; RWKV-7's (key orthogonal, value 0) if None.
    """

    def __init__(
        self,
        hidden_size: int,
        hidden_ratio: float | None = None,
        intermediate_size: int | None = None,
        hidden_act: str = "sqrelu",
        layer_idx: int = 0,
        num_hidden_layers: int = 1,
        *,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init: init.Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(hidden_size, hidden_act, dtype, param_dtype)
        inner = intermediate_size or _inner(hidden_size, hidden_ratio, 4)
        power = (1 - layer_idx / num_hidden_layers) ** 4
        share = 1 - (jnp.arange(hidden_size) / hidden_size) ** power
        self.x_k = nnx.Param(share.astype(param_dtype))
        key, value = (kernel_init or own for own in (init.orthogonal(1.0), nnx.initializers.zeros))
        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        self.key = linear(hidden_size, inner, kernel_init=key)
        self.value = linear(inner, hidden_size, kernel_init=value)

    def forward(self, x, delta):
        """See :meth:`_ChannelMixing.forward`."""
        return self.value(self.activated(self.key(lerp(x, delta, self.x_k))))


def _inner(hidden_size, ratio, default) -> int:
    return 32 * -(-int(hidden_size * (default if ratio is None else ratio)) // 32)
