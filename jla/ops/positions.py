"""Positions of tokens in their documents when a document comes in pieces."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jla.ops.segments import document_index, document_positions, take_time


class Place(NamedTuple):
    """Where a piece's tokens stand in their documents, what came before the piece included.

    Attributes:
        position: int32 ``[B, T]`` in the document.
        kept: bool ``[B, T]``, real tokens of the document that the piece ends in.
        length: int32 ``[B]``, real tokens of that document so far; ``[B, S]``, of their documents
            up to chosen tokens, where these were asked for.
    """

    position: jax.Array
    kept: jax.Array
    length: jax.Array


def locate(
    shape: tuple[int, ...], segment_ids, before: jax.Array | None, chosen: jax.Array | None = None
) -> Place:
    """Counts a piece's tokens ``[B, T]``; ``before [B]`` came before it, None for none.

    ``segment_ids`` is int32 ``[B, T]`` or None, all real tokens of the same document; ``chosen``
    are real tokens ``[B, S]`` or None, the last one.
    """
    place = _locate(shape, segment_ids, before)
    if chosen is None:
        return place
    return place._replace(length=take_time(place.position, chosen) + 1)


def _locate(shape, segment_ids, before) -> Place:
    if before is None:
        # Built from the ids so that it is placed as they are, on Explicit axes.
        zeros = jnp.zeros((shape[0],), jnp.int32)
        before = zeros if segment_ids is None else jnp.zeros_like(segment_ids[:, 0])
    if segment_ids is None:
        position = before[:, None] + jnp.arange(shape[1], dtype=jnp.int32)
        return Place(position, jnp.ones(shape, bool), before + shape[1])
    document = document_index(segment_ids)
    position = document_positions(segment_ids) + jnp.where(document == 0, before[:, None], 0)
    kept = (segment_ids != 0) & (document == document[:, -1:])
    length = jnp.max(jnp.where(kept, position + 1, 0), axis=1)
    return Place(position, kept, jnp.where(kept.any(axis=1), length, before))
