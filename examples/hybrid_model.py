# %% [markdown]
# # A hybrid: attention in chosen layers
#
# A recurrence summarises what it has read, attention looks it up. Hybrids keep a few attention
# layers among many recurrent ones. In jla, as in flash-linear-attention, the config says which.

# %%
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import corpus
from jla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

# %% [markdown]
# ## The config
#
# `attn` names the layers that get softmax attention, and its heads. With `window_size` a layer sees
# only so many tokens back, and its cache stays that small. Everything else is the family's own.

# %%
SIZES: dict[str, Any] = dict(
    vocab_size=corpus.VOCABULARY,
    hidden_size=64,
    num_hidden_layers=4,
    num_heads=2,
    head_dim=32,
    expand_v=1.0,
    intermediate_size=160,
)
PLANS = {
    "recurrent": None,
    "window": {"layers": [1, 3], "num_heads": 4, "window_size": 64},
    "hybrid": {"layers": [1, 3], "num_heads": 4, "num_kv_heads": 2},
    "attention": {"layers": [0, 1, 2, 3], "num_heads": 4},
}


def build(plan):
    return GatedDeltaNetForCausalLM(GatedDeltaNetConfig(attn=plan, **SIZES), rngs=nnx.Rngs(0))


models = {name: build(plan) for name, plan in PLANS.items()}
for name, model in models.items():
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    layers = [type(block.attn).__name__ for block in model.model.layers]
    print(f"{name:10} {size:,} parameters: {', '.join(layers)}")

# %% [markdown]
# A plan that does not fit the model is refused when the config is made:

# %%
try:
    GatedDeltaNetConfig(attn={"layers": [1, 7], "num_heads": 4}, **SIZES)
except ValueError as error:
    print(error)

# %% [markdown]
# ## State
#
# The cache has an entry per layer. A recurrent layer has states and the last inputs of its short
# convolutions, an attention layer has keys and values. Here is the hybrid's, for one row with room
# for 1,024 tokens:

# %%
cache = models["hybrid"].new_cache(batch_size=1, max_length=1024)
for i, layer in enumerate(cache[:2]):
    for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
        print(f"layer {i}  {jax.tree_util.keystr(path):36} {leaf.dtype} {leaf.shape}")

# %% [markdown]
# What that costs for longer contexts, counted without making any array:

# %%
CONTEXTS = (64, 256, 1024, 4096, 16384, 65536)
COLOURS = dict(zip(PLANS, ("tab:blue", "tab:green", "tab:red", "tab:orange"), strict=True))


def cache_bytes(model, length):
    cache = jax.eval_shape(lambda: model.new_cache(1, length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


for name, model in models.items():
    sizes = [cache_bytes(model, length) / 2**20 for length in CONTEXTS]
    plt.loglog(CONTEXTS, sizes, "o-", color=COLOURS[name], label=name)
plt.xticks(CONTEXTS, [f"{length:,}" for length in CONTEXTS])
plt.minorticks_off()
plt.xlabel("context length (tokens)")
plt.ylabel("cache of one row (MiB)")
plt.title("State of four layers")
plt.grid(alpha=0.3)
plt.legend()
plt.show()

# %% [markdown]
# ## Loss
#
# All four train on the same packed batches of Python's help topics.


# %%
@nnx.jit
def step(model, optimizer, ids, segment_ids):
    value, gradients = nnx.value_and_grad(lambda m: m(ids, segment_ids, labels=ids).loss)(model)
    optimizer.update(model, gradients)
    return value


STEPS, BATCH, LENGTH = 60, 4, 128
ids, segment_ids = corpus.pack(corpus.training_documents(), LENGTH)
order = np.random.default_rng(0).permutation(len(ids))[: STEPS * BATCH].reshape(STEPS, BATCH)
losses = {}
for name, model in models.items():
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    values = [step(model, optimizer, ids[rows], segment_ids[rows]) for rows in order]
    losses[name] = np.array(values)

# %%
window = 10
for name, values in losses.items():
    smooth = np.convolve(values, np.ones(window) / window, mode="valid")
    plt.plot(np.arange(window - 1, STEPS), smooth, color=COLOURS[name], label=name)
    print(f"{name:10} loss {values[:window].mean():.2f} -> {values[-window:].mean():.2f} nats/byte")
plt.xlabel("step")
plt.ylabel(f"training loss (nats per byte), mean of {window} steps")
plt.title("Same batches, four plans")
plt.legend()
plt.show()
assert all(values[-window:].mean() < values[:window].mean() for values in losses.values())

# %% [markdown]
# So short a training shows that every plan trains, and no more: what attention layers are for,
# looking things up far back, does not show in 60 steps of text cut at 128 bytes.

# %% [markdown]
# ## In a checkpoint
#
# `attn` is part of `config.json`, so a saved hybrid is loaded like any other model, here and in
# flash-linear-attention:

# %%
print({name: value for name, value in models["hybrid"].config.to_dict().items() if name == "attn"})
