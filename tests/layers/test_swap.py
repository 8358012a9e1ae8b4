"""The Flax tutorial's transformer block with its attention swapped for a mixer, one line changed.

The block is that of Flax's miniGPT tutorial: its own attention line is the default of ``mixer``.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers import assert_close, assert_trees_close, assert_trees_equal, host_mesh, random
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jla.layers import GatedDeltaNet

VOCAB, WIDTH, HEADS, INNER, LENGTH, BATCH = 17, 16, 2, 32, 8, 4


def attention(embed_dim, num_heads, rngs):
    return nnx.MultiHeadAttention(num_heads=num_heads, in_features=embed_dim, rngs=rngs)


def swapped(embed_dim, num_heads, rngs):
    return GatedDeltaNet(embed_dim, num_heads=num_heads, head_dim=8, expand_v=1, rngs=rngs)


def causal_attention_mask(seq_len):
    return jnp.tril(jnp.ones((seq_len, seq_len)))


class TransformerBlock(nnx.Module):
    def __init__(self, embed_dim, num_heads, ff_dim, dropout_rate=0.1, *, mixer=attention, rngs):
        self.mha = mixer(embed_dim, num_heads, rngs)
        self.dropout1 = nnx.Dropout(rate=dropout_rate, rngs=rngs)
        self.layer_norm1 = nnx.LayerNorm(epsilon=1e-6, num_features=embed_dim, rngs=rngs)
        self.linear1 = nnx.Linear(in_features=embed_dim, out_features=ff_dim, rngs=rngs)
        self.linear2 = nnx.Linear(in_features=ff_dim, out_features=embed_dim, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=dropout_rate, rngs=rngs)
        self.layer_norm2 = nnx.LayerNorm(epsilon=1e-6, num_features=embed_dim, rngs=rngs)

    def __call__(self, inputs, training=False, decode=False):
        _, seq_len, _ = inputs.shape
        # Flax's own attention takes no such mask while it decodes.
        mask = None if decode else causal_attention_mask(seq_len)
        attention_output = self.mha(inputs_q=inputs, mask=mask, decode=decode)
        attention_output = self.dropout1(attention_output, deterministic=not training)
        out1 = self.layer_norm1(inputs + attention_output)
        ffn_output = self.linear1(out1)
        ffn_output = nnx.relu(ffn_output)
        ffn_output = self.linear2(ffn_output)
        ffn_output = self.dropout2(ffn_output, deterministic=not training)
        return self.layer_norm2(out1 + ffn_output)


class MiniGPT(nnx.Module):
    def __init__(self, *, mixer, dropout_rate=0.1, rngs):
        # A Linear of one-hot rows: nnx.Embed's gather has no rule for batches on Explicit axes.
        self.embed = nnx.Linear(VOCAB, WIDTH, use_bias=False, rngs=rngs)
        make = functools.partial(TransformerBlock, WIDTH, HEADS, INNER, dropout_rate, mixer=mixer)
        self.blocks = nnx.List([make(rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens, training=False, decode=False):
        x = self.embed(jax.nn.one_hot(tokens, VOCAB))
        for block in self.blocks:
            x = block(x, training=training, decode=decode)
        return self.head(x)


def tokens():
    """Rows that count, each from its own number: easy to predict."""
    return (np.arange(LENGTH)[None] * 3 + np.arange(BATCH)[:, None]) % VOCAB


def loss_of(model, batch):
    logits = model(batch[:, :-1], training=True)
    losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch[:, 1:], VOCAB))
    return losses.mean()


@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, grads)
    return loss


def train(model, batch, steps):
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return [float(train_step(model, optimizer, batch)) for _ in range(steps)]


@pytest.fixture(scope="module")
def trained():
    model = MiniGPT(mixer=swapped, rngs=nnx.Rngs(0))
    return model, train(model, jnp.asarray(tokens()), 30)


def test_it_trains(trained):
    _, losses = trained
    assert np.all(np.isfinite(losses))
    assert losses[0] > 2 and losses[-1] < 0.3 * losses[0], losses


@pytest.mark.parametrize("mixer", [attention, swapped], ids=["flax", "jla"])
def test_it_decodes_as_flax_does(mixer, trained):
    """``init_cache`` and ``decode=True``, token by token: the same calls for both."""
    model = trained[0] if mixer is swapped else MiniGPT(mixer=mixer, rngs=nnx.Rngs(0))
    batch = tokens()
    want = nnx.jit(lambda m, t: m(t))(model, batch)
    for block in model.blocks:
        block.mha.init_cache((BATCH, LENGTH, WIDTH))
    step = nnx.jit(lambda m, t: m(t, decode=True))
    got = [step(model, batch[:, t : t + 1]) for t in range(LENGTH)]
    assert_close(np.concatenate(got, axis=1), want)


def test_its_view_decodes(trained):
    model = trained[0]
    view = nnx.view(model.blocks[0], decode=True, batch_size=BATCH, max_length=LENGTH)
    x = model.embed(jax.nn.one_hot(tokens(), VOCAB))
    step = nnx.jit(lambda block, x: block(x, decode=True))
    got = [step(view, x[:, t : t + 1]) for t in range(LENGTH)]
    want = nnx.jit(lambda block, x: block(x))(model.blocks[0], x)
    assert_close(np.concatenate(got, axis=1), want)


def make_stack(mixer):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,))
    def make(rngs):
        return TransformerBlock(WIDTH, HEADS, INNER, 0.0, mixer=mixer, rngs=rngs)

    return make(nnx.Rngs(0))


def gradients(forward, stack, x):
    grad = nnx.grad(lambda stack, x: jnp.sum(forward(stack, x) ** 3))
    return nnx.to_pure_dict(nnx.state(nnx.jit(grad)(stack, x)))


@functools.cache
def unscanned_gradients():
    def loop(stack, x):
        graphdef, state = nnx.split(stack)
        for i in range(3):
            x = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[i], state))(x)  # noqa: B023
        return x

    return gradients(loop, make_stack(swapped), random(0, (BATCH, LENGTH, WIDTH)))


@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
def test_stacked_blocks_scan(remat):
    stack = make_stack(swapped)
    x = random(0, (BATCH, LENGTH, WIDTH))

    def run(stack, x):
        def layer(x, block):
            return block(x)

        layer = nnx.remat(layer) if remat else layer
        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, stack)

    assert_trees_close(gradients(run, stack, x), unscanned_gradients(), times=3)


def test_it_saves_and_trains_on_bit_for_bit(tmp_path):
    """S27: dropout keys and lists of layers survive; the next losses are the same."""
    batch = jnp.asarray(tokens())
    model = MiniGPT(mixer=swapped, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    train_step(model, optimizer, batch)
    state = nnx.state((model, optimizer))
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", nnx.to_pure_dict(key_data(state)))
        saver.wait_until_finished()
        other = MiniGPT(mixer=swapped, rngs=nnx.Rngs(9))
        other_optimizer = nnx.Optimizer(other, optax.adam(1e-2), wrt=nnx.Param)
        fresh = nnx.state((other, other_optimizer))
        restored = saver.restore(tmp_path / "state", nnx.to_pure_dict(key_data(fresh)))
    restore_into(fresh, restored)
    nnx.update((other, other_optimizer), fresh)
    assert_trees_equal(key_data(nnx.state(other)), key_data(nnx.state(model)))
    want = [float(train_step(model, optimizer, batch)) for _ in range(3)]
    assert [float(train_step(other, other_optimizer, batch)) for _ in range(3)] == want


def is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_data(state):
    """Random keys as numbers, which is how they are stored."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, state)


