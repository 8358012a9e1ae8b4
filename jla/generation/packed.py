"""One cache per document from rows of packed prompts."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jla.models import CausalLM
from jla.ops.segments import check_segment_ids, document_starts


class Prefilled(NamedTuple):
    """What was seen of N documents.

    Attributes:
        logits: ``[N, V]`` of each document's next token.
        cache: a row per document, in the order of rows and, within them, of time.
    """

    logits: jax.Array
    cache: Any


def prefill_packed(
    model: CausalLM,
    input_ids: jax.Array,
    segment_ids: jax.Array,
    *,
    max_length: int | None = None,
) -> Prefilled:
    """Reads packed prompts and gives each a cache row of its own, to be continued apart.

    Every document is read in a row of its own, padded behind to the longest one: prompts of much
    different lengths cost as many tokens as that padding adds.

    Args:
        model: a causal language model.
        input_ids: int ``[B, T]``.
        segment_ids: int ``[B, T]``, 0 = padding, a change = new document; concrete, because they
            decide how many rows there are.
        max_length: tokens of one document that the cache must hold, those to come included; the
            longest prompt's if None. Only attention layers need it.

    Raises:
        ValueError: shapes that disagree, no document at all, or a ``max_length`` below a prompt's.
        TypeError: traced ``segment_ids``.

    Example:
        ``logits, cache = prefill_packed(model, ids, segment_ids, max_length=64)``, then
        ``model(next_ids[:, None], cache=cache)`` continues all documents at once.
    """
    index, lengths = _rows(segment_ids, jnp.shape(input_ids))
    longest = index.shape[1]
    if max_length is not None and max_length < longest:
        raise ValueError(f"max_length={max_length} is below the longest prompt's {longest}")
    documents = jnp.asarray(input_ids).reshape(-1)[index]
    real = jnp.arange(longest) < jnp.asarray(lengths)[:, None]
    cache = model.new_cache(len(index), max_length or longest)
    out = model.model(documents, segment_ids=real.astype(jnp.int32), cache=cache)
    last = out.last_hidden_state[jnp.arange(len(index)), lengths - 1]
    return Prefilled(model.logits(last), out.cache)


def _rows(segment_ids, shape) -> tuple[np.ndarray, np.ndarray]:
    """Flat positions ``[N, L]`` of every document's tokens, left-aligned, and lengths ``[N]``."""
    if isinstance(segment_ids, Tracer):
        raise TypeError("segment_ids must be concrete: they decide how many rows the cache has")
    ids = check_segment_ids(segment_ids, shape)
    starts, ids = np.array(document_starts(ids)), np.asarray(ids)
    some = np.any(ids != 0, axis=1)
    starts[some, np.argmax(ids != 0, axis=1)[some]] = True  # the row's first document starts too
    number = np.cumsum(starts.reshape(-1)) - 1
    positions = np.flatnonzero(ids.reshape(-1))
    if not positions.size:
        raise ValueError("segment_ids has no document: every token is padding")
    lengths = np.bincount(number[positions])
    within = np.arange(positions.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    index = np.zeros((len(lengths), lengths.max()), np.int64)
    index[number[positions], within] = positions
    return index, lengths
