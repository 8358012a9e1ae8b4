# %% [markdown]
# # Packing and padding: what `segment_ids` do
#
# Documents have different lengths, batches are rectangles. One either pads short documents or packs
# several into a row. A recurrence makes both delicate: its state runs on through whatever it is
# fed. `segment_ids` tell every mixer and model what belongs together. Here are pictures of it.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from matplotlib.colors import LogNorm

import corpus
from jla.models import AutoModelForCausalLM
from jla.ops import cu_seqlens_from_segment_ids, segment_ids_from_cu_seqlens

model = AutoModelForCausalLM.from_pretrained("checkpoints/tiny_gated_deltanet", dtype=jnp.float32)

# %% [markdown]
# ## A packed row
#
# `segment_ids` is an integer array `[B, T]`: 0 is padding, a change of id starts a new document.

# %%
texts = ["import this", "for line in text", "raise ValueError"]
documents = [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
lengths = [len(document) for document in documents]
starts = np.cumsum([0, *lengths])
PADDING = 6
ids = np.concatenate([*documents, np.zeros(PADDING, np.int32)])[None]
segment_ids = np.concatenate([np.repeat([1, 2, 3], lengths), np.zeros(PADDING, np.int32)])[None]
print("".join(chr(i) if i else "_" for i in ids[0]))
print("".join(map(str, segment_ids[0])))

# %% [markdown]
# A Hugging Face `attention_mask` is a valid `segment_ids`, and FLA's `cu_seqlens` converts both
# ways:

# %%
cu_seqlens = cu_seqlens_from_segment_ids(segment_ids[:, :-PADDING])
print("cu_seqlens", cu_seqlens)
print("and back  ", segment_ids_from_cu_seqlens(cu_seqlens, starts[-1]))

# %% [markdown]
# ## Outputs
#
# The model sees the row once with `segment_ids` and once without, and each document alone. The
# picture shows how far the packed logits are from those of the document alone.


# %%
@nnx.jit
def logits(model, ids, segment_ids=None):
    return model(ids, segment_ids).logits[0]


alone = jnp.concatenate([logits(model, document[None]) for document in documents])
together = {
    "with segment_ids": logits(model, ids, segment_ids)[: starts[-1]],
    "without": logits(model, ids)[: starts[-1]],
}
for name, packed in together.items():
    difference = jnp.abs(packed - alone).max(axis=-1)
    plt.semilogy(np.maximum(difference, 1e-8), ".-", label=name)
for start in starts[1:-1]:
    plt.axvline(start - 0.5, color="grey", linestyle=":")
plt.xticks(range(starts[-1]), "".join(texts), family="monospace", fontsize=7)
plt.xlabel("token of the packed row; dotted: a new document")
plt.ylabel("largest difference of a token's logits")
plt.title("Packed against alone")
plt.legend()
plt.show()
assert jnp.allclose(together["with segment_ids"], alone, atol=1e-3)

# %% [markdown]
# With `segment_ids` what is left is rounding. Without them the first document is right and the
# others read on in the state that it left behind.

# %% [markdown]
# ## States
#
# The same, seen from inside. We feed the row token by token and look at the state of the first
# layer, a matrix for each of 4 heads.


# %%
@nnx.jit
def feed(model, cache, token, segment_id):
    return model(token[:, None], segment_id[:, None], cache=cache).cache


def state_norms(segment_ids):
    cache, norms = model.new_cache(batch_size=1), []
    for i in range(ids.shape[1]):
        cache = feed(model, cache, ids[:, i], segment_ids[:, i])
        state = cache[0]["attn"]["recurrent_state"]  # [B, H, K, V]
        norms.append(jnp.linalg.norm(state[0], axis=(-2, -1)))
    return np.array(norms)


norms = {
    "with segment_ids": state_norms(segment_ids),
    "as one document": state_norms(np.ones_like(segment_ids)),
}

# %%
figure, axes = plt.subplots(2, 1, figsize=(8, 5), sharex=True, sharey=True, layout="constrained")
for each, (name, values) in zip(axes, norms.items(), strict=True):
    for head in range(values.shape[1]):
        each.plot(values[:, head], ".-", label=f"head {head}")
    for start in starts[1:]:
        each.axvline(start - 0.5, color="grey", linestyle=":")
    each.set(title=name, ylabel="norm of the state", ylim=(0, 0.9))
axes[0].axvspan(starts[-1] - 0.5, ids.shape[1] - 0.5, color="grey", alpha=0.2, label="padding")
axes[0].legend(ncols=5, loc="upper left", fontsize=8)
axes[1].set_xticks(range(ids.shape[1]), "".join(texts) + "_" * PADDING, family="monospace")
axes[1].set_xlabel("token fed; dotted: a new document, or the padding")
plt.show()
padded = norms["with segment_ids"][starts[-1] - 1 :]
assert (padded == padded[0]).all()

# %% [markdown]
# At a new document the state starts from nothing. A padding token is a step that changes nothing:
# the lines above are flat there, to the last bit. So the state after a padded prompt is the state
# after the prompt, on whichever side the padding was.

# %% [markdown]
# ## Who sees whom
#
# How much does each input of the first layer's mixer move each output? We sum the channels of an
# output, differentiate with respect to every input, and take the norm. A causal mixer gives a
# triangle; `segment_ids` cut it into one triangle per document.


# %%
mixer = model.model.layers[0].attn
x = model.model.embeddings(jnp.array(ids))


@nnx.jit
def influence(mixer, x, segment_ids=None):
    """``[T, T]``, how much input j moves output i."""

    def outputs(x):
        return mixer(x[None], segment_ids=segment_ids)[0].sum(axis=-1)

    return jnp.linalg.norm(jax.jacrev(outputs)(x[0]), axis=-1)


pictures = {
    "segment_ids=None": influence(mixer, x),
    "segment_ids given": influence(mixer, x, segment_ids),
}
figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
scale = LogNorm(vmin=1e-3, vmax=float(pictures["segment_ids=None"].max()))
for each, (name, values) in zip(axes, pictures.items(), strict=True):
    image = each.imshow(np.ma.masked_equal(values, 0), norm=scale, cmap="viridis")
    for start in starts[1:]:
        each.axhline(start - 0.5, color="tab:red", linewidth=0.8, linestyle=":")
        each.axvline(start - 0.5, color="tab:red", linewidth=0.8, linestyle=":")
    each.set(title=name, xlabel="input token j", ylabel="output token i")
figure.colorbar(image, ax=axes, label="norm of the derivative of output i by input j")
plt.show()

# %%
real = segment_ids[0] != 0
allowed = (segment_ids[0][:, None] == segment_ids[0]) & real & np.tri(len(real), dtype=bool)
assert (np.array(pictures["segment_ids given"])[~allowed] == 0).all()
print("white is 0 exactly: no output sees a later token, another document or padding")

# %% [markdown]
# ## Padding on any side
#
# Left, right or in the middle: the real tokens' logits are those of the document alone, and
# `generate` continues rows padded either way.

# %%
masks = {
    "right": [1] * 11 + [0] * 5,
    "left": [0] * 5 + [1] * 11,
    "middle": [1] * 4 + [0] * 5 + [1] * 7,
}
mask = np.array(list(masks.values()))
padded = np.zeros_like(mask)
padded[mask == 1] = np.tile(documents[0], len(masks))
tokens = model.generate(padded, mask, max_new_tokens=12, eos_token_id=())
new = np.array(tokens[:, mask.shape[1] :])
for i, name in enumerate(masks):
    row = slice(i, i + 1)
    difference = jnp.abs(logits(model, padded[row], mask[row])[mask[i] == 1] - alone[:11]).max()
    print(f"{name:7} logits differ by {difference:.0e}, goes on with {corpus.decode(new[i])!r}")
    assert difference < 1e-3
assert (new == new[0]).all()

# %% [markdown]
# ## The loss
#
# With `labels=ids` a model shifts the labels itself. What lies across a document's end or in the
# padding has no label, so the packed row has the loss of the same documents padded in a batch.


# %%
@nnx.jit
def loss(model, ids, segment_ids):
    return model(ids, segment_ids, labels=ids).loss


batch = np.stack([np.pad(document, (0, 16 - len(document))) for document in documents])
packed, separate = loss(model, ids, segment_ids), loss(model, batch, (batch != 0).astype(int))
print(f"{packed:.5f} nats packed, {separate:.5f} padded")
assert jnp.allclose(packed, separate, atol=1e-4)