def restore_into(state, saved):
    for (path, variable), value in zip(
        nnx.to_flat_state(state), jax.tree.leaves(saved), strict=True
    ):
        assert variable.shape == value.shape or is_key(variable[...]), path
        variable.set_value(jax.random.wrap_key_data(value) if is_key(variable[...]) else value)


def test_it_trains_on_an_explicit_mesh(trained):
    """``jax.make_mesh``'s axes: the batch over four devices, losses as on one."""
    mesh = host_mesh({"data": BATCH}, explicit=True)
    with jax.set_mesh(mesh):
        model = MiniGPT(mixer=swapped, rngs=nnx.Rngs(0))
        batch = jax.device_put(tokens(), NamedSharding(mesh, P("data")))
        losses = train(model, batch, 5)
        logits = nnx.jit(lambda m, t: m(t))(model, batch)
        assert logits.sharding.spec[0] == "data"
        for block in model.blocks:
            block.mha.init_cache((BATCH, LENGTH, WIDTH))
        step = nnx.jit(lambda m, t: m(t, decode=True))
        got = [np.asarray(step(model, batch[:, t : t + 1])) for t in range(3)]
    assert_close(np.concatenate(got, axis=1), np.asarray(logits)[:, :3])
    # Dropout draws other bits for other layouts only if the compiler may choose: it may not here.
    assert_close(np.array(losses), np.array(trained[1][:5]), tol=1e-3)
