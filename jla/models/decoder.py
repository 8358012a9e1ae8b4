"""The one stack of blocks that serves nearly every family."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.core import Tracer

from jla.cache import Stacked
from jla.layers import Attention, TokenMixer
from jla.models.config import Config
from jla.models.layout import Run, stack_alike
from jla.nn import GatedMLP, RMSNorm, init
from jla.ops.residual import mix_residuals

MixerFactory = Callable[..., TokenMixer]


class Settings(NamedTuple):
    """JAX-side settings that every module of a model shares."""

    dtype: Any
    param_dtype: Any
    precision: Any
    kernel_init: init.Initializer

    def options(self, rngs: nnx.Rngs) -> dict[str, Any]:
        """As keyword arguments of a mixer or MLP."""
        return {**self._asdict(), "rngs": rngs}


class Block(nnx.Module):
    """Mixer and MLP, each behind a norm and on a residual.

        x = x + attn(attn_norm(x));  x = x + mlp(mlp_norm(x))

    With ``attnres_block_size`` a sub-layer reads a learned mix of earlier sums instead of ``x``
    (see :func:`jla.ops.residual.mix_residuals`): sums of finished blocks of sub-layers, and the
    running one.

    Attributes:
        checkpoint_names: attribute -> its name in checkpoints, where a family spells it otherwise.
    """

    checkpoint_names: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: Config, layer_idx: int, mixer: TokenMixer, settings: Settings, rngs):
        self.layer_ids = (layer_idx,)
        norm: dict[str, Any] = dict(eps=config.norm_eps, param_dtype=settings.param_dtype)
        self.attn_norm = RMSNorm(config.hidden_size, **norm)
        self.attn = mixer
        self.mlp_norm = RMSNorm(config.hidden_size, **norm)
        self.mlp = self.make_mlp(config, **settings.options(rngs))
        size = config.attnres_block_size
        self.attnres = size is not None
        if size is not None:
            self.opens_block = (2 * layer_idx % size == 0, (2 * layer_idx + 1) % size == 0)
            self.attn_res_proj = residual_query(config, settings, rngs)
            self.attn_res_norm = RMSNorm(config.hidden_size, **norm)
            self.mlp_res_proj = residual_query(config, settings, rngs)
            self.mlp_res_norm = RMSNorm(config.hidden_size, **norm)

    @staticmethod
    def make_mlp(config: Config, **options) -> nnx.Module:
        """The MLP of a layer."""
        return GatedMLP(
            config.hidden_size,
            config.hidden_ratio,
            config.intermediate_size,
            config.hidden_act,
            config.fuse_swiglu,
            **options,
        )

    def __call__(self, x, sums, *, segment_ids, positions, cache):
        """``x [B, T, D]``, finished ``sums`` and this layer's cache to the same three after it."""
        attn = functools.partial(
            _mix, self.attn, segment_ids=segment_ids, positions=positions, cache=cache
        )
        if not self.attnres:
            y, cache_after = attn(self.attn_norm(x))
            x = x + y
            return x + self.mlp(self.mlp_norm(x)), sums, cache_after
        opens_attn, opens_mlp = self.opens_block
        mixed, x, sums = _enter(x, sums, self.attn_res_proj, self.attn_res_norm, opens_attn)
        y, cache_after = attn(self.attn_norm(mixed))
        x = y if x is None else x + y
        mixed, x, sums = _enter(x, sums, self.mlp_res_proj, self.mlp_res_norm, opens_mlp)
        y = self.mlp(self.mlp_norm(mixed))
        return (y if x is None else x + y), sums, cache_after


class MixerBlock(nnx.Module):
    """A mixer alone: ``x + attn(attn_norm(x))``, the layer of the Mamba models."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {"attn_norm": "norm", "attn": "mixer"}

    def __init__(self, config: Config, layer_idx: int, mixer: TokenMixer, settings: Settings, rngs):
        self.layer_ids = (layer_idx,)
        self.attn_norm = RMSNorm(
            config.hidden_size, eps=config.norm_eps, param_dtype=settings.param_dtype
        )
        self.attn = mixer

    def __call__(self, x, sums, *, segment_ids, positions, cache):
        """See :meth:`Block.__call__`."""
        h = self.attn_norm(x)
        y, cache = _mix(self.attn, h, segment_ids=segment_ids, positions=positions, cache=cache)
        return x + y, sums, cache


def _mix(mixer: TokenMixer, x, *, cache, **call) -> tuple[jax.Array, Any]:
    """The mixer's output and the cache after it, None if none was given."""
    return (mixer(x, **call), None) if cache is None else mixer(x, cache=cache, **call)


def residual_query(config: Config, settings: Settings, rngs: nnx.Rngs) -> nnx.Linear:
    """The query of an attention residual; zero at first, so that all sources weigh the same."""
    zeros = nnx.initializers.zeros_init()
    return init.linear(None, settings.param_dtype, None, zeros, rngs)(config.hidden_size, 1)


