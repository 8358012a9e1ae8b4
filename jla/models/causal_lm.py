"""A decoder with a language-model head: loss, generation, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jla.models.config import Config
from jla.models.decoder import Decoder
from jla.nn import init
from jla.ops import cross_entropy, fused_linear_cross_entropy, l2_warp, shift_labels
from jla.ops.segments import check_segment_ids


class CausalLMOutput(NamedTuple):
    """What a call returns.

    Attributes:
        logits: ``[B, T, V]``, or the last ``logits_to_keep`` positions; None where a loss is made
            with the config's ``fuse_linear_cross_entropy``.
        loss: float32 scalar, None without labels.
        cache: the cache after the call, None unless one was given.
        hidden_states: with ``output_hidden_states``, the input of every layer and the last state.
    """

    logits: jax.Array | None
    loss: jax.Array | None = None
    cache: Any = None
    hidden_states: tuple[jax.Array, ...] | None = None


class CausalLM(nnx.Module):
    """A causal language model. A family sets ``model_class``; FLA's names throughout.

    ``checkpoint_names`` as in :class:`jla.models.block.Block`.

    Args:
        config: of the family.
        dtype, param_dtype, precision, scan_layers, remat: see :class:`jla.models.decoder.Decoder`.
        rngs: ``params`` stream.
    """

    model_class: ClassVar[type[Decoder]]
    checkpoint_names: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        config: Config,
        *,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        scan_layers: bool = False,
        remat: bool | Callable = False,
        rngs: nnx.Rngs,
    ):
        self.model = self.model_class(
            config,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            scan_layers=scan_layers,
            remat=remat,
            rngs=rngs,
        )
        self.config = config
        if not config.tie_word_embeddings:
            head_init = self.model.head_init(config)
            linear = init.linear(dtype, param_dtype, precision, head_init, rngs)
            self.lm_head = linear(config.hidden_size, config.vocab_size)

    def __call__(
        self,
        input_ids: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        labels: jax.Array | None = None,
        cache: Any = None,
        *,
        attention_mask: jax.Array | None = None,
        inputs_embeds: jax.Array | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
    ) -> CausalLMOutput:
        """Logits of the next token at every position, and the loss of labels.

        Args:
            input_ids: int ``[B, T]``.
            segment_ids: int ``[B, T]``, 0 = padding, a change = new document.
            positions: int ``[B, T]``; real tokens of the document are counted if None.
            labels: int ``[B, T]``, usually ``input_ids``: the loss shifts them, once. -100, padding
                and what lies across a document's end are ignored; none left gives a loss of 0.
            cache: what :meth:`new_cache` or an earlier call returned; any T >= 1.
            attention_mask: Hugging Face's, 0 = padding; only adds padding to ``segment_ids``.
            inputs_embeds: ``[B, T, D]`` instead of ``input_ids``.
            logits_to_keep: only so many last positions; 0 keeps all, labels always need all.
            output_hidden_states: also return every layer's input.

        Raises:
            TypeError, ValueError: see :func:`jla.models.decoder.embed`; shapes that disagree.
        """
        given = input_ids if inputs_embeds is None else inputs_embeds
        shape = jnp.shape(given)[:2] if given is not None else ()
        segment_ids = documents(segment_ids, attention_mask, shape)
        if labels is not None and jnp.shape(labels) != shape:
            raise ValueError(f"labels must be [B, T] = {shape}, got shape {jnp.shape(labels)}")
        out = self.model(
            input_ids,
            segment_ids=segment_ids,
            positions=positions,
            cache=cache,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
        )
        hidden = out.last_hidden_state
        if logits_to_keep and labels is None:
            hidden = hidden[:, -logits_to_keep:]
        logits, loss = self._logits_and_loss(hidden, labels, segment_ids)
        return CausalLMOutput(logits, loss, out.cache, out.hidden_states)

    def _logits_and_loss(self, hidden, labels, segment_ids):
        if labels is None:
            return self.logits(hidden), None
        targets = shift_labels(jnp.asarray(labels), segment_ids)
        if self.config.fuse_linear_cross_entropy:
            return None, fused_linear_cross_entropy(
                *self._head(hidden),
                targets,
                use_l2warp=self.config.use_l2warp,
                segment_ids=segment_ids,
            )
        logits = self.logits(hidden)
        loss = cross_entropy(logits, targets)
        return logits, l2_warp(loss, logits, segment_ids) if self.config.use_l2warp else loss

    def logits(self, hidden: jax.Array) -> jax.Array:
        """``[..., D]`` last hidden states to ``[..., V]``."""
        if self.config.tie_word_embeddings:
            return self.model.embeddings.attend(hidden)
        return self.lm_head(hidden)

    def _head(self, hidden) -> tuple[jax.Array, jax.Array]:
        """Hidden states and the head's kernel ``[D, V]`` in the dtype of their product."""
        tied = self.config.tie_word_embeddings
        kernel = self.model.embeddings.embedding[...].T if tied else self.lm_head.kernel[...]
        dtype = self.model.dtype or jnp.result_type(hidden, kernel)
        return hidden.astype(dtype), kernel.astype(dtype)

    def new_cache(self, batch_size: int, max_length: int | None = None, *, dtype=None):
        """The cache before any token, a plain pytree.

        Args:
            batch_size: rows.
            max_length: tokens of one document it must hold; only attention layers need it.
            dtype: of windows, keys and values; the compute dtype if None.
        """
        return self.model.new_cache(batch_size, max_length, dtype=dtype)

    def generate(self, input_ids, segment_ids=None, **options) -> jax.Array:
        """Continues prompts; see :func:`jla.generation.generate` for all options."""
        from jla.generation import generate

        return generate(self, input_ids, segment_ids, **options)

    def prefill_packed(self, input_ids, segment_ids, *, max_length: int | None = None):
        """One cache row per packed prompt; see :func:`jla.generation.prefill_packed`."""
        from jla.generation import prefill_packed

        return prefill_packed(self, input_ids, segment_ids, max_length=max_length)

    @classmethod
    def from_pretrained(cls, folder_or_repo_id: str | os.PathLike, **options) -> Self:
        """Loads a checkpoint; see :func:`jla.convert.from_pretrained` for all options."""
        from jla.convert import from_pretrained

        return from_pretrained(cls, folder_or_repo_id, **options)

    def save_pretrained(self, folder: str | os.PathLike, **options) -> None:
        """Writes a checkpoint as FLA does; see :func:`jla.convert.save_pretrained`."""
        from jla.convert import save_pretrained

        save_pretrained(self, folder, **options)


def documents(segment_ids, attention_mask, shape) -> jax.Array | None:
    """``segment_ids`` with the padding that ``attention_mask`` adds, both ``[B, T]`` or None."""
    if segment_ids is not None:
        segment_ids = check_segment_ids(segment_ids, shape)
    if attention_mask is None:
        return segment_ids
    if jnp.shape(attention_mask) != shape:
        raise ValueError(
            f"attention_mask must be [B, T] = {shape}, got shape {jnp.shape(attention_mask)}"
        )
    mask = check_segment_ids(attention_mask, shape)
    return mask if segment_ids is None else jnp.where(mask != 0, segment_ids, 0)
