"""Softmax attention with rotary positions, FLA's ``Attention``."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx

from jla.layers.mixer import Cache, TokenMixer
from jla.nn import RMSNorm, init
from jla.ops import attention, rotate
from jla.ops.positions import Place, locate
from jla.ops.segments import take_time
from jla.ops.softmax import Past, attend_past


class Attention(TokenMixer):
    """Causal multi-head attention, with grouped keys, a window and normalised q and k as options.

    Args:
        hidden_size: D, a multiple of ``num_heads``.
        num_heads: heads of q.
        num_kv_heads: heads of k and v, a divisor of ``num_heads``; ``num_heads`` if None.
        qkv_bias: give the three projections a bias.
        qk_norm: RMS-normalise q and k per head, before the rotation.
        window_size: how many real tokens a query sees, itself counted; all if None.
        rope_theta: base of the rotary frequencies; None leaves positions out.
        max_position_embeddings: FLA's table size hint, kept and without effect.
        layer_idx: FLA's argument, not needed here.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`.
        kernel_init: initialiser of kernels; torch's default, as FLA's layer alone has, if None.
        out_init: initialiser of ``o_proj``'s kernel; ``kernel_init`` if None.
        impl: implementation of the attention, see :func:`jla.ops.attention`.
        rngs: ``params`` stream.

    The cache holds keys (rotated) and values ``[B, L, Hkv, D/H]`` of the current document, slot
    ``position % L``, with L the smaller of ``max_length`` and the window. A document that outgrows
    ``max_length`` without a window to forget by gives NaN.

    Raises:
        ValueError: sizes that do not divide, an odd head size with rotation, or a window below 1.
    """

    growing = frozenset({"k", "v"})

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        window_size: int | None = None,
        rope_theta: float | None = 10000.0,
        max_position_embeddings: int | None = None,
        layer_idx: int | None = None,
        *,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init: init.Initializer | None = None,
        out_init: init.Initializer | None = None,
        impl: str = "auto",
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size={hidden_size} must be a multiple of num_heads={num_heads}"
            )
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads=} must be a multiple of {num_kv_heads=}")
        if window_size is not None and window_size < 1:
            raise ValueError(
                f"window_size must be at least 1 (a query sees itself), got {window_size}"
            )
        self.hidden_size, self.head_dim = hidden_size, hidden_size // num_heads
        if rope_theta is not None and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head size, got {self.head_dim}")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.window_size, self.rope_theta, self.impl = window_size, rope_theta, impl
        self.max_position_embeddings = max_position_embeddings
        self.dtype, self.param_dtype = dtype, param_dtype

        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        kv_dim = num_kv_heads * self.head_dim
        self.q_proj = linear(hidden_size, hidden_size, use_bias=qkv_bias)
        self.k_proj = linear(hidden_size, kv_dim, use_bias=qkv_bias)
        self.v_proj = linear(hidden_size, kv_dim, use_bias=qkv_bias)
        out_init = out_init or kernel_init or init.torch_linear
        self.o_proj = linear(hidden_size, hidden_size, kernel_init=out_init)
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm = RMSNorm(self.head_dim, param_dtype=param_dtype)
            self.k_norm = RMSNorm(self.head_dim, param_dtype=param_dtype)

    def mix(self, x, *, segment_ids, positions, cache):
        """See :meth:`TokenMixer.mix`; the cache holds keys, values and the document's length."""
        before = cache or {}
        chosen = before.get("state_positions")
        place = locate(x.shape[:2], segment_ids, before.get("length"), chosen)
        q, k, v = self._heads(x, place.position if positions is None else positions)
        attend = partial(
            attention,
            q,
            k,
            v,
            window_size=self.window_size,
            segment_ids=segment_ids,
            impl=self.impl,
        )
        if cache is None:
            o, after = attend(), None
        elif chosen is not None:
            o = attend(past=_past(cache, cache["length"]))
            after = _gather(cache, k, v, place.length, chosen, segment_ids)
        elif x.shape[1] == 1:
            # Written first, then read: the cache need not be copied beside the new token.
            after = _write(cache, k, v, place)
            o = attend_past(q, _past(after, cache["length"])).astype(v.dtype)
        else:
            past = _past(cache, cache["length"])
            o, after = attend(past=past), _write(cache, k, v, place)
        if after is not None and not self._may_wrap(after):
            slots = after["k"].shape[-3]
            # Of one document its length tells; of several, each token by itself.
            late = (place.length > slots)[:, None] if chosen is None else place.position >= slots
            o = jnp.where(_wide(late), jnp.nan, o)
        return self.o_proj(o.reshape(x.shape)), after

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """Keys and values ``[B, L, Hkv, D/H]`` and lengths int32 ``[B]``."""
        known = [size for size in (max_length, self.window_size) if size is not None]
        if not known:
            raise ValueError("new_cache needs max_length: attention keeps every token's key")
        if min(known) < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        shape = (batch_size, min(known), self.num_kv_heads, self.head_dim)
        length = jnp.zeros((batch_size,), jnp.int32)
        return {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype), "length": length}

    def room(self, cache: Cache) -> jax.Array | None:
        """Free slots ``[..., B]``; None where the window lets old tokens go."""
        slots = cache["k"].shape[-3]
        wraps = self.window_size is not None and slots >= self.window_size
        return None if wraps else slots - cache["length"]

    def _may_wrap(self, cache) -> bool:
        return self.window_size is not None and cache["k"].shape[-3] >= self.window_size

    def _heads(self, x, positions):
        split = lambda y: rearrange(y, "b t (h d) -> b t h d", d=self.head_dim)  # noqa: E731
        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None:
            q = rotate(q, positions, theta=self.rope_theta)
            k = rotate(k, positions, theta=self.rope_theta)
        return q, k, v


