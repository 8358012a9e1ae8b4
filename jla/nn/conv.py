"""The short causal convolution in front of linear mixers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jla.nn import init
from jla.ops.conv import ACTIVATIONS, causal_conv1d


class ShortConvolution(nnx.Module):
    """Depthwise causal convolution over the last ``kernel_size`` real tokens of a document.

    FLA's ``ShortConvolution``; the window it carries holds ``W - 1`` inputs, where FLA's holds W
    and never reads the oldest.

    Args:
        hidden_size: channels D.
        kernel_size: taps W.
        bias: add a learned bias per channel.
        activation: None, ``"silu"`` or ``"swish"`` (the same).
        param_dtype: dtype of ``kernel [W, D]`` and ``bias [D]``.
        kernel_init: initialiser of the kernel; torch's default if None.
        bias_init: initialiser of the bias; zeros if None.
        rngs: ``params`` stream.

    Raises:
        ValueError: ``kernel_size`` below 1 or unknown activation.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        *,
        param_dtype=jnp.float32,
        kernel_init: init.Initializer | None = None,
        bias_init: init.Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        if kernel_size < 1:
            raise ValueError(f"kernel_size must be at least 1, got {kernel_size}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {list(ACTIVATIONS)}, got {activation!r}")
        self.hidden_size, self.kernel_size, self.activation = hidden_size, kernel_size, activation
        kernel_init = kernel_init or init.torch_depthwise
        self.kernel = nnx.Param(kernel_init(rngs.params(), (kernel_size, hidden_size), param_dtype))
        bias_init = bias_init or nnx.initializers.zeros_init()
        shape = (hidden_size,)
        self.bias = nnx.Param(bias_init(rngs.params(), shape, param_dtype)) if bias else None

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        window: jax.Array | None = None,
        state_positions: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """``[B, T, D]`` and the window ``[B, W-1, D]`` before it to output and new window.

        The new window is None where none was given, else in the given one's dtype; with
        ``state_positions`` int ``[B, S]`` it is the windows ``[B, S, W-1, D]`` after these tokens.
        """
        y, *after = causal_conv1d(
            x,
            self.kernel[...],
            None if self.bias is None else self.bias[...],
            activation=self.activation,
            segment_ids=segment_ids,
            initial_state=window,
            output_final_state=window is not None,
            state_positions=state_positions,
        )
        return y, None if window is None else after[-1].astype(window.dtype)

    def new_window(self, batch_size: int, dtype) -> jax.Array:
        """The window before any token: zeros ``[B, W-1, D]``."""
        return jnp.zeros((batch_size, self.kernel_size - 1, self.hidden_size), dtype)


def short_convolution(
    kernel_size: int, bias: bool, param_dtype, kernel_init: init.Initializer | None, rngs: nnx.Rngs
) -> Callable[..., ShortConvolution]:
    """:class:`ShortConvolution` with a mixer's settings filled in: call it with the channels."""
    settings = dict(param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs)
    return partial(ShortConvolution, kernel_size=kernel_size, bias=bias, **settings)


Streams = Mapping[str, jax.Array]


def convolve(
    convs: Mapping[str, ShortConvolution],
    streams: Streams,
    *,
    segment_ids: jax.Array | None = None,
    windows: Streams | None = None,
    state_positions: jax.Array | None = None,
) -> tuple[dict[str, jax.Array], dict[str, jax.Array] | None]:
    """Each named stream ``[B, T, D]`` through its own convolution.

    Returns:
        The filtered streams and, where ``windows`` are given, the windows after them, or after
        chosen tokens (see :class:`ShortConvolution`).
    """
    call: dict[str, Any] = dict(segment_ids=segment_ids, state_positions=state_positions)
    y, after = {}, {}
    for name, conv in convs.items():
        window = None if windows is None else windows[name]
        y[name], after[name] = conv(streams[name], window=window, **call)
    return y, None if windows is None else after


def new_windows(convs: Mapping[str, ShortConvolution], batch_size: int, dtype) -> Streams:
    """The window of each convolution before any token."""
    return {name: conv.new_window(batch_size, dtype) for name, conv in convs.items()}
