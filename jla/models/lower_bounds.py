"""A stack whose layers share one table of lower bounds, for the HGRN families."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jla.models.decoder import Decoder
from jla.nn.lower_bound import lower_bounds


class BoundedDecoder(Decoder):
    """A decoder whose mixers take a ``lower_bound`` of their forget gates, rising with the depth.

    ``lower_bounds [L, D]`` are parameters where the config asks for ``use_lower_bound``; layers of
    softmax attention in a hybrid have rows that nothing reads. Arguments are those of
    :class:`jla.models.decoder.Decoder`.
    """

    def __init__(self, config: Any, *, param_dtype=jnp.float32, rngs: nnx.Rngs, **options):
        super().__init__(config, param_dtype=param_dtype, rngs=rngs, **options)
        if config.use_lower_bound:
            shape = (config.num_hidden_layers, type(self).gate_width(config))
            self.lower_bounds = nnx.Param(jnp.zeros(shape, param_dtype))

    @staticmethod
    def gate_width(config: Any) -> int:
        """Channels of a layer's forget gate."""
        return config.hidden_size

    def layer_inputs(self) -> dict[str, jax.Array]:
        """See :meth:`Decoder.layer_inputs`."""
        if not self.config.use_lower_bound:
            return {}
        return {"lower_bound": lower_bounds(self.lower_bounds[...])}
