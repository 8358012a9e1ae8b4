"""A language model behind the call that tunix' trainers make (https://github.com/google/tunix).

tunix itself is not needed here.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from jla.models import CausalLM
from jla.ops.segments import check_segment_ids, document_index


class TunixModel(nnx.Module):
    """What a tunix trainer takes as its model: its calls give ``(logits, cache)``.

    tunix tells documents and padding by masks ``[B, T, T]``, a mixer by ``segment_ids [B, T]``: one
    is read as the other. Generating and saving are up to ``model`` itself.

    Args:
        model: a causal language model, trained in place.
    """

    def __init__(self, model: CausalLM):
        self.model = model

    def __call__(
        self,
        input_tokens: jax.Array,
        positions: jax.Array | None = None,
        cache: None = None,
        attention_mask: jax.Array | None = None,
        *,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:
        """Logits ``[B, T, V]`` of the next tokens, and None.

        Args:
            input_tokens: int ``[B, T]``.
            positions: int ``[B, T]``, passed on; counted within documents if None.
            cache: must be None, as it is in training.
            attention_mask: bool ``[B, T, T]``, what each token sees: itself and the real tokens of
                its document before it. What padding sees is its own business. Rows of a traced mask
                that say something else give NaN. A causal model of whole rows if None.
            segment_ids: int ``[B, T]``, 0 = padding, a change = new document; where a mask is given
                too they must agree.

        Raises:
            ValueError: a cache, shapes that disagree, or a concrete mask of another kind.
        """
        if cache is not None:
            raise ValueError(
                "cache must be None: this call is for training; TunixModel.model.generate "
                "continues prompts"
            )
        shape = jnp.shape(input_tokens)
        if segment_ids is not None:
            segment_ids = check_segment_ids(segment_ids, shape)
        if attention_mask is None:
            return self._logits(input_tokens, segment_ids, positions), None
        if jnp.shape(attention_mask) != (*shape, shape[1]):
            raise ValueError(
                f"attention_mask must be [B, T, T] = {(*shape, shape[1])}, "
                f"got shape {jnp.shape(attention_mask)}"
            )
        mask = jnp.asarray(attention_mask).astype(bool)
        if segment_ids is None:
            segment_ids = segment_ids_from_mask(mask)
        fits = _describes(segment_ids, mask)
        if not isinstance(fits, Tracer) and not fits.all():
            rows = np.flatnonzero(~np.asarray(fits)).tolist()
            raise ValueError(
                f"attention_mask of rows {rows} is not that of a causal model of documents: "
                "a token sees itself and the real tokens of its "
                "document before it, and documents lie one behind the other"
            )
        logits = self._logits(input_tokens, segment_ids, positions)
        return jnp.where(fits[:, None, None], logits, jnp.nan), None

    def _logits(self, input_tokens, segment_ids, positions) -> Any:
        return self.model(input_tokens, segment_ids, positions).logits


def segment_ids_from_mask(mask: jax.Array) -> jax.Array:
    """``segment_ids`` int32 ``[B, T]`` of a mask bool ``[B, T, T]``, if it is one of documents.

    A document is named by the first token that its tokens see; what does not see itself is padding.
    """
    real = jnp.diagonal(mask, axis1=1, axis2=2)
    first = jnp.argmax(mask, axis=2).astype(jnp.int32)
    return jnp.where(real, first + 1, 0)


def _describes(segment_ids: jax.Array, mask: jax.Array) -> jax.Array:
    """Whether ``segment_ids [B, T]`` say of every real token what ``mask`` says, bool ``[B]``."""
    time, document = jnp.arange(mask.shape[1]), document_index(segment_ids)
    real = segment_ids != 0
    seen = (time <= time[:, None]) & (document[:, None, :] == document[:, :, None])
    seen = seen & real[:, None, :]
    padding = ~jnp.diagonal(mask, axis1=1, axis2=2) & ~real
    return jnp.all((seen == mask) | padding[:, :, None], axis=(1, 2))
