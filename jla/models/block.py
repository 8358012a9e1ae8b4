"""The block that every decoder stacks: sub-layers, each behind a norm and on a residual."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
from flax import nnx

from jla.layers import TokenMixer
from jla.models.config import Config
from jla.nn import GatedMLP, RMSNorm, init
from jla.ops.residual import mix_residuals


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
    """A mixer and an MLP, each behind a norm and on a residual.

        x = x + attn(attn_norm(x));  x = x + mlp(mlp_norm(x))

    With ``attnres_block_size`` a sub-layer reads a learned mix of earlier sums instead of ``x``
    (see :func:`jla.ops.residual.mix_residuals`): sums of finished blocks of sub-layers, and the
    running one. Where the config asks for ``norm_first``, layer 0 normalises its input.

    A family with other sub-layers subclasses this and says which. An MLP may be a mixer too: it
    then has a cache.

    Attributes:
        sublayers: names of the sub-layers; the norm of each is ``{name}_norm``.
        checkpoint_names: attribute -> its name in checkpoints, where a family spells it otherwise.
    """

    sublayers: ClassVar[tuple[str, ...]] = ("attn", "mlp")
    checkpoint_names: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: Config, layer_idx: int, mixer: TokenMixer, settings: Settings, rngs):
        self.layer_ids = (layer_idx,)
        # By way of the class: `nnx.tabulate` leaves a class's static methods behind as plain ones.
        kind = type(self)
        norm = partial(kind.make_norm, config, settings.param_dtype)
        self.attn_norm, self.attn = norm(), mixer
        if "mlp" in self.sublayers:
            self.mlp_norm = norm()
            self.mlp = kind.make_mlp(config, layer_idx, **settings.options(rngs))
        in_front = layer_idx == 0 and getattr(config, "norm_first", False)
        self.pre_norm = norm() if in_front else None
        size = config.attnres_block_size
        self.openers: tuple[str, ...] | None = None
        if size is not None:
            order = enumerate(self.sublayers, len(self.sublayers) * layer_idx)
            self.openers = tuple(name for i, name in order if i % size == 0)
            for name in self.sublayers:
                setattr(self, f"{name}_res_proj", residual_query(config, settings, rngs))
                setattr(self, f"{name}_res_norm", rms_norm(config, settings.param_dtype))

    @staticmethod
    def make_mlp(config: Config, layer_idx: int, **options) -> nnx.Module:
        """The MLP of a layer."""
        return GatedMLP(
            config.hidden_size,
            config.hidden_ratio,
            config.intermediate_size,
            config.hidden_act,
            config.fuse_swiglu,
            **options,
        )

    @staticmethod
    def make_norm(config: Config, param_dtype) -> nnx.Module:
        """A norm of the family, the one behind the last block too."""
        return rms_norm(config, param_dtype)

    def __call__(self, x, shared, *, segment_ids, positions, cache, ends, inputs):
        """``x [B, T, D]``, what earlier layers share and this block's cache, to the three after it.

        ``shared`` is a dict: ``sums`` of the attention residuals, and what mixers hand on (see
        :class:`jla.layers.TokenMixer`). ``inputs`` are this layer's of
        :meth:`jla.models.decoder.Decoder.layer_inputs`.
        """
        x = x if self.pre_norm is None else self.pre_norm(x)
        after = {}
        for name in self.sublayers:
            h, x, shared = self._enter(name, x, shared)
            h, sublayer = getattr(self, f"{name}_norm")(h), getattr(self, name)
            if isinstance(sublayer, TokenMixer):
                own = None if cache is None else cache[name]
                call: dict[str, Any] = dict(
                    segment_ids=segment_ids, positions=positions, shared=shared
                )
                call |= {name: inputs[name] for name in sublayer.takes & inputs.keys()}
                y, *kept, shared = sublayer(h, cache=own, ends=ends, **call)
                if kept:
                    after[name] = kept[0]
            else:
                y = sublayer(h)
            x = y if x is None else x + y
        return x, shared, None if cache is None else after

    def new_cache(self, batch_size: int, max_length: int | None, dtype) -> dict[str, Any]:
        """The cache of every mixer of the block, by its name."""
        return {
            name: mixer.new_cache(batch_size, max_length, dtype=dtype)
            for name, mixer in self._mixers()
        }

    def room(self, cache) -> list[jax.Array]:
        """Tokens ``[..., B]`` that still fit, of each mixer whose cache can fill up."""
        rooms = [mixer.room(cache[name]) for name, mixer in self._mixers()]
        return [room for room in rooms if room is not None]

    def _mixers(self) -> Iterator[tuple[str, TokenMixer]]:
        for name in self.sublayers:
            if isinstance(getattr(self, name), TokenMixer):
                yield name, getattr(self, name)

    def _enter(self, name, x, shared):
        """What a sub-layer reads, and the running sum and shared values it goes on with."""
        if self.openers is None:
            return x, x, shared
        sums = shared.get("sums", ())
        proj, norm = getattr(self, f"{name}_res_proj"), getattr(self, f"{name}_res_norm")
        mixed = read_residuals(x, sums, proj, norm)
        if name not in self.openers:
            return mixed, x, shared
        return mixed, None, {**shared, "sums": (*sums, x)}


class MixerBlock(Block):
    """A mixer alone: ``x + attn(attn_norm(x))``, the layer of the Mamba models."""

    sublayers = ("attn",)
    checkpoint_names = {"attn_norm": "norm", "attn": "mixer"}  # noqa: RUF012


def rms_norm(config: Config, param_dtype) -> RMSNorm:
    """The norm of most families."""
    return RMSNorm(config.hidden_size, eps=config.norm_eps, param_dtype=param_dtype)


def residual_query(config: Config, settings: Settings, rngs: nnx.Rngs) -> nnx.Linear:
    """The query of an attention residual; zero at first, so that all sources weigh the same."""
    zeros = nnx.initializers.zeros_init()
    return init.linear(None, settings.param_dtype, None, zeros, rngs)(config.hidden_size, 1)


def read_residuals(x, sums, proj: nnx.Linear, norm: RMSNorm) -> jax.Array:
    """The mix of finished sums and the running one that a sub-layer reads."""
    assert norm.scale is not None
    return mix_residuals(proj.kernel[...][:, 0], [*sums, x], norm.scale[...], eps=norm.eps)
