# %% [markdown]
# # A checkpoint of flash-linear-attention, there and back
#
# We load a checkpoint in flash-linear-attention's (FLA's) format, look at it, let it write,
# fine-tune it for some steps, and save it in the format it came in.

# %%
import inspect
import json
import tempfile
import textwrap
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

import corpus
from jla.models import AutoModelForCausalLM
from train_tiny import make_optimizer, train_step

# %% [markdown]
# ## Load
#
# The repository ships a small Gated DeltaNet of bytes, trained on Python's help topics. `dtype` is
# that of the parameters in memory; without it they keep the file's, bfloat16 here.

# %%
CHECKPOINT = Path("checkpoints/tiny_gated_deltanet")
model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=jnp.float32)
print(f"{type(model).__name__} with {len(model.model.layers)} layers")

# %% [markdown]
# With a network, a repository of the Hugging Face Hub is loaded by its id, tokenizer and all:
#
# ```python
# from transformers import AutoTokenizer
#
# name = "fla-hub/gla-1.3B-100B"
# model = AutoModelForCausalLM.from_pretrained(name, dtype=jnp.bfloat16)
# tokenizer = AutoTokenizer.from_pretrained(name)
#
# ids = jnp.array([tokenizer.encode("Linear attention is")])
# print(tokenizer.decode(model.generate(ids, max_new_tokens=32)[0]))
# ```

# %% [markdown]
# ## Look
#
# `nnx.tabulate` traces a call and lists every module with its inputs, outputs and parameters. Here
# are the rows of the first layer.

# %%
print(
    nnx.tabulate(
        model,
        jnp.zeros((1, 16), jnp.int32),
        row_filter=lambda row: row.path[:3] == ("model", "layers", 0),
        depth=4,
        console_kwargs={"width": 130, "force_terminal": False, "force_jupyter": False},
    )
)

# %% [markdown]
# `nnx.display` opens the same tree in the notebook (click the triangles), with a picture of every
# array. This is the first layer's mixer:

# %%
nnx.display(model.model.layers[0].attn)

# %% [markdown]
# A cache is a plain pytree, and shows as well. After a prompt it holds, for each layer, the state
# of every head and the last inputs of the short convolutions. This is the first layer's:

# %%
prompt = jnp.array(corpus.encode("The import statement ")[None, :-1])
cache = model(prompt, cache=model.new_cache(batch_size=1)).cache
nnx.display(cache[0])

# %% [markdown]
# ## Generate


# %%
def write(model, count=200):
    tokens = model.generate(prompt, max_new_tokens=count, temperature=0.6, top_p=0.95, key=1)
    return corpus.decode(tokens[0])


print(write(model))

# %% [markdown]
# ## Fine-tune
#
# From English to Python: some modules of the standard library, packed into rows of 256 bytes.
# `segment_ids` keep the documents of a row apart. `train_step` is an ordinary `nnx.jit` function
# with an optax optimizer.

# %%
print(inspect.getsource(train_step))

# %%
STEPS, BATCH, LENGTH = 30, 4, 256
sources = [corpus.encode(inspect.getsource(module)) for module in (inspect, json, tempfile)]
ids, segment_ids = corpus.pack(sources, LENGTH)
order = np.random.default_rng(0).permutation(len(ids))[: STEPS * BATCH].reshape(STEPS, BATCH)
unseen = corpus.encode(inspect.getsource(textwrap))[None, :2048]


@nnx.jit
def bits_per_byte(model, ids):
    return model(ids, labels=ids).loss / jnp.log(2)


before = bits_per_byte(model, unseen)
optimizer = make_optimizer(model, STEPS, peak=2e-3)
losses = [train_step(model, optimizer, ids[rows], segment_ids[rows]) for rows in order]
after = bits_per_byte(model, unseen)

plt.plot(np.array(losses) / np.log(2), color="tab:blue", label="training batches")
plt.plot(
    [0, STEPS], [before, after], "o", color="tab:orange", label="unseen module, before and after"
)
plt.xlabel("step")
plt.ylabel("bits per byte")
plt.title("From English to Python source")
plt.legend()
plt.show()
print(f"textwrap.py, never trained on: {before:.2f} -> {after:.2f} bits per byte")
assert after < before

# %% [markdown]
# ## Save and load again
#
# `save_pretrained` writes what FLA's `from_pretrained` reads: `config.json` and
# `model.safetensors`, with FLA's names and layouts.

# %%
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    files = {path.name: path.stat().st_size for path in sorted(Path(folder).iterdir())}
    tensors = load_file(Path(folder) / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(folder)

original = load_file(CHECKPOINT / "model.safetensors")
assert tensors.keys() == original.keys()
for name, size in files.items():
    print(f"{name:20} {size:>9,} bytes")
for name in sorted(tensors):
    if ".layers.0." in name:
        print(f"  {name:40} {tensors[name].shape}")

# %%
logits = nnx.jit(lambda model: model(prompt).logits)
different = jnp.abs(logits(again) - logits(model)).max()
print(f"logits of the loaded model against the saved one: {different} at most")
assert different == 0
