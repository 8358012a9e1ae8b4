"""Perplexity of text: windows slide over each document, every token is predicted once."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from jla.eval.tokens import Codec
from jla.models import CausalLM
from jla.ops import cross_entropy

IGNORE = -100


class Document(NamedTuple):
    """A file's ids, and how many of its bytes are predicted: all but those of the first id."""

    file: str
    ids: np.ndarray  # int32 [N]
    text_bytes: int


class Window(NamedTuple):
    """Inputs ``begin .. end - 1``, whose next tokens count from input ``first`` on."""

    begin: int
    first: int
    end: int


def read_document(file: Path, coder: Codec) -> Document:
    """A file as a document.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not text, or too short for anything to be predicted.
    """
    text = file.read_bytes()
    ids = coder.encode(text, str(file))
    if len(ids) < 2:
        raise ValueError(f"{file} is too short: there is no token to predict")
    return Document(str(file), np.array(ids, np.int32), len(text) - len(coder.decode(ids[:1])))


def windows(length: int, window: int, stride: int) -> Iterator[Window]:
    """Windows over a document of ``length`` ids; each id but the first is predicted in one."""
    inputs, done = length - 1, 0
    for begin in range(0, inputs, stride):
        end = min(begin + window, inputs)
        yield Window(begin, done, end)
        done = end
        if done == inputs:
            return


def total_nats(
    model: CausalLM, documents: Sequence[Document], window: int, stride: int
) -> list[float]:
    """The nats of every document, under a progress bar if stderr is a terminal."""
    # One shape for all, so that one program is compiled; what is added lies behind and is not seen.
    width = min(window, max(len(each.ids) for each in documents) - 1)
    total = sum(len(each.ids) - 1 for each in documents)
    nats = [0.0] * len(documents)
    with tqdm(total=total, unit="token", disable=None, file=sys.stderr) as bar:
        for i, document in enumerate(documents):
            for begin, first, end in windows(len(document.ids), window, stride):
                inputs = np.zeros((1, width), np.int32)
                targets = np.full((1, width), IGNORE, np.int32)
                inputs[0, : end - begin] = document.ids[begin:end]
                targets[0, first - begin : end - begin] = document.ids[first + 1 : end + 1]
                nats[i] += float(_nats(model, jnp.asarray(inputs), jnp.asarray(targets)))
                bar.update(end - first)
    if not all(map(math.isfinite, nats)):
        raise ValueError("the model's loss is not finite; another --dtype may help")
    return nats


@nnx.jit
def _nats(model, inputs, targets):
    return cross_entropy(model(inputs).logits, targets, ignore_index=IGNORE, reduction="sum")


def summary(nats: float, documents: Sequence[Document]) -> dict[str, Any]:
    """What is told of documents with a loss of ``nats`` together."""
    tokens = sum(len(each.ids) - 1 for each in documents)
    text_bytes = sum(each.text_bytes for each in documents)
    return {
        "tokens": tokens,
        "bytes": text_bytes,
        "perplexity": float(np.exp(nats / tokens)),
        "bits_per_byte": nats / math.log(2) / text_bytes if text_bytes else None,
    }
