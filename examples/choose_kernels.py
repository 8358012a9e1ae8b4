# %% [markdown]
# # Implementations and kernels
#
# Every recurrence has up to three implementations with the same numbers: `reference` goes token by
# token, `chunk` is chunk-parallel plain JAX for any device, `mosaic` is a kernel for Hopper GPUs.
# This notebook shows how one is chosen, how to ask why, how to pin one, and how to time them.

# %%
import time
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import jla.ops
from jla.layers import GatedDeltaNet

print("JAX runs on", jax.default_backend())

# %% [markdown]
# ## `explain`
#
# `impl="auto"`, the default, decides from what is known before anything runs: device, dtype,
# shapes, options. `jla.ops.explain` tells what it decides and why the others are out. Nothing is
# computed, so shapes are enough.


# %%
def shapes(dtype, T=4096, H=8, D=128):
    heads = jax.ShapeDtypeStruct((2, T, H, D), dtype)
    gate = jax.ShapeDtypeStruct((2, T, H), jnp.float32)
    return heads, heads, heads, gate, gate  # q, k, v, g, beta


for dtype in (jnp.bfloat16, jnp.float32):
    print(jnp.dtype(dtype).name)
    print(jla.ops.explain("gated_delta_rule", *shapes(dtype)), "\n")

# %% [markdown]
# ## `impl`
#
# Ops and mixers take `impl`. A named implementation runs, or the call raises and says why it
# cannot; nothing else runs instead.


# %%
def inputs(T, H=2, D=32, dtype=jnp.float32):
    keys = iter(jax.random.split(jax.random.key(0), 5))
    q, k, v = (jax.random.normal(next(keys), (1, T, H, D), dtype) for _ in range(3))
    g = jax.nn.log_sigmoid(jax.random.normal(next(keys), (1, T, H)) + 3)
    beta = jax.nn.sigmoid(jax.random.normal(next(keys), (1, T, H)))
    return q, k, v, g, beta


def run(impl, arguments):
    return jla.ops.gated_delta_rule(*arguments, use_qk_l2norm=True, impl=impl)[0]


arguments = inputs(256)
difference = jnp.abs(run("chunk", arguments) - run("reference", arguments)).max()
print(f"chunk against reference: {difference:.1e} at most")
assert difference < 1e-4

# %%
for impl in ("mosaic", "cuda"):
    try:
        run(impl, arguments)
    except (jla.ops.ImplUnavailable, ValueError) as error:
        print(f"{type(error).__name__}: {error}")

# %% [markdown]
# ## `use_impl`
#
# Pins the implementation of every call that says `"auto"`, of all ops or of one, without touching
# the model. It acts where JAX traces: a function that is compiled already keeps what it has.

# %%
mixer = GatedDeltaNet(64, num_heads=2, head_dim=32, expand_v=1, rngs=nnx.Rngs(0))
x = nnx.Rngs(1).params.normal((1, 256, 64))
auto = mixer(x)
with jla.ops.use_impl(gated_delta_rule="reference"):
    print(jla.ops.explain("gated_delta_rule", *arguments))
    pinned = mixer(x)
print(f"the mixer's output moves by {jnp.abs(auto - pinned).max():.1e}")

# %% [markdown]
# ## What training costs in memory
#
# The choice also decides what a gradient keeps: states token by token, or chunk by chunk. XLA tells
# how many bytes a compiled gradient uses, without running it.

# %%
LENGTHS = (256, 1024, 4096)


def gradient(impl):
    return jax.jit(jax.grad(lambda arguments: run(impl, arguments).sum()))


def temporary_bytes(impl, T):
    arguments = jax.eval_shape(lambda: inputs(T))
    memory: Any = gradient(impl).lower(arguments).compile().memory_analysis()
    return memory.temp_size_in_bytes


COLOURS = {"reference": "tab:orange", "chunk": "tab:blue", "mosaic": "tab:green"}
for impl in ("reference", "chunk"):
    sizes = [temporary_bytes(impl, T) / 2**20 for T in LENGTHS]
    plt.loglog(LENGTHS, sizes, "o-", color=COLOURS[impl], label=impl)
    print(f"{impl:10} {sizes[-1]:6.1f} MiB for {LENGTHS[-1]:,} tokens")
plt.xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
plt.minorticks_off()
plt.xlabel("tokens")
plt.ylabel("temporary memory (MiB)")
plt.title("Gradient of gated_delta_rule, 2 heads of 32, float32")
plt.grid(alpha=0.3)
plt.legend()
plt.show()

# %% [markdown]
# ## Timing on a GPU
#
# The next cell times forward and gradient on a GPU, in bfloat16. `reference` is left out: it is for
# checking, not for speed. On a CPU the cell does nothing. Measured times are in the README and in
# `benchmarks/RESULTS.md`; `jla bench` times named shapes.


# %%
def median_ms(function, *arguments, calls=20, batches=7):
    """The median of some batches of calls; a call waits for nothing but the one before."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return 1e3 * np.median(times)


if jax.default_backend() == "gpu":
    arguments = inputs(8192, H=16, D=128, dtype=jnp.bfloat16)
    refused = jla.ops.explain("gated_delta_rule", *arguments, use_qk_l2norm=True).refused
    for impl in ("chunk", "mosaic"):
        if impl in refused:
            print(f"{impl}: {refused[impl]}")
            continue
        forward = jax.jit(lambda arguments, impl=impl: run(impl, arguments))
        both = median_ms(gradient(impl), arguments)
        print(f"{impl}: forward {median_ms(forward, arguments):.3f} ms, gradient {both:.3f} ms")
else:
    print("skipped: this notebook ran without a GPU")
