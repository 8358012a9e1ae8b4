"""The one stack of blocks that serves nearly every family."""

from __future__ import annotations

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
from jla.models.block import Block, Settings, read_residuals, residual_query, rms_norm
from jla.models.config import Config
from jla.models.layout import Run, stack_alike
from jla.nn import init
from jla.ops.segments import Ends

MixerFactory = Callable[..., TokenMixer]


class DecoderOutput(NamedTuple):
    """``last_hidden_state [B, T, D]`` after the last norm, the cache (None unless given), and with
    ``output_hidden_states`` the input of every layer and the last state."""

    last_hidden_state: jax.Array
    cache: Any
    hidden_states: tuple[jax.Array, ...] | None


class Decoder(nnx.Module):
    """Embeddings, blocks, norm. A family sets ``config_class`` and ``make_mixer``, and where it
    differs the block, the names in checkpoints (see :class:`jla.models.block.Block`) and
    initialisers.

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
    block_class: ClassVar[type[Block]] = Block
    checkpoint_names: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def embedding_init(cls, config: Config) -> init.Initializer:
        """Of the embeddings."""
        return init.normal(config.initializer_range)

    @classmethod
    def head_init(cls, config: Config) -> init.Initializer:
        """Of the language-model head's kernel."""
        return init.normal(config.initializer_range)

    @classmethod
    def attention_out_init(cls, config: Config) -> init.Initializer | None:
        """Of ``o_proj``'s kernel where a hybrid has softmax attention; as other kernels if None."""
        return None

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
            embedding_init=self.embedding_init(config),
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
        self.norm: Any = self.block_class.make_norm(config, param_dtype)
        if config.attnres_block_size is not None:
            self.res_proj = residual_query(config, settings, rngs)
            self.res_norm = rms_norm(config, param_dtype)

    def _block(self, config, layer_idx, settings, rngs):
        options = settings.options(rngs)
        out_init = self.attention_out_init(config)
        mixer = attention_mixer(config, layer_idx, out_init=out_init, **options)
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
        ends: Ends | None = None,
        inputs_embeds: jax.Array | None = None,
        output_hidden_states: bool = False,
    ) -> DecoderOutput:
        """Runs the stack on ``input_ids`` int ``[B, T]`` or ``inputs_embeds [B, T, D]``.

        With ``ends`` the cache afterwards has a row per document, see
        :class:`jla.layers.TokenMixer`.

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
        call = dict(segment_ids=segment_ids, positions=positions, ends=ends)
        given = self.layer_inputs()
        inputs = [_rows(given, block.layer_ids) for block in self.layers]
        caches: list[Any] = [None] * len(self.layers) if cache is None else list(cache)
        stop = self.run.start + self.run.period
        shared, seen, index = {}, [], 0
        while index < len(self.layers):
            if index == self.run.start and self.run.repeats > 1:
                group, index = slice(index, stop), stop
                layers = (caches[group], inputs[group])
                x, shared, caches[group], inner = self._scan(group, x, shared, *layers, call)
                seen += inner if output_hidden_states else []
            else:
                seen.append(x)
                layer = (caches[index], inputs[index])
                x, shared, caches[index] = self._single(index, x, shared, *layer, call)
                index += 1
        if self.config.attnres_block_size is not None:
            x = read_residuals(x, shared.get("sums", ()), self.res_proj, self.res_norm)
        x = self.norm(x)
        hidden_states = (*seen, x) if output_hidden_states else None
        return DecoderOutput(x, None if cache is None else tuple(caches), hidden_states)

    def new_cache(self, batch_size: int, max_length: int | None = None, *, dtype=None):
        """The cache before any token: a tuple with an entry per block, see :mod:`jla.cache`."""
        caches: list[Any] = [
            block.new_cache(batch_size, max_length, dtype) for block in self.layers
        ]
        for i in range(self.run.start, self.run.start + self.run.period):
            leading = lambda leaf: jnp.zeros((self.run.repeats, *leaf.shape), leaf.dtype)  # noqa: E731
            caches[i] = Stacked(jax.tree.map(leading, caches[i]))
        return tuple(caches)

    def layer_inputs(self) -> dict[str, jax.Array]:
        """Inputs ``[L, ...]`` of which each layer's mixer gets its own, by the name under which it
        ``takes`` them; a family that has some computes them here."""
        return {}

    def room(self, cache) -> jax.Array | None:
        """Tokens ``[B]`` of the current document that still fit, None if nothing limits them."""
        rooms = [
            room
            for block, entry in zip(self.layers, cache, strict=True)
            for room in block.room(entry.layers if isinstance(entry, Stacked) else entry)
        ]
        limits = [room.reshape(-1, room.shape[-1]).min(axis=0) for room in rooms]
        return jnp.min(jnp.stack(limits), axis=0) if limits else None

    def _single(self, index, x, shared, cache, inputs, call):
        def apply(state, x, shared, cache, inputs, call):
            return nnx.merge(graphdef, state)(x, shared, cache=cache, inputs=inputs, **call)

        graphdef, state = nnx.split(self.layers[index])
        return self._rematerialised(apply)(state, x, shared, cache, inputs, call)

    def _scan(self, group, x, shared, caches, inputs, call):
        graphdefs, states = zip(*map(nnx.split, self.layers[group]), strict=True)

        def body(carry, layer):
            (x, shared), seen, after = carry, [], []
            for graphdef, state, cache, own in zip(graphdefs, *layer, strict=True):
                seen.append(x)
                block = nnx.merge(graphdef, state)
                x, shared, cache = block(x, shared, cache=cache, inputs=own, **call)
                after.append(cache)
            return (x, shared), (after, seen)

        caches = [None if cache is None else cache.layers for cache in caches]
        layers = (list(states), caches, inputs)
        (x, shared), (after, seen) = lax.scan(self._rematerialised(body), (x, shared), layers)
        seen = [each[i] for i in range(self.run.repeats) for each in seen]
        after = [None if cache is None else Stacked(cache) for cache in after]
        return x, shared, after, seen

    def _rematerialised(self, function):
        if not self.remat:
            return function
        return jax.checkpoint(function, policy=None if self.remat is True else self.remat)


def _rows(inputs, layer_ids) -> dict[str, jax.Array]:
    """A block's inputs: one layer's, or stacked as its layers are."""
    at = layer_ids[0] if len(layer_ids) == 1 else np.array(layer_ids)
    return {name: value[at] for name, value in inputs.items()}


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
    if not hasattr(input_ids, "dtype"):
        raise TypeError(f"input_ids must be an array of integers, got {type(input_ids).__name__}")
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
