"""Packs documents with Grain and trains on the rows: what Grain calls segment ids are ours.

    python examples/grain_packing.py    # a minute on two CPU cores

Grain numbers the documents of a row from 1 and pads with 0, which is what ``segment_ids`` mean.
Whole documents are put wherever they fit; those longer than a row are cut first.
"""

from __future__ import annotations

from collections.abc import Sequence

import grain
import jax.numpy as jnp
import numpy as np
from grain.experimental import FirstFitPackIterDataset

import corpus
import train_tiny
from jla.models import AutoModelForCausalLM

STEPS = 20


def packed_batches(
    documents: Sequence[np.ndarray], length: int, batch: int, *, seed: int = 0
) -> grain.IterDataset:
    """Batches of ``ids`` and ``segment_ids``, int32 ``[batch, length]``, in one pass over the text.

    The last rows may be emptier than others, and the last batch have fewer of them.
    """
    pieces = [
        {"ids": each[start : start + length]}
        for each in documents
        for start in range(0, len(each), length)
    ]
    shuffled = grain.MapDataset.source(pieces).shuffle(seed=seed).to_iter_dataset()
    packed = FirstFitPackIterDataset(
        shuffled, length_struct={"ids": length}, num_packing_bins=4 * batch, seed=seed
    )
    renamed = packed.map(lambda row: {"ids": row["ids"], "segment_ids": row["ids_segment_ids"]})
    return renamed.batch(batch)


def main() -> None:
    documents = corpus.training_documents()
    batches = packed_batches(documents, train_tiny.LENGTH, train_tiny.BATCH)
    full = np.mean([np.mean(each["segment_ids"] > 0) for each in batches])
    print(f"{len(documents)} documents packed, {full:.1%} of all places filled")
    model = AutoModelForCausalLM.from_pretrained(train_tiny.CHECKPOINT, dtype=jnp.float32)
    optimizer = train_tiny.make_optimizer(model, STEPS, 1e-3)
    for step, each in zip(range(STEPS), batches, strict=False):
        loss = train_tiny.train_step(model, optimizer, each["ids"], each["segment_ids"])
        print(f"step {step + 1}: {float(loss) / np.log(2):.3f} bits/byte")


if __name__ == "__main__":
    main()
