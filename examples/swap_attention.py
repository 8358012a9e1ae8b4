# %% [markdown]
# # Swap attention for Gated DeltaNet
#
# A small transformer, as Flax's tutorials write it, is built twice. One line differs: the layer
# that mixes tokens is `nnx.MultiHeadAttention` in one and `jla.layers.GatedDeltaNet` in the other.
# Both train on the same batches of text; then we compare what a decoded token costs.

# %%
import time
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import corpus
from jla.layers import GatedDeltaNet

# %% [markdown]
# ## The model
#
# `GatedDeltaNet` is called like `nnx.MultiHeadAttention`, masks and `decode` included, so the block
# does not know which of the two it holds.

# %%
WIDTH, HEADS, LENGTH = 64, 4, 128


def attention(rngs):
    return nnx.MultiHeadAttention(num_heads=HEADS, in_features=WIDTH, rngs=rngs)


def gated_deltanet(rngs):
    return GatedDeltaNet(WIDTH, num_heads=HEADS, head_dim=16, expand_v=1, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, make_mixer, rngs):
        self.mixer = make_mixer(rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, decode=False):
        mask = None if decode else nnx.make_causal_mask(x[..., 0])
        x = x + self.mixer(self.norm1(x), mask=mask, decode=decode)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Model(nnx.Module):
    def __init__(self, make_mixer, blocks=2, *, rngs):
        self.tokens = nnx.Embed(corpus.VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(make_mixer, rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, corpus.VOCABULARY, rngs=rngs)

    def __call__(self, ids, positions, decode=False):
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x, decode)
        return self.head(self.norm(x))


models = {make.__name__: Model(make, rngs=nnx.Rngs(0)) for make in (attention, gated_deltanet)}
for name, model in models.items():
    mixer = nnx.state(model.blocks[0].mixer, nnx.Param)
    count = sum(leaf.size for leaf in jax.tree.leaves(mixer))
    print(f"{name:15} {count:,} parameters in each mixer")

# %% [markdown]
# ## Loss
#
# The text is Python's own help topics, as bytes. Both models see the same batches in the same
# order, with the same optimizer.


# %%
@nnx.jit
def step(model, optimizer, ids):
    def loss(model):
        logits = model(ids[:, :-1], jnp.arange(ids.shape[1] - 1))
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


STEPS, BATCH = 150, 8
rows, _ = corpus.pack(corpus.training_documents(), LENGTH + 1)
batches = np.random.default_rng(0).permutation(rows)[: STEPS * BATCH].reshape(STEPS, BATCH, -1)
losses = {}
for name, model in models.items():
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    losses[name] = np.array([step(model, optimizer, ids) for ids in batches])

# %%
COLOURS = {"attention": "tab:orange", "gated_deltanet": "tab:blue"}
LABELS = {"attention": "nnx.MultiHeadAttention", "gated_deltanet": "jla.layers.GatedDeltaNet"}
window = 10
for name, values in losses.items():
    smooth = np.convolve(values, np.ones(window) / window, mode="valid")
    plt.plot(values, color=COLOURS[name], alpha=0.25)
    plt.plot(np.arange(window - 1, STEPS), smooth, color=COLOURS[name], label=LABELS[name])
    print(f"{name:15} loss {values[:window].mean():.2f} -> {values[-window:].mean():.2f} nats/byte")
plt.xlabel("step")
plt.ylabel("training loss (nats per byte)")
plt.title("Same model, same batches; only the mixer differs")
plt.legend()
plt.show()

# %% [markdown]
# Gated DeltaNet's short convolutions see a byte's neighbours from the first step; attention has to
# learn where to look. That it is ahead after 150 steps of a tiny model says nothing about larger
# ones.

# %% [markdown]
# ## Decoding
#
# Flax's `decode=True` works as before: `init_cache` makes the layer's cache, and every call feeds
# one token. The logits are those of a call on the whole text.


# %%
@nnx.jit
def decode_step(model, token, position):
    return model(token[:, None], position[None], decode=True)[:, 0]


text = corpus.encode("The import statement finds a module, and then")[None, :-1]
for name, model in models.items():
    decoder = nnx.clone(model)
    for block in decoder.blocks:
        block.mixer.init_cache((1, LENGTH, WIDTH))
    pieces = [decode_step(decoder, text[:, i], jnp.array(i)) for i in range(text.shape[1])]
    whole = model(text, jnp.arange(text.shape[1]))
    difference = jnp.abs(jnp.stack(pieces, axis=1) - whole).max()
    print(f"{name:15} one token at a time against all at once: {difference:.1e} at most")
    assert difference < 1e-3

# %% [markdown]
# ## What a token costs
#
# Attention has a cache with room for every token's key and value, and reads all of it at each step.
# Gated DeltaNet keeps one matrix per head, however long the text. We count the bytes of one layer's
# cache and time a step, for 8 rows.

# %%
CONTEXTS = (256, 1024, 4096, 16384)


def cache_bytes(layer):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(layer, nnx.Cache)))


def step_time(layer, repeats=20):
    """The shortest of some steps, in microseconds."""
    graphdef, cache, parameters = nnx.split(layer, nnx.Cache, ...)

    @partial(jax.jit, donate_argnums=0)  # a step may write into the cache it was given
    def step(cache, parameters, x):
        layer = nnx.merge(graphdef, cache, parameters)
        y = layer(x, decode=True)
        return nnx.state(layer, nnx.Cache), y

    x, times = jnp.ones((8, 1, WIDTH)), []
    for _ in range(repeats + 1):  # the first compiles
        start = time.perf_counter()
        cache, _ = jax.block_until_ready(step(cache, parameters, x))
        times.append(time.perf_counter() - start)
    return 1e6 * min(times)


def cost_at(layer, length):
    layer = nnx.clone(layer)
    layer.init_cache((8, length, WIDTH))
    return cache_bytes(layer), step_time(layer)


cost = {
    name: [cost_at(model.blocks[0].mixer, length) for length in CONTEXTS]
    for name, model in models.items()
}

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for name, values in cost.items():
    size, duration = np.array(values).T
    left.loglog(CONTEXTS, size / 2**20, "o-", color=COLOURS[name], label=LABELS[name])
    right.loglog(CONTEXTS, duration, "o-", color=COLOURS[name], label=LABELS[name])
left.set(ylabel="MiB", title="cache of one layer, 8 rows")
right.set(ylabel="microseconds", title="one decoding step of the layer, CPU")
for axes in (left, right):
    axes.set_xticks(CONTEXTS, [f"{length:,}" for length in CONTEXTS], minor=False)
    axes.set_xlabel("room in the cache (tokens)")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
left.legend()
plt.show()

# %% [markdown]
# The bytes are exact. The times are those of the CPU that ran this notebook, which did other work
# too: read their shape, not their values.