def _past(cache, length) -> Past:
    """The cache's slots with the position each one holds; the newest of those that share a slot."""
    positions = _held(cache["length"], cache["k"].shape[1])
    return Past(cache["k"], cache["v"], jnp.where(positions < 0, -1, positions), length)


def _held(length, slots: int) -> jax.Array:
    """The position ``[..., L]`` that each slot holds of ``length [...]`` tokens, < 0 if none."""
    newest = length[..., None] - 1
    return newest - (newest - jnp.arange(slots, dtype=jnp.int32)) % slots


def _write(cache, k, v, place: Place) -> Cache:
    slots = cache["k"].shape[1]
    fresh = place.kept & (place.position >= place.length[:, None] - slots)
    slot = jnp.where(fresh, place.position % slots, slots)
    put = jax.vmap(lambda row, at, new: row.at[at].set(new.astype(row.dtype), mode="drop"))
    return {"k": put(cache["k"], slot, k), "v": put(cache["v"], slot, v), "length": place.length}


def _gather(cache, k, v, length, chosen, segment_ids) -> Cache:
    """The caches ``[B, S, ...]`` after chosen tokens, whose documents have ``length [B, S]``."""
    positions = _held(length, cache["k"].shape[1])
    real = jnp.ones(k.shape[:2], bool) if segment_ids is None else segment_ids != 0
    # Of the row's real tokens, a slot's stands as far before the chosen one as in the document;
    # one before the row's first was in the cache already, in the same slot.
    number = take_time(jnp.cumsum(real, axis=1), chosen) - length
    number = number[..., None] + positions
    token = take_time(jnp.argsort(~real, axis=1), number)

    def slots(old, new):
        kept = jnp.where(_wide(number >= 0), take_time(new, token).astype(old.dtype), old[:, None])
        return jnp.where(_wide(positions >= 0), kept, 0)

    return {"k": slots(cache["k"], k), "v": slots(cache["v"], v), "length": length}


def _wide(mask):
    return mask[..., None, None]
