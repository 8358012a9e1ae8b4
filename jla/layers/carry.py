"""What mixers carry from call to call: states, windows of convolutions, last tokens.

A mixer's cache is None where none is wanted. It holds ``state_positions`` besides where the caches
after chosen tokens are wanted instead of the one after the last (see
:meth:`jla.layers.TokenMixer.mix`); these functions are where that is told apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jla.layers.mixer import Cache
from jla.nn import ShortConvolution
from jla.nn.channels import only
from jla.ops import Options, token_shift


def op_options(mixer: Any, segment_ids: jax.Array | None, cache: Cache | None) -> Options:
    """What every recurrence takes besides its operands."""
    before = cache or {}
    chosen = before.get("state_positions")
    return Options(
        initial_state=before.get("recurrent_state"),
        output_final_state=cache is not None and chosen is None,
        state_positions=chosen,
        segment_ids=segment_ids,
        impl=mixer.impl,
    )


def filtered(
    convolution: ShortConvolution,
    streams: Sequence[jax.Array],
    segment_ids: jax.Array | None,
    cache: Cache | None,
) -> tuple[list[jax.Array], jax.Array | None]:
    """Neighbouring channels ``[B, T, D]``, each through its part of a mixer's only convolution,
    and the windows of all after them."""
    before = cache or {}
    window = before.get("conv_state")
    ends = itertools.accumulate(x.shape[-1] for x in streams)
    filtered, windows = [], []
    for x, end in zip(streams, ends, strict=True):
        part = slice(end - x.shape[-1], end)
        y, after = only(convolution, part.start, part.stop)(
            x,
            segment_ids=segment_ids,
            window=None if window is None else window[..., part],
            state_positions=before.get("state_positions"),
        )
        filtered.append(y)
        windows.append(after)
    return filtered, None if window is None else jnp.concatenate(windows, axis=-1)


def shifted(
    x: jax.Array, segment_ids: jax.Array | None, cache: Cache | None, name: str = "conv_state"
) -> tuple[jax.Array, jax.Array | None]:
    """:func:`jla.ops.token_shift` of ``x [B, T, D]``, and the last tokens after it; ``name`` is
    theirs in the cache."""
    before = cache or {}
    delta, *last = token_shift(
        x,
        segment_ids=segment_ids,
        initial_state=before.get(name),
        output_final_state=cache is not None,
        state_positions=before.get("state_positions"),
    )
    return delta, last[-1]


def cache_after(states: Sequence[Any], windows: Any = None) -> Cache | None:
    """The mixer's cache after a call, None where none was wanted.

    Args:
        states: what the recurrence returned behind its outputs: the final state and, where chosen
            tokens' were asked for, those.
        windows: of the same tokens, None of a mixer that has none.
    """
    if states[-1] is None:
        return None
    return {"recurrent_state": states[-1]} | ({} if windows is None else {"conv_state": windows})
