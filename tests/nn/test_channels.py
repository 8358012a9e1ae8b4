"""Output channels in parts: what a projection cut into parts gives, against the whole one."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import assert_trees_close, random

from jla.nn import ShortConvolution, channels

SIZES = (16, 16, 3)


class Scaled(nnx.Linear):
    """A projection with a way of its own, which parts of its kernel would miss."""

    def __call__(self, x):
        return 2 * super().__call__(x)


@pytest.mark.parametrize("kind", [nnx.Linear, Scaled])
@pytest.mark.parametrize("alone", [False, True], ids=["many devices", "one device"])
@pytest.mark.parametrize("tokens", [1, channels.LONG - 1, channels.LONG, channels.LONG + 1])
def test_parts_are_those_of_the_whole(kind, alone, tokens, monkeypatch):
    monkeypatch.setattr(channels, "alone", lambda: alone)
    linear = kind(8, sum(SIZES), rngs=nnx.Rngs(0))
    linear.bias[...] = random(1, (sum(SIZES),))
    graphdef, state = nnx.split(linear)

    def whole(linear, x):
        return jnp.split(linear(x), (16, 32), axis=-1)

    def cut(linear, x):
        return channels.project(linear, x, SIZES)

    def with_gradients(call):
        def loss(state, x):
            parts = call(nnx.merge(graphdef, state), x)
            return sum(i * jnp.sum(part**2) for i, part in enumerate(parts, 1)), parts

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(state, random(2, (1, tokens, 8)))

    assert_trees_close(with_gradients(cut), with_gradients(whole))


def test_long_rows_meet_the_kernel_part_by_part(monkeypatch):
    linear, x = nnx.Linear(8, sum(SIZES), rngs=nnx.Rngs(0)), random(0, (1, channels.LONG, 8))

    def products(alone):
        monkeypatch.setattr(channels, "alone", lambda: alone)
        program = jax.make_jaxpr(lambda x: channels.project(linear, x, SIZES))(x)
        dots = [each for each in program.eqns if each.primitive.name == "dot_general"]
        return [each.outvars[0].aval.shape for each in dots]

    wide, narrow = (1, channels.LONG, 16), (1, channels.LONG, 3)
    assert products(alone=False) == [wide, wide, narrow]
    assert products(alone=True) == [wide, wide, (2, channels.LONG // 2, 3)]


def test_a_convolution_s_channels():
    conv, x = ShortConvolution(8, 3, bias=True, rngs=nnx.Rngs(0)), random(0, (2, 10, 8))
    conv.bias[...] = random(1, (8,))
    part = channels.only(conv, 2, 6)
    assert_trees_close(part(x[..., 2:6])[0], conv(x)[0][..., 2:6])