def read_residuals(x, sums, proj: nnx.Linear, norm: RMSNorm) -> jax.Array:
    """The mix of finished sums and the running one that a sub-layer reads."""
    return mix_residuals(proj.kernel[...][:, 0], [*sums, x], norm.scale[...], eps=norm.eps)


def _enter(x, sums, proj, norm, opens):
    """What a sub-layer reads, and the running sum and finished sums it goes on with."""
    mixed = read_residuals(x, sums, proj, norm)
    return (mixed, None, (*sums, x)) if opens else (mixed, x, sums)


class DecoderOutput(NamedTuple):
    """``last_hidden_state [B, T, D]`` after the last norm, the cache (None unless given), and with
    ``output_hidden_states`` the input of every layer and the last state."""

    last_hidden_state: jax.Array
    cache: Any
    hidden_states: tuple[jax.Array, ...] | None


class Decoder(nnx.Module):
    """Embeddings, blocks, norm. A family sets ``config_class`` and ``make_mixer``, and where it
    differs the block and the names in checkpoints (see :class:`Block`).

    Args:
        config: of the family's ``config_class``.
        dtype: compute dtype; that of parameters and inputs together if None.
        param_dtype: dtype of parameters, float32 ones apart.
        precision: of matrix products, as in :class:`flax.nnx.Linear`.
        scan_layers: trace alike layers once and scan over them, parameters stacked; layers that do
            not repeat (and all, with attention residuals) stay single.
        remat: recompute each block in the backward: True, or a ``jax.checkpoint`` policy.
        rngs: ``params`` stream; every layer draws its own key, scanned or not.

    Raises:
        TypeError: a config of another class.
    """

    config_class: ClassVar[type[Config]]
    make_mixer: ClassVar[MixerFactory]
    block_class: ClassVar[type[Block | MixerBlock]] = Block
    checkpoint_names: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        config: Config,
        *,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        scan_layers: bool = False,
        remat: bool | Callable = False,
        rngs: nnx.Rngs,
    ):
        if not isinstance(config, self.config_class):
            raise TypeError(
                f"{type(self).__name__} needs a {self.config_class.__name__}, "
                f"got {type(config).__name__}"
            )
        self.config, self.remat, self.dtype, self.param_dtype = config, remat, dtype, param_dtype
        settings = Settings(dtype, param_dtype, precision, init.normal(config.initializer_range))
        self.embeddings = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_init=settings.kernel_init,
            rngs=rngs,
        )
        keys = jax.random.split(rngs.params(), config.num_hidden_layers)
        blocks = [
            self._block(config, i, settings, nnx.Rngs(params=keys[i]))
            for i in range(config.num_hidden_layers)
        ]
        self.run = Run(0, 0, 1)
        if scan_layers and config.attnres_block_size is None:
            blocks, self.run = stack_alike(blocks)
        self.layers: Any = nnx.List(blocks)
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, param_dtype=param_dtype)
        if config.attnres_block_size is not None:
            self.res_proj = residual_query(config, settings, rngs)
            self.res_norm = RMSNorm(
                config.hidden_size, eps=config.norm_eps, param_dtype=param_dtype
            )

    def _block(self, config, layer_idx, settings, rngs):
        options = settings.options(rngs)
        mixer = attention_mixer(config, layer_idx, **options)
        if mixer is None:
            mixer = type(self).make_mixer(config, layer_idx, **options)
        return type(self).block_class(config, layer_idx, mixer, settings, rngs)

    def __call__(
        self,
        input_ids: jax.Array | None = None,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: Any = None,
        inputs_embeds: jax.Array | None = None,
        output_hidden_states: bool = False,
    ) -> DecoderOutput:
        """Runs the stack on ``input_ids`` int ``[B, T]`` or ``inputs_embeds [B, T, D]``.

        Raises:
            ValueError: both or neither input given, a concrete id outside the vocabulary, or a
                cache of another model.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of the two")
        x: Any = inputs_embeds if input_ids is None else embed(self.embeddings, input_ids)
        if getattr(self.config, "residual_in_fp32", False):
            x = x.astype(jnp.promote_types(x.dtype, self.norm.scale[...].dtype))
        if cache is not None and len(cache) != len(self.layers):
            raise ValueError(
                f"cache has {len(cache)} entries, this model's has {len(self.layers)}: "
                "it was made by another model"
            )
        call = dict(segment_ids=segment_ids, positions=positions)
        caches: list[Any] = [None] * len(self.layers) if cache is None else list(cache)
        stop = self.run.start + self.run.period
        sums, seen, index = (), [], 0
        while index < len(self.layers):
            if index == self.run.start and self.run.repeats > 1:
                group, index = slice(index, stop), stop
                x, caches[group], inner = self._scan(self.layers[group], x, caches[group], call)
                seen += inner if output_hidden_states else []
            else:
                seen.append(x)
                x, sums, caches[index] = self._single(index, x, sums, caches[index], call)
                index += 1
        if self.config.attnres_block_size is not None:
            x = read_residuals(x, sums, self.res_proj, self.res_norm)
        x = self.norm(x)
        hidden_states = (*seen, x) if output_hidden_states else None
        return DecoderOutput(x, None if cache is None else tuple(caches), hidden_states)

    def new_cache(self, batch_size: int, max_length: int | None = None, *, dtype=None):
        """The cache before any token: a tuple with an entry per block, see :mod:`jla.cache`."""
        caches = [
            block.attn.new_cache(batch_size, max_length, dtype=dtype) for block in self.layers
        ]
        for i in range(self.run.start, self.run.start + self.run.period):
            leading = lambda leaf: jnp.zeros((self.run.repeats, *leaf.shape), leaf.dtype)  # noqa: E731
            caches[i] = Stacked(jax.tree.map(leading, caches[i]))
        return tuple(caches)

    def room(self, cache) -> jax.Array | None:
        """Tokens ``[B]`` of the current document that still fit, None if nothing limits them."""
        rooms = [
            block.attn.room(entry.layers if isinstance(entry, Stacked) else entry)
            for block, entry in zip(self.layers, cache, strict=True)
        ]
        limits = [
            room.reshape(-1, room.shape[-1]).min(axis=0) for room in rooms if room is not None
        ]
        return jnp.min(jnp.stack(limits), axis=0) if limits else None

    def _single(self, index, x, sums, cache, call):
        def apply(state, x, sums, cache, call):
            return nnx.merge(graphdef, state)(x, sums, cache=cache, **call)

        graphdef, state = nnx.split(self.layers[index])
        return self._rematerialised(apply)(state, x, sums, cache, call)

    def _scan(self, blocks, x, caches, call):
        graphdefs, states = zip(*map(nnx.split, blocks), strict=True)

        def body(x, layer):
            seen, after = [], []
            for graphdef, state, cache in zip(graphdefs, *layer, strict=True):
                seen.append(x)
                x, _, cache = nnx.merge(graphdef, state)(x, (), cache=cache, **call)
                after.append(cache)
            return x, (after, seen)

        caches = [None if cache is None else cache.layers for cache in caches]
        x, (after, seen) = lax.scan(self._rematerialised(body), x, (list(states), caches))
        seen = [each[i] for i in range(self.run.repeats) for each in seen]
        return x, [None if cache is None else Stacked(cache) for cache in after], seen

    def _rematerialised(self, function):
        if not self.remat:
            return function
        return jax.checkpoint(function, policy=None if self.remat is True else self.remat)


def attention_mixer(config: Config, layer_idx: int, **options) -> Attention | None:
    """Softmax attention where a hybrid's ``attn`` asks for it, else None."""
    spec = getattr(config, "attention_at", lambda _: None)(layer_idx)
    if spec is None:
        return None
    return Attention(
        config.hidden_size,
        num_heads=spec["num_heads"],
        num_kv_heads=spec["num_kv_heads"],
        qkv_bias=spec["qkv_bias"],
        window_size=spec["window_size"],
        rope_theta=spec["rope_theta"],
        max_position_embeddings=config.max_position_embeddings,
        **options,
    )


