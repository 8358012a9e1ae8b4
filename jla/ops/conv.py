"""Causal depthwise convolution over real tokens, the short convolution of linear mixers."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jla.kernels import limits
from jla.kernels.sharding import per_device
from jla.ops import segments
from jla.ops.dispatch import Choice, select

ACTIVATIONS = {None: lambda x: x, "silu": jax.nn.silu, "swish": jax.nn.silu}


def causal_conv1d(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    state_positions: jax.Array | None = None,
    impl: str = "auto",
) -> tuple[Any, ...]:
    """Each channel is filtered by its own taps, over the last W real tokens of its document.

    ``y_t = act(sum_i kernel[i] * x_{t-W+1+i} + bias)``, the last tap meets the current token. Taps
    that reach before a document's start read zeros, padding is skipped. Sums are in float32.

    Args:
        x: ``[B, T, D]``.
        kernel: ``[W, D]``.
        bias: ``[D]`` or None.
        activation: None, ``"silu"`` or ``"swish"`` (the same).
        segment_ids: int ``[B, T]``, see :mod:`jla.ops.segments`.
        initial_state: ``[B, W-1, D]``, the last inputs of the row's first document, oldest first,
            zeros where it is shorter; zeros if None.
        output_final_state: also return the window after the row's last real token.
        state_positions: int ``[B, S]``: also return the windows after these tokens of the row.
        impl: ``"auto"``, ``"reference"`` or ``"mosaic"`` (Hopper kernel).

    Returns:
        ``y [B, T, D]`` in x's dtype, 0 at padding, and the window ``[B, W-1, D]`` in x's dtype (or
        None); with ``state_positions`` also the windows ``[B, S, W-1, D]``.

    Raises:
        ValueError: shapes that disagree, or an unknown activation.
        ImplUnavailable: the named impl cannot run this call.
    """
    _check(x, kernel, bias, activation, initial_state)
    if segment_ids is not None:
        segment_ids = segments.check_segment_ids(segment_ids, x.shape[:2], x)
    if initial_state is not None:
        initial_state = initial_state.astype(x.dtype)
    run = _on_hopper if choose(x, kernel, impl=impl).impl == "mosaic" else _convolve
    y = run(x, kernel, bias, segment_ids, initial_state, activation=activation)
    before = _or_zeros(initial_state, x, kernel)
    final = _final_window(x, before, segment_ids) if output_final_state else None
    if state_positions is None:
        return y, final
    return y, final, _windows(x, before, segment_ids, state_positions)


def choose(x, kernel, *_, impl: str = "auto", **__) -> Choice:
    """Which implementation a call runs; decided from static facts only."""
    offers = {"reference": None, "mosaic": limits.short_conv(x, kernel)}
    # A step of decoding is too small for a kernel of its own.
    order = ("mosaic", "reference") if x.shape[1] >= 128 else ("reference",)
    return select("causal_conv1d", impl, offers, order)


# Compiled as one, so that calls outside of jit do not run operation by operation.
@partial(jax.jit, static_argnames="activation")
def _on_hopper(x, kernel, bias, segment_ids, state, *, activation):
    from jla.kernels import short_conv as kernels

    def run(x, kernel, bias, state, ids):
        rest = dict(segment_ids=ids, initial_state=state)
        return kernels.short_conv(x, kernel, bias, silu=activation is not None, **rest)

    return per_device(run, kernels.FORWARD, 0, x, kernel, bias, state, segment_ids)


@partial(jax.jit, static_argnames="activation")
def _convolve(x, kernel, bias, segment_ids, state, *, activation):
    length, width = x.shape[1], kernel.shape[0]
    state = _or_zeros(state, x, kernel)
    if segment_ids is not None:
        x = jnp.where((segment_ids != 0)[..., None], x, 0)
    window = jnp.concatenate([state, x], axis=1)
    if segment_ids is None:
        taps = [window[:, i : i + length] for i in range(width)]
    else:
        taps = _packed_taps(window, segment_ids, width)
    filters = kernel.astype(jnp.float32)
    y = sum(tap.astype(jnp.float32) * filters[i] for i, tap in enumerate(taps))
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    y = ACTIVATIONS[activation](y).astype(x.dtype)
    if segment_ids is not None:
        y = jnp.where((segment_ids != 0)[..., None], y, 0)
    return y


def _or_zeros(state, x, kernel):
    """The initial state, zeros if None."""
    past = kernel.shape[0] - 1
    return jnp.zeros_like(x[:, :1]).repeat(past, axis=1) if state is None else state


def token_shift(
    x: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    state_positions: jax.Array | None = None,
) -> tuple[Any, ...]:
    """``x_{t-1} - x_t``: from each token to the real one before it in its document, 0 at its start.

    A window of two tokens, else as :func:`causal_conv1d` (FLA's ``token_shift``).

    Args:
        x: ``[B, T, D]``.
        segment_ids: int ``[B, T]``, see :mod:`jla.ops.segments`.
        initial_state: ``[B, D]``, the token before the row's first; zeros if None.
        output_final_state: also return the row's last real token.
        state_positions: int ``[B, S]``: also return the last real tokens up to these.

    Returns:
        ``[B, T, D]`` and the last token ``[B, D]`` (or None), both in x's dtype; with
        ``state_positions`` also the tokens ``[B, S, D]``. At padding the difference means nothing.

    Raises:
        ValueError: shapes that disagree.
    """
    if x.ndim != 3:
        raise ValueError(f"x must be [B, T, D], got shape {x.shape}")
    expected = (x.shape[0], x.shape[2])
    if initial_state is not None and initial_state.shape != expected:
        raise ValueError(f"initial_state must be {expected}, got shape {initial_state.shape}")
    if segment_ids is not None:
        segment_ids = segments.check_segment_ids(segment_ids, x.shape[:2], x)
    if initial_state is None:
        initial_state = jnp.zeros_like(x[:, 0])
    first = initial_state[:, None].astype(x.dtype)
    difference = _token_shift(x, segment_ids, first)
    last = _final_window(x, first, segment_ids)[:, 0] if output_final_state else None
    if state_positions is None:
        return difference, last
    return difference, last, _windows(x, first, segment_ids, state_positions)[:, :, 0]


@jax.jit
def _token_shift(x, segment_ids, first):
    if segment_ids is None:
        return jnp.concatenate([first, x[:, :-1]], axis=1) - x
    x = jnp.where((segment_ids != 0)[..., None], x, 0)
    before, _ = _packed_taps(jnp.concatenate([first, x], axis=1), segment_ids, 2)
    return before - x


def _check(x, kernel, bias, activation, initial_state):
    if x.ndim != 3:
        raise ValueError(f"x must be [B, T, D], got shape {x.shape}")
    if kernel.ndim != 2 or kernel.shape[1] != x.shape[2]:
        raise ValueError(f"kernel must be [W, D] with D={x.shape[2]}, got shape {kernel.shape}")
    if bias is not None and bias.shape != x.shape[2:]:
        raise ValueError(f"bias must be [D] with D={x.shape[2]}, got shape {bias.shape}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {list(ACTIVATIONS)}, got {activation!r}")
    expected = (x.shape[0], kernel.shape[0] - 1, x.shape[2])
    if initial_state is not None and initial_state.shape != expected:
        raise ValueError(f"initial_state must be {expected}, got shape {initial_state.shape}")


def _packed_taps(window, segment_ids, width):
    """The W tap inputs ``[B, T, D]`` of a packed row, oldest first."""
    past = width - 1
    ids = _with_past(segment_ids, past)
    back, ahead = segments.previous_real(ids), segments.next_real(ids)
    position = segments.document_positions(ids)
    taps, shifted = [window], window
    for _ in range(past):
        shifted = _shift(shifted, back, ahead, position)
        taps.append(shifted)
    return [tap[:, past:] for tap in reversed(taps)]


def _with_past(segment_ids, past):
    """Ids of the row with its window in front: real tokens of the row's first document."""
    first = jnp.argmax(segment_ids != 0, axis=1)[:, None]
    opening = jnp.maximum(segments.take_time(segment_ids, first), 1)
    return jnp.concatenate([jnp.repeat(opening, past, axis=1), segment_ids], axis=1)


@jax.jit
def _final_window(x, state, segment_ids):
    """The last W - 1 real tokens of the last document, zeros where it is shorter."""
    length, past = x.shape[1], state.shape[1]
    if segment_ids is None:
        recent = x[:, max(0, length - past) :]
        return jnp.concatenate([state[:, min(length, past) :], recent], axis=1)
    end = jnp.full_like(segment_ids[:, :1], length - 1)
    return _windows(x, state, segment_ids, end)[:, 0]


@jax.jit
def _windows(x, state, segment_ids, positions):
    """The last W - 1 real tokens up to ``positions [B, S]``, each document's own."""
    past = state.shape[1]
    if not past:
        return state[:, None].repeat(positions.shape[1], axis=1)
    if segment_ids is None:
        segment_ids = jnp.ones_like(x[..., 0], jnp.int32)
    ids = _with_past(segment_ids, past)
    back, position = segments.previous_real(ids), segments.document_positions(ids)
    index = segments.last_real(jnp.clip(positions, 0, x.shape[1] - 1) + past, ids)
    rows, inside = [], jnp.ones_like(index, bool)
    for _ in range(past):
        row = jnp.where(
            (index < past)[..., None],
            segments.take_time(state, index),
            segments.take_time(x, index - past),
        )
        rows.insert(0, jnp.where(inside[..., None], row, 0))
        inside = inside & (segments.take_time(position, index) > 0)
        index = segments.take_time(back, index)
    return jnp.stack(rows, axis=2)


@jax.custom_vjp
def _shift(x, back, ahead, position):
    """``x`` one real token earlier in the same document, 0 at its start and at padding's reach."""
    return jnp.where((position > 0)[..., None], segments.take_time(x, back), 0)


def _shift_fwd(x, back, ahead, position):
    return _shift(x, back, ahead, position), (back, ahead, position)


def _shift_bwd(saved, dy):
    # The transpose of a gather is a scatter; here each token has one successor, so it gathers too.
    _, ahead, position = saved
    follows = (ahead < position.shape[1]) & (segments.take_time(position, ahead) > 0)
    return jnp.where(follows[..., None], segments.take_time(dy, ahead), 0), None, None, None


_shift.defvjp(_shift_fwd, _shift_bwd)
