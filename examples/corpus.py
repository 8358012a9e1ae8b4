"""English text that every Python ships, as bytes, split and packed for language models.

The text is ``pydoc_data.topics``: what ``help("with")`` and its like print. Token ids are byte
values; 0, which no text contains, opens and closes each document.
"""

from __future__ import annotations

from collections.abc import Sequence
from pydoc_data.topics import topics

import numpy as np

BOUNDARY = 0
VOCABULARY = 256

# Never trained on. Chosen because no other topic quotes them: many topics are sections of others.
HELD_OUT = (
    "assert",
    "binary",
    "calls",
    "dict",
    "global",
    "import",
    "objects",
    "raise",
    "truth",
)


def training_documents() -> list[np.ndarray]:
    """Every topic that is not held out, each text once, as ids ``[length]``."""
    texts = dict.fromkeys(topics[name] for name in sorted(topics) if name not in HELD_OUT)
    return [encode(text) for text in texts]


def held_out_documents() -> list[np.ndarray]:
    """The held-out topics as ids ``[length]``."""
    return [encode(topics[name]) for name in HELD_OUT]


def encode(text: str) -> np.ndarray:
    """The UTF-8 bytes of a text as int32 ids between two boundaries."""
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return np.concatenate([[BOUNDARY], ids, [BOUNDARY]]).astype(np.int32)


def decode(ids: Sequence[int] | np.ndarray) -> str:
    """Text of ids; boundaries are dropped, bytes that are no UTF-8 are replaced."""
    kept = [int(i) for i in ids if i != BOUNDARY]
    return bytes(kept).decode("utf-8", errors="replace")


def pack(documents: Sequence[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents end to end in rows: ids and segment_ids, both int32 ``[rows, length]``.

    Nothing is lost or padded but the end of the last row: a document that does not fit goes on in
    the next row, where it counts as a new one. Segment ids count a row's documents from 1.
    """
    ids = np.concatenate(documents)
    numbers = np.repeat(np.arange(len(documents)), [len(each) for each in documents])
    padding = -len(ids) % length
    ids = np.pad(ids, (0, padding), constant_values=BOUNDARY).reshape(-1, length)
    numbers = np.pad(numbers, (0, padding), constant_values=-1).reshape(-1, length)
    segment_ids = np.where(numbers < 0, 0, numbers - numbers[:, :1] + 1)
    return ids.astype(np.int32), segment_ids.astype(np.int32)


def unigram_bits_per_byte(training: Sequence[np.ndarray], held_out: Sequence[np.ndarray]) -> float:
    """Bits per byte of the best model without context: byte frequencies of the training text."""
    counts = np.bincount(np.concatenate([each[1:] for each in training]), minlength=VOCABULARY) + 1
    bits = -np.log2(counts / counts.sum())
    targets = np.concatenate([each[1:] for each in held_out])
    return float(bits[targets].sum() / text_bytes(held_out))


def text_bytes(documents: Sequence[np.ndarray]) -> int:
    """How many bytes of text the documents hold, boundaries apart."""
    return sum(len(each) - 2 for each in documents)
