"""The causal convolution against a loop over the document's own inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close, random

from jla.ops import causal_conv1d, token_shift
from ops import oracle

D = 5


def packed(length):
    first = np.repeat([0, 1, 0, 1, 3, 0], [1, 2, 1, 2, 1, 2])
    second = np.repeat([2, 1, 2], [1, 1, 7])
    return np.resize(np.stack([first, second]), (2, 9))[:, :length].astype(np.int32)


def inputs(width, length=9):
    return {
        "x": random(0, (2, length, D)),
        "kernel": random(1, (width, D)),
        "bias": random(2, (D,)),
        "initial_state": random(3, (2, width - 1, D)),
    }


def run(args, weights, segment_ids, activation=None):
    def loss(args):
        y, window = causal_conv1d(
            **args, segment_ids=segment_ids, activation=activation, output_final_state=True
        )
        return jnp.sum(y * weights[0]) + jnp.sum(window * weights[1]), (y, window)

    grads, out = jax.grad(loss, has_aux=True)(args)
    return *out, grads


conv = jax.jit(causal_conv1d, static_argnames=("activation", "output_final_state"))
compiled = jax.jit(run, static_argnames="activation")


@pytest.mark.parametrize("ids", [None, "ones", "packed", "padding"])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_outputs_windows_and_gradients(width, ids):
    """Outputs by the loop; gradients by the loop's own linearity in x, taps and window."""
    args = inputs(width)
    segment_ids = {
        None: None,
        "ones": np.ones((2, 9), np.int32),
        "packed": packed(9),
        "padding": np.zeros((2, 9), np.int32),
    }[ids]
    shown = np.ones((2, 9)) if segment_ids is None else segment_ids
    weights = random(4, (2, 9, D)), random(5, (2, width - 1, D))
    y, window, grads = compiled(args, weights, segment_ids)
    loop = functools.partial(oracle.causal_conv1d, segment_ids=shown)
    want_y, want_window = loop(args["x"], args["kernel"], args["bias"], args["initial_state"])
    assert_close(y, np.where((shown != 0)[..., None], want_y, 0))
    assert_close(window, want_window)
    for name in args:
        step = random(6, args[name].shape, scale=0.5)
        moved = dict(args, **{name: args[name].astype(np.float64) + step})
        after_y, after_window = loop(
            moved["x"], moved["kernel"], moved["bias"], moved["initial_state"]
        )
        real = (shown != 0)[..., None]
        change = np.sum((after_y - want_y) * weights[0] * real)
        change += np.sum((after_window - want_window) * weights[1])
        slope = np.sum(np.asarray(grads[name], np.float64) * step)
        assert_close(slope, change, dtype="float32", what=name)


def test_golden_numbers():
    """G5: taps over two documents of three tokens."""
    x = np.arange(1.0, 7.0, dtype=np.float32)[None, :, None]
    taps = np.array([[0.1], [0.2], [0.7]], np.float32)
    y, _ = conv(x, taps, segment_ids=np.array([[1, 1, 1, 2, 2, 2]]))
    assert_close(y[0, :, 0], [0.7, 1.6, 2.6, 2.8, 4.3, 5.6])


@pytest.mark.parametrize("activation", ["silu", "swish"])
def test_activation(activation):
    args = inputs(3)
    plain, _ = conv(**args)
    y, window = conv(**args, activation=activation)
    assert_close(y, jax.nn.silu(plain))
    assert window is None


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_rows_shorter_than_the_window(length):
    args = inputs(4, length)
    ids = packed(length)
    y, window = conv(**args, segment_ids=ids, output_final_state=True)
    want_y, want = oracle.causal_conv1d(
        args["x"], args["kernel"], args["bias"], args["initial_state"], ids
    )
    assert_close(y, np.where((ids != 0)[..., None], want_y, 0))
    assert_close(window, want)


def test_dtypes_and_narrow_sums():
    args = {name: jnp.asarray(x, jnp.bfloat16) for name, x in inputs(4).items()}
    y, window = conv(**args, output_final_state=True)
    assert y.dtype == window.dtype == jnp.bfloat16
    wide, _ = conv(**{name: x.astype(jnp.float32) for name, x in args.items()})
    # Summed in float32, rounded once: within half a unit in the last place, entry by entry.
    assert np.all(np.abs(np.asarray(y, np.float32) - wide) <= np.abs(wide) * 2**-8 + 1e-6)


