# %% [markdown]
# # Long contexts: what a decoded token costs
#
# A model with attention beside two recurrent ones. We count the bytes that each carries from token
# to token, and time a step of decoding at contexts of up to 65,536 tokens.

# %%
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from jla.models import (
    AutoModelForCausalLM,
    GatedDeltaNetConfig,
    Mamba2Config,
    TransformerConfig,
)

# %% [markdown]
# ## The models
#
# The weights are random: cost does not depend on them.

# %%
SIZES: dict[str, Any] = dict(vocab_size=256, hidden_size=256, num_hidden_layers=2)
CONFIGS = {
    "attention": TransformerConfig(num_heads=4, intermediate_size=512, **SIZES),
    "Gated DeltaNet": GatedDeltaNetConfig(
        num_heads=4, head_dim=64, expand_v=1.0, intermediate_size=512, **SIZES
    ),
    "Mamba-2": Mamba2Config(head_dim=64, num_heads=8, state_size=64, **SIZES),
}
COLOURS = dict(zip(CONFIGS, ("tab:orange", "tab:blue", "tab:purple"), strict=True))
models = {
    name: AutoModelForCausalLM.from_config(config, rngs=nnx.Rngs(0))
    for name, config in CONFIGS.items()
}
for name, model in models.items():
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"{name:15} {size:,} parameters")

# %% [markdown]
# ## Memory
#
# `new_cache` makes what decoding carries. A recurrent model's has one size; attention's needs room
# for the whole context, `max_length`. `jax.eval_shape` counts it without making an array.

# %%
CONTEXTS = (256, 1024, 4096, 16384, 65536)


def cache_bytes(model, length):
    cache = jax.eval_shape(lambda: model.new_cache(batch_size=1, max_length=length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


sizes = {name: [cache_bytes(model, n) for n in CONTEXTS] for name, model in models.items()}
for name, values in sizes.items():
    print(f"{name:15} {values[0]:>11,} to {values[-1]:>11,} bytes")

# %% [markdown]
# ## Time
#
# A step takes the cache and hands on the next one; donated, it may be written in place. Attention's
# step reads its whole cache, however full it is, so a new one of the right length is enough.


# %%
@partial(jax.jit, static_argnums=0, donate_argnums=2)
def step(graphdef, state, cache, token):
    out = nnx.merge(graphdef, state)(token, cache=cache)
    return out.cache, jnp.argmax(out.logits, axis=-1)


def step_time(model, length, repeats=20):
    """The shortest of some steps, in milliseconds."""
    cache, token = model.new_cache(batch_size=1, max_length=length), jnp.array([[1]])
    graphdef, state = nnx.split(model)
    times = []
    for _ in range(repeats + 1):  # the first compiles
        start = time.perf_counter()
        cache, token = jax.block_until_ready(step(graphdef, state, cache, token))
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


times = {name: [step_time(model, n) for n in CONTEXTS] for name, model in models.items()}

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for name in models:
    left.loglog(CONTEXTS, np.array(sizes[name]) / 2**20, "o-", color=COLOURS[name], label=name)
    right.loglog(CONTEXTS, times[name], "o-", color=COLOURS[name], label=name)
left.set(ylabel="MiB", title="cache of one row")
right.set(ylabel="milliseconds", title="one decoding step, CPU")
for axes in (left, right):
    axes.set_xticks(CONTEXTS, [f"{length:,}" for length in CONTEXTS])
    axes.minorticks_off()
    axes.set_xlabel("context length (tokens)")
    axes.grid(alpha=0.3)
left.legend()
plt.show()

# %% [markdown]
# The bytes are exact. The times are those of the CPU that ran this notebook, which did other work
# too: read their shape, not their values.
#
# ## Reading a long prompt
#
# A long prompt need not be read at once. Any split with the cache carried gives the same result, so
# the memory for reading it is that of one piece.

# %%
model, LENGTH, PIECE = models["Gated DeltaNet"], 8192, 1024
prompt = np.random.default_rng(0).integers(0, 256, (1, LENGTH), dtype=np.int32)
graphdef, state = nnx.split(model)


@jax.jit
def read(state, ids, cache):
    return nnx.merge(graphdef, state)(ids, cache=cache, logits_to_keep=1)


def read_in_pieces(length):
    """The last logits of the prompt read ``length`` tokens at a time, and the MiB of one call."""
    cache = model.new_cache(batch_size=1)
    compiled = read.lower(state, prompt[:, :length], cache).compile()
    for piece in np.split(prompt, LENGTH // length, axis=1):
        out = compiled(state, piece, cache)
        cache = out.cache
    memory: Any = compiled.memory_analysis()
    return out.logits, memory.temp_size_in_bytes / 2**20


whole, large = read_in_pieces(LENGTH)
pieces, small = read_in_pieces(PIECE)
print(f"{LENGTH:,} tokens a call: {large:6.1f} MiB of temporary memory")
print(f"{PIECE:,} tokens a call: {small:6.1f} MiB")
print(f"last logits differ by {jnp.abs(pieces - whole).max():.1e} at most")
assert jnp.allclose(pieces, whole, atol=1e-4)
