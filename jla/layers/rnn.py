"""A mixer as the cell of ``flax.nnx.RNN``."""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import nnx

from jla.layers.mixer import TokenMixer


class MixerCell(nnx.RNNCellBase):
    """One step of a mixer: ``nnx.RNN(MixerCell(mixer))(x)`` is ``mixer(x)``.

    Made for code that is written against cells, and for the options of ``nnx.RNN``
    (``seq_lengths``, ``reverse``, ``time_major``). The mixer itself reads a whole sequence at once,
    which is faster by far.

    Args:
        mixer: any mixer.
        max_length: tokens that the carry must hold; only softmax attention needs it.

    Example:
        >>> mixer = jla.layers.GatedDeltaNet(8, num_heads=1, head_dim=4, rngs=nnx.Rngs(0))
        >>> nnx.RNN(jla.layers.MixerCell(mixer))(jnp.ones((2, 5, 8))).shape
        (2, 5, 8)
    """

    def __init__(self, mixer: TokenMixer, max_length: int | None = None):
        self.mixer, self.max_length = mixer, max_length

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        carry_init: Any = None,
    ) -> Any:
        """The mixer's cache before any token.

        Args:
            input_shape: ``(*batch, D)`` of the input of one step.
            rngs: not used: nothing is drawn.
            carry_init: must be None, a mixer starts from its own empty state.

        Raises:
            ValueError: another size than the mixer's, or a ``carry_init``.
        """
        if carry_init is not None:
            raise ValueError("carry_init must be None: a mixer starts from its own empty state")
        *batch, size = input_shape
        if size != self.mixer.hidden_size:
            raise ValueError(
                f"inputs must be [..., {self.mixer.hidden_size}], got shape {tuple(input_shape)}"
            )
        return self.mixer.new_cache(math.prod(batch), self.max_length)

    def __call__(self, carry: Any, inputs: jax.Array) -> tuple[Any, jax.Array]:
        """One token: the cache and ``[*batch, D]`` to the cache behind it and ``[*batch, D]``."""
        y, carry = self.mixer(inputs[..., None, :], cache=carry)
        return carry, y[..., 0, :]

    @property
    def num_feature_axes(self) -> int:
        """Only the last axis holds features."""
        return 1
