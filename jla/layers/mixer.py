"""The one abstract mixer: a causal token mixer that is called like ``nnx.MultiHeadAttention``."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jla.layers.masks import padding_from_mask
from jla.ops import segments

Cache = Any  # a dict pytree; every leaf starts with the batch axis


class TokenMixer(nnx.Module, abc.ABC):
    """Mixes information along time, causally, within documents.

    A concrete mixer writes ``__init__`` (which sets ``hidden_size``), :meth:`mix` and
    :meth:`new_state`. What a caller sees (leading batch axes, masks, packing, padding, caches,
    flax's decoding) is written here, once.

    The contract: packed documents equal separate ones; a padding token is an identity step and
    outputs 0; any split of a row with the cache carried equals one call; nothing sees the future.
    """

    hidden_size: int
    decode: bool = False
    # Leaves whose second axis is a capacity the caller chose, not a size of the mixer.
    growing: frozenset[str] = frozenset()
    # Whether :meth:`mix` also takes ``shared``, the values that layers of a model hand on: a dict
    # of its own that it may read and add to.
    shares: bool = False
    # Further inputs that :meth:`mix` takes by name, one per layer of a model (HGRN's lower bound).
    takes: frozenset[str] = frozenset()

    @abc.abstractmethod
    def mix(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None,
        positions: jax.Array | None,
        cache: Cache | None,
    ) -> tuple[jax.Array, Cache | None]:
        """The mixing itself, pure: ``x [B, T, D]`` to ``y [B, T, D]`` and the state after it.

        ``cache`` is what :meth:`new_state` made (zeros: nothing seen), or None for none wanted.
        With ``state_positions`` in it besides, int ``[B, S]``, the states after these real tokens
        are wanted, every leaf ``[B, S, ...]`` (see :mod:`jla.layers.carry`). What the mixer
        ``takes`` besides comes as further keyword arguments.
        """

    @abc.abstractmethod
    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """The state before any token: a dict of arrays of zeros, batch first."""

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        input_positions: jax.Array | None = None,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: Cache | None = None,
        ends: segments.Ends | None = None,
        shared: Mapping[str, Any] | None = None,
        **inputs: jax.Array,
    ) -> Any:
        """Applies the mixer.

        Args:
            inputs_q: ``[..., T, D]``, any leading batch axes.
            inputs_k, inputs_v: None, or ``inputs_q`` itself: a mixer attends to its own input.
            mask: flax attention mask. ``[..., 1, 1, T]`` is key padding; ``[..., 1, T, T]`` must be
                causal and tells the padding by its diagonal.
            deterministic, rngs: for flax's call; there is no dropout to switch.
            sow_weights: must be False, there are no attention weights to sow.
            decode: continue the module's own cache (:meth:`init_cache`); ``self.decode`` if None.
            is_causal: flax's default False means nothing here: a mixer is always causal.
            positions, input_positions: int ``[..., T]``, one or the other; real tokens of the
                document are counted if None.
            segment_ids: int ``[..., T]``, 0 = padding, a change = new document.
            cache: what :meth:`new_cache` or an earlier call returned; any T >= 1.
            ends: of documents (:func:`jla.ops.document_ends`): the new cache then has a row for
                each of these, as if it had been read alone, in place of one for each row.
            shared: what earlier layers of the model handed on, each value ``[..., T, X]``; ``{}``
                at the first.
            **inputs: what the mixer ``takes`` besides.

        Returns:
            ``y [..., T, D]``, or a tuple: ``y``, the cache if one was given, and what is shared
            with later layers if ``shared`` was given.

        Raises:
            ValueError: shapes that disagree, other inputs for keys or values, a mask or cache that
                cannot be honoured, ``decode`` without a cache.
            TypeError: an input that this mixer does not take.
        """
        if not self.takes.issuperset(inputs):
            raise TypeError(
                f"{type(self).__name__} takes {sorted(self.takes) or 'nothing'} besides, "
                f"got {sorted(inputs)}"
            )
        x, lead = self._flatten(inputs_q, inputs_k, inputs_v)
        if sow_weights:
            raise ValueError("sow_weights=True: this mixer has no attention weights to sow")
        if positions is not None and input_positions is not None:
            raise ValueError("give positions or input_positions, not both: they mean the same")
        positions = positions if positions is not None else input_positions
        if positions is not None:
            positions = jnp.broadcast_to(positions, (*lead, x.shape[1])).reshape(x.shape[:2])
        segment_ids = self._documents(segment_ids, mask, lead, x)
        _check_ends(ends, cache, x)
        decode = self.decode if decode is None else decode
        run = self._decode if decode and cache is None else self._run
        flat = lambda value: value.reshape(*x.shape[:2], *value.shape[len(lead) + 1 :])  # noqa: E731
        handed = jax.tree.map(flat, dict(shared or {}))
        more = {**inputs, "shared": handed} if self.shares else inputs
        y, cache_after = run(x, segment_ids, positions, cache, ends, more)
        outputs = [y.reshape(inputs_q.shape)]
        outputs += [] if cache is None else [cache_after]
        if shared is not None:
            outputs.append(jax.tree.map(lambda v: v.reshape(*lead, *v.shape[1:]), handed))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def new_cache(self, batch_size: int, max_length: int | None = None, *, dtype=None) -> Cache:
        """The cache before any token, a plain pytree: ``y, cache = mixer(x, cache=cache)``.

        Args:
            batch_size: rows.
            max_length: tokens of one document it must hold; only softmax attention needs it.
            dtype: of windows, keys and values (recurrent states are float32); the module's compute
                dtype if None.
        """
        cache = self.new_state(batch_size, max_length, dtype or self._cache_dtype())
        return {**cache, "segment_id": jnp.zeros((batch_size,), jnp.int32)}

    def room(self, cache: Cache) -> jax.Array | None:
        """Tokens ``[B]`` that still fit in the cache, None for a mixer whose cache never fills."""
        return None

    def init_cache(self, input_shape: tuple[int, ...], dtype=None) -> None:
        """Makes the module's own cache for flax's ``decode=True`` form.

        Args:
            input_shape: ``(*batch, max_length, D)``, the shape of the longest input.
            dtype: as in :meth:`new_cache`.
        """
        *batch, max_length, _ = input_shape
        rows = 1
        for size in batch:
            rows *= size
        cache = self.new_cache(rows, max_length, dtype=dtype)
        self.cache = nnx.data(jax.tree.map(nnx.Cache, cache))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ) -> None:
        """What ``nnx.view`` calls.

        Args:
            deterministic: for flax's call; there is no dropout to switch.
            decode: whether calls continue the module's own cache.
            batch_size: make a new cache for so many rows (needs ``max_length``).
            max_length: tokens the new cache must hold.
        """
        if decode is not None:
            self.decode = decode
        if batch_size is None:
            return
        if max_length is None:
            raise ValueError("nnx.view with batch_size needs max_length too, to size the cache")
        batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        self.init_cache((*batch, max_length, self.hidden_size))

    def _flatten(self, inputs_q, inputs_k, inputs_v):
        for name, other in {"inputs_k": inputs_k, "inputs_v": inputs_v}.items():
            if other is not None and other is not inputs_q:
                raise ValueError(
                    f"{name} must be inputs_q itself or None: a mixer has no cross-attention"
                )
        if inputs_q.ndim < 2 or inputs_q.shape[-1] != self.hidden_size:
            raise ValueError(
                f"inputs_q must be [..., T, {self.hidden_size}], got shape {inputs_q.shape}"
            )
        if 0 in inputs_q.shape:
            raise ValueError(f"inputs_q must not be empty, got shape {inputs_q.shape}")
        lead = inputs_q.shape[:-2]
        return (inputs_q if len(lead) == 1 else inputs_q.reshape(-1, *inputs_q.shape[-2:])), lead

    def _documents(self, segment_ids, mask, lead, x):
        shape = x.shape[:2]
        if segment_ids is not None:
            if jnp.shape(segment_ids) != (*lead, shape[1]):
                raise ValueError(
                    f"segment_ids must be {(*lead, shape[1])}, got {jnp.shape(segment_ids)}"
                )
            segment_ids = segments.check_segment_ids(jnp.reshape(segment_ids, shape), shape, x)
        if mask is None:
            return segment_ids
        padding = padding_from_mask(mask, *shape)
        if padding is None:
            return segment_ids
        padding = segments.check_segment_ids(padding, shape, x)
        return padding if segment_ids is None else jnp.where(padding != 0, segment_ids, 0)

    def _run(self, x, segment_ids, positions, cache, ends, more):
        given = state = last_id = None
        if cache is not None:
            self._check_cache(cache, x.shape[0])
            cache = jax.tree.map(lambda leaf: _with_rows_of(x, leaf), cache)
            state = {name: leaf for name, leaf in cache.items() if name != "segment_id"}
            last_id = cache["segment_id"]
            if segment_ids is None:
                # Rows without ids are documents of id 1, so that a mask of ones may follow.
                last_id = jnp.maximum(last_id, 1)
            else:
                restart, last_id = segments.resume(segment_ids, last_id)
                state = jax.tree.map(lambda leaf: _clear(leaf, restart), state)
            given = state if ends is None else {**state, "state_positions": ends.time}
        y, after = self.mix(x, segment_ids=segment_ids, positions=positions, cache=given, **more)
        if segment_ids is not None:
            y = jnp.where((segment_ids != 0)[..., None], y, 0)
        if state is None:
            return y, None
        if ends is not None:
            # Each document is one by itself now, of the id of rows without any.
            after, last_id = self._select(after, state, ends), jnp.ones_like(ends.rows)
        # A cache keeps its dtypes, so that it can be carried by a loop.
        after = jax.tree.map(lambda new, old: new.astype(old.dtype), after, state)
        return y, {**after, "segment_id": last_id}

    def _select(self, after, before, ends):
        """The rows wanted of states ``[B, S, ...]``."""
        for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
            if new.shape != (*ends.time.shape, *old.shape[1:]):
                raise ValueError(
                    f"{type(self).__name__} gives no states after chosen tokens: mix must honour "
                    "the state_positions in its cache"
                )
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[ends.rows], after)

    def _decode(self, x, segment_ids, positions, _, __, more):
        if getattr(self, "cache", None) is None:
            raise ValueError(
                "decode=True needs a cache: call init_cache(input_shape) first, or "
                "nnx.view(model, decode=True, batch_size=..., max_length=...)"
            )
        is_variable = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
        before = jax.tree.map(lambda v: v[...], self.cache, is_leaf=is_variable)
        y, after = self._run(x, segment_ids, positions, before, None, more)
        jax.tree.map(_assign, self.cache, after, is_leaf=is_variable)
        return y, None

    def _cache_dtype(self):
        dtype = getattr(self, "dtype", None)
        return getattr(self, "param_dtype", jnp.float32) if dtype is None else dtype

    def _check_cache(self, cache, batch):
        expected = jax.eval_shape(lambda: self.new_cache(batch, 1))
        if jax.tree.structure(cache) != jax.tree.structure(expected):
            raise ValueError(
                f"cache does not belong to {type(self).__name__}: its entries are "
                f"{sorted(cache) if isinstance(cache, dict) else type(cache).__name__}, "
                f"expected {sorted(expected)}"
            )
        for (path, given), want in zip(
            jax.tree_util.tree_leaves_with_path(cache), jax.tree.leaves(expected), strict=True
        ):
            free = slice(1, 2) if path[-1].key in self.growing else slice(0, 0)
            shapes = [list(jnp.shape(given)), list(want.shape)]
            for shape in shapes:
                shape[free] = []
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"cache{jax.tree_util.keystr(path)} has shape {jnp.shape(given)}, "
                    f"{type(self).__name__} with a batch of {batch} needs {want.shape}"
                )


def _check_ends(ends, cache, x):
    if ends is None:
        return
    if cache is None:
        raise ValueError("ends needs a cache: it tells which rows that has after the call")
    if ends.time.ndim != 2 or ends.time.shape[0] != x.shape[0]:
        raise ValueError(
            f"ends.time must be [B, S] of the inputs' {x.shape[0]} rows, got {ends.time.shape}"
        )


def _clear(leaf, restart):
    return jnp.where(restart.reshape(-1, *(1,) * (leaf.ndim - 1)), 0, leaf)


def _with_rows_of(x, leaf):
    """``leaf`` with its rows placed as those of ``x``; a new cache does not know Explicit axes."""
    rows, sharding = jax.typeof(x).sharding.spec[0], jax.typeof(leaf).sharding
    if rows is None or rows == sharding.spec[0]:
        return leaf
    sharding = jax.typeof(x).sharding.update(spec=P(rows, *sharding.spec[1:]))
    return jax.sharding.reshard(leaf, sharding)


def _assign(variable, value):
    variable[...] = value
