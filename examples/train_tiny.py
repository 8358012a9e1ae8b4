"""Trains the byte-level Gated DeltaNet that this repository ships.

    python examples/train_tiny.py                  # some 10 to 20 minutes on two CPU cores

Text, held-out topics and packing are in ``corpus.py``. The result, FLA's ``config.json`` and
``model.safetensors`` in bfloat16, goes to ``examples/checkpoints/tiny_gated_deltanet``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import corpus
from jla.models import CausalLM, GatedDeltaNetConfig, GatedDeltaNetForCausalLM
from jla.ops import cross_entropy, shift_labels
from jla.train import decay_mask

CHECKPOINT = Path(__file__).parent / "checkpoints" / "tiny_gated_deltanet"
LENGTH, BATCH = 512, 4


def tiny_config() -> GatedDeltaNetConfig:
    """Some 0.9 million parameters: 1.8 MB in bfloat16."""
    return GatedDeltaNetConfig(
        vocab_size=corpus.VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_heads=4,
        head_dim=32,
        expand_v=1.0,
        intermediate_size=320,
        tie_word_embeddings=True,
        bos_token_id=corpus.BOUNDARY,
        eos_token_id=corpus.BOUNDARY,
        pad_token_id=corpus.BOUNDARY,
    )


def make_optimizer(model: CausalLM, steps: int, peak: float) -> nnx.Optimizer:
    """AdamW with warm-up, cosine decay and clipping; only kernels and embeddings decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, min(50, steps // 5 + 1), steps, peak / 20
    )
    adamw = optax.adamw(schedule, b2=0.98, weight_decay=0.1, mask=decay_mask)
    return nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adamw), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, ids, segment_ids):
    """One step on ``[B, T]``; returns the mean loss in nats before it."""

    def loss(model):
        return model(ids, segment_ids, labels=ids).loss

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def batches(
    documents: Sequence[np.ndarray], steps: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """``steps`` batches ``[BATCH, LENGTH]``: each pass over the text packs it in a new order."""
    random, rows = np.random.default_rng(seed), []
    for _ in range(steps):
        if len(rows) < BATCH:
            order = random.permutation(len(documents))
            # A random first cut moves the row ends, so that long documents break elsewhere.
            first = documents[order[0]][random.integers(LENGTH) :]
            ids, segments = corpus.pack([first, *(documents[i] for i in order[1:])], LENGTH)
            rows += [(ids[i], segments[i]) for i in random.permutation(len(ids))]
        taken = [rows.pop() for _ in range(BATCH)]
        yield np.stack([ids for ids, _ in taken]), np.stack([s for _, s in taken])


def train(model, optimizer, documents, steps: int, seed: int = 0, title: str = "train"):
    """Runs ``steps`` steps under a progress bar; returns the losses in nats."""
    losses = []
    with tqdm(
        batches(documents, steps, seed), total=steps, desc=title, unit="step", mininterval=0.5
    ) as bar:
        for ids, segment_ids in bar:
            losses.append(float(train_step(model, optimizer, ids, segment_ids)))
            recent = np.mean(losses[-20:]) / math.log(2)
            bar.set_postfix_str(f"{recent:.3f} bits/byte", refresh=False)
    return losses


@nnx.jit
def _total_nats(model, ids, segment_ids):
    targets = shift_labels(ids, segment_ids)
    mean = cross_entropy(model(ids, segment_ids).logits, targets)
    return mean * jnp.sum(targets >= 0)


def bits_per_byte(model: CausalLM, documents: Sequence[np.ndarray]) -> float:
    """Bits per byte on whole documents, each read from its start and charged for its end."""
    model = nnx.view(model, deterministic=True)
    nats = 0.0
    length = max(len(each) for each in documents)
    # Packed without a cut: rows as long as the longest document, each filled while there is room.
    for ids, segment_ids in _whole_rows(documents, length):
        nats += float(_total_nats(model, ids, segment_ids))
    return nats / math.log(2) / corpus.text_bytes(documents)


def _whole_rows(documents, length):
    row: list[np.ndarray] = []
    for document in [*documents, None]:
        if document is None or sum(map(len, row)) + len(document) > length:
            yield corpus.pack(row, length)
            row = []
        if document is not None:
            row.append(document)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--peak", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    options = parser.parse_args()

    training, held_out = corpus.training_documents(), corpus.held_out_documents()
    model = GatedDeltaNetForCausalLM(tiny_config(), rngs=nnx.Rngs(0))
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"{size:,} parameters, {corpus.text_bytes(training):,} bytes to train on")
    optimizer = make_optimizer(model, options.steps, options.peak)
    train(model, optimizer, training, options.steps)
    save(model, options.out)

    model = GatedDeltaNetForCausalLM.from_pretrained(options.out, dtype=jnp.float32)
    unigram = corpus.unigram_bits_per_byte(training, held_out)
    print(f"held out: {bits_per_byte(model, held_out):.3f} bits/byte, unigram {unigram:.3f}")
    print(f"written to {options.out}")


def save(model: CausalLM, folder: Path) -> None:
    """Writes the checkpoint with bfloat16 tensors; ``A_log`` and ``dt_bias`` stay float32."""
    from jla import convert

    small = GatedDeltaNetForCausalLM(model.config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    convert.load_state_dict(small, convert.to_state_dict(model))
    small.save_pretrained(folder)


if __name__ == "__main__":
    main()