def test_pieces_are_one_row():
    args = inputs(4)
    ids = packed(9)
    want = conv(**args, segment_ids=ids, output_final_state=True)
    for split in ([1] * 9, [2, 7], [5, 1, 3]):
        window, ys, at = args["initial_state"], [], 0
        for n in split:
            part = dict(args, x=args["x"][:, at : at + n], initial_state=window)
            # Ids that the window belongs to are told by the caller: here no piece starts anew.
            before = ids[:, :at]
            piece = ids[:, at : at + n]
            for row in range(2):
                seen, first = before[row][before[row] != 0], piece[row][piece[row] != 0]
                if len(seen) and len(first) and seen[-1] != first[0]:
                    window = np.asarray(window).copy()
                    window[row] = 0
            part["initial_state"] = window
            y, window = conv(**part, segment_ids=piece, output_final_state=True)
            ys.append(y)
            at += n
        assert_trees_close((np.concatenate(ys, axis=1), window), want, what=str(split))


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("ids", [None, "packed"])
def test_windows_after_chosen_tokens(width, ids):
    """They are the last ones of the row cut behind the token, a padding one too."""
    args, at = inputs(width), np.array([[0, 2, 3, 8], [0, 1, 4, 7]])
    segment_ids = None if ids is None else packed(9)
    shown = np.ones((2, 9), np.int32) if ids is None else segment_ids
    _, none, windows = conv(**args, segment_ids=segment_ids, state_positions=at)
    assert none is None and windows.shape == (2, 4, width - 1, D)
    last = args["initial_state"][:, -1] if width > 1 else None
    *_, tokens = token_shift(
        args["x"], segment_ids=segment_ids, initial_state=last, state_positions=at
    )
    for row, column in np.ndindex(at.shape):
        cut = np.where(np.arange(9) <= at[row, column], shown, 0)
        _, window = conv(**args, segment_ids=cut, output_final_state=True)
        assert_close(windows[row, column], window[row], what=f"{row}, {column}")
        _, token = token_shift(
            args["x"], segment_ids=cut, initial_state=last, output_final_state=True
        )
        assert_close(tokens[row, column], token[row], what=f"{row}, {column}")


@pytest.mark.parametrize("ids", [None, "packed"])
def test_token_shift_is_a_convolution_of_two_taps(ids):
    """Outputs at real tokens, the last token and gradients; padding gets and gives nothing."""
    x, last, weights = random(0, (2, 9, D)), random(1, (2, D)), random(2, (2, 9, D))
    segment_ids = None if ids is None else packed(9)
    real = np.ones((2, 9, 1)) if ids is None else (segment_ids != 0)[..., None]
    taps = np.stack([np.ones(D), -np.ones(D)]).astype(np.float32)

    def shifted(x, last):
        y, after = token_shift(
            x, segment_ids=segment_ids, initial_state=last, output_final_state=True
        )
        return jnp.sum(y * real * weights) + jnp.sum(after * last), (y * real, after)

    def filtered(x, last):
        y, after = causal_conv1d(
            x,
            taps,
            segment_ids=segment_ids,
            initial_state=last[:, None],
            output_final_state=True,
        )
        return jnp.sum(y * weights) + jnp.sum(after[:, 0] * last), (y, after[:, 0])

    given, expected = (
        jax.jit(jax.grad(f, argnums=(0, 1), has_aux=True))(x, last) for f in (shifted, filtered)
    )
    assert_trees_close(given, expected)
    y, none = token_shift(x)
    assert none is None
    assert_close(y[:, 0], -x[:, 0])
    with pytest.raises(ValueError, match=r"initial_state must be \(2, 5\), got shape \(2, 1, 5\)"):
        token_shift(x, initial_state=last[:, None])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.ones((9, D))}, r"x must be \[B, T, D\], got shape \(9, 5\)"),
        ({"kernel": np.ones((3, 4))}, r"kernel must be \[W, D\] with D=5, got shape \(3, 4\)"),
        ({"bias": np.ones(4)}, r"bias must be \[D\] with D=5, got shape \(4,\)"),
        ({"activation": "relu"}, r"activation must be one of .*silu.* got 'relu'"),
        ({"initial_state": np.ones((2, 3, D))}, r"initial_state must be \(2, 2, 5\), got .*3, 5"),
        ({"segment_ids": np.ones((2, 8), int)}, r"segment_ids must have shape \(2, 9\).*\(2, 8\)"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**{**inputs(3), **change})