def check_input_ids(input_ids: jax.Array, vocab_size: int) -> None:
    """Raises unless ``input_ids`` are int ``[B, T]`` in ``0..vocab_size - 1``, if concrete.

    Raises:
        TypeError: ids that are not integers.
        ValueError: a shape other than ``[B, T]``, or a concrete id outside the vocabulary.
    """
    if not jnp.issubdtype(jnp.result_type(input_ids), jnp.integer):
        raise TypeError(f"input_ids must be integers, got dtype {jnp.result_type(input_ids)}")
    if jnp.ndim(input_ids) != 2:
        raise ValueError(f"input_ids must be [B, T], got shape {jnp.shape(input_ids)}")
    if isinstance(input_ids, Tracer) or not np.size(input_ids):
        return
    low, high = int(np.min(np.asarray(input_ids))), int(np.max(np.asarray(input_ids)))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"input_ids must be in 0..{vocab_size - 1} (the vocabulary), got {low} to {high}"
        )


def embed(embeddings: nnx.Embed, input_ids: jax.Array) -> jax.Array:
    """Rows of the table for ids int ``[B, T]``; a traced id outside the vocabulary gives NaN."""
    check_input_ids(input_ids, embeddings.num_embeddings)
    input_ids = jnp.asarray(input_ids)
    known = (input_ids >= 0) & (input_ids < embeddings.num_embeddings)
    return jnp.where(known[..., None], embeddings(jnp.where(known, input_ids, 0)), jnp.nan)
