"""One cache per document from rows of packed prompts."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jla.models import CausalLM
from jla.ops import segments


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

    The rows are read once, as they are; every mixer tells its state at the documents' ends, from
    which the rows of the cache are gathered.

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
        ImplUnavailable: the model names an implementation that tells no states on the way.

    Example:
        ``logits, cache = prefill_packed(model, ids, segment_ids, max_length=64)``, then
        ``model(next_ids[:, None], cache=cache)`` continues all documents at once.
    """
    ends = segments.document_ends(segment_ids, jnp.shape(input_ids))
    segment_ids = jnp.asarray(segment_ids, jnp.int32)
    longest = 1 + int(jnp.max(segments.document_positions(segment_ids)))
    if max_length is not None and max_length < longest:
        raise ValueError(f"max_length={max_length} is below the longest prompt's {longest}")
    cache = model.new_cache(len(segment_ids), max_length or longest)
    out = model.model(input_ids, segment_ids=segment_ids, cache=cache, ends=ends)
    hidden = segments.take_time(out.last_hidden_state, ends.time)
    return Prefilled(model.logits(hidden.reshape(-1, hidden.shape[-1])[ends.rows]), out.cache)
