"""A mixer as the cell of ``nnx.RNN`` gives what the mixer gives."""

import cases
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import assert_close, assert_trees_close, random

from jla.layers import MixerCell

LENGTH = 9


def cell_of(row):
    mixer = cases.build(row)
    return mixer, MixerCell(mixer, max_length=LENGTH)


@cases.rows("rnn", sample=True)
def test_the_cell_is_the_mixer(row):
    """Outputs, and the carry behind them."""
    mixer, cell = cell_of(row)
    x = random(0, (2, LENGTH, mixer.hidden_size))

    @nnx.jit
    def both(cell):
        cache = cell.mixer.new_cache(2, LENGTH)
        return nnx.RNN(cell, return_carry=True)(x), cell.mixer(x, cache=cache)

    (carry, y), (y_once, cache) = both(cell)
    assert_close(y, y_once)
    assert_trees_close(carry, cache)


@pytest.mark.slow
def test_gradients():
    mixer, cell = cell_of("gdn")
    x = random(0, (2, LENGTH, mixer.hidden_size))
    weights = random(1, x.shape)

    @nnx.jit
    def both(cell):
        through = nnx.grad(lambda cell: jnp.sum(nnx.RNN(cell)(x) * weights))(cell)
        return through, nnx.grad(lambda cell: jnp.sum(cell.mixer(x) * weights))(cell)

    assert_trees_close(*map(nnx.to_pure_dict, both(cell)))


def test_options_of_rnn():
    mixer, cell = cell_of("gdn")
    x = random(0, (2, LENGTH, mixer.hidden_size))
    lengths = jnp.array([4, LENGTH])
    real = (jnp.arange(LENGTH) < lengths[:, None]).astype(jnp.int32)

    @nnx.jit
    def found(cell):
        run, carry = nnx.RNN(cell), nnx.RNN(cell, return_carry=True)
        half, first = carry(x[:, :5])
        return {
            "reverse": run(x, reverse=True, keep_order=True),
            "time_major": run(x.swapaxes(0, 1), time_major=True).swapaxes(0, 1),
            "batch axes": run(x[:, None])[:, 0],
            "no batch axis": run(x[0])[None],
            "pieces": jnp.concatenate([first, run(x[:, 5:], initial_carry=half)], axis=1),
            "lengths": carry(x, seq_lengths=lengths)[0],
        }

    @nnx.jit
    def expected(mixer):
        y = mixer(x)
        return {
            "reverse": jnp.flip(mixer(jnp.flip(x, axis=1)), axis=1),
            "time_major": y,
            "batch axes": y,
            "no batch axis": y[:1],
            "pieces": y,
            "lengths": mixer(x, segment_ids=real, cache=mixer.new_cache(2))[1],
        }

    assert_trees_close(found(cell), expected(mixer))


def test_bad_calls():
    mixer, cell = cell_of("gdn")
    with pytest.raises(
        ValueError, match=rf"inputs must be \[..., {mixer.hidden_size}\], got shape"
    ):
        nnx.RNN(cell)(jnp.ones((2, 3, mixer.hidden_size + 1)))
    with pytest.raises(ValueError, match="carry_init must be None"):
        cell.initialize_carry((2, mixer.hidden_size), carry_init=jax.nn.initializers.zeros)
