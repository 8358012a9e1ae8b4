"""Language-model losses on labels that the model shifts once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jla.ops import segments

IGNORE = -100


def shift_labels(labels: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """The target of each position ``[B, T]``: the label of the next real token of its document.

    -100 where there is none: at padding and at a document's last token.
    """
    if segment_ids is None:
        return jnp.concatenate([labels[:, 1:], jnp.full_like(labels[:, :1], IGNORE)], axis=1)
    ahead = segments.next_real(segment_ids)
    same = segments.take_time(segment_ids, ahead) == segment_ids
    has_next = (segment_ids != 0) & (ahead < segment_ids.shape[1]) & same
    return jnp.where(has_next, segments.take_time(labels, ahead), IGNORE)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy (nats, float32 scalar) over targets that are not -100; 0 if there is none.

    Args:
        logits: ``[..., V]``.
        targets: int ``[...]`` in 0..V-1, or -100; a target beyond the vocabulary gives NaN.
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    counted = targets != IGNORE
    index = jnp.where(counted, targets, 0)
    picked = jnp.take_along_axis(wide, index[..., None], axis=-1, mode="fill")[..., 0]
    picked = jnp.where(index < 0, jnp.nan, picked)
    losses = jnp.where(counted, jax.nn.logsumexp(wide, axis=-1) - picked, 0)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(counted), 1)


def l2_warp(loss: jax.Array, logits: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """``loss``, with FLA's ``l2_warp`` pull on each position's largest logit in the gradient only.

    The gradient of logits ``[B, T, V]`` gains ``1e-4 / (B T) * max`` at the largest entry. Padding
    (0 in ``segment_ids [B, T]``) is neither pulled nor counted in ``B T``; FLA does both, so that
    padding a row there weakens the pull on its tokens.
    """
    if segment_ids is None:
        return _warp(loss, logits, jnp.full(logits.shape[:2], 1 / logits[..., 0].size))
    real = segment_ids != 0
    return _warp(loss, logits, real / jnp.maximum(jnp.sum(real), 1))


@jax.custom_vjp
def _warp(loss, logits, share):
    return loss


def _warp_fwd(loss, logits, share):
    return loss, (logits, share)


def _warp_bwd(saved, dloss):
    logits, share = saved
    top = jnp.max(logits, axis=-1, keepdims=True)
    at_top = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=logits.dtype)
    pull = 1e-4 * dloss * share[..., None] * top * at_top
    return dloss, pull.astype(logits.dtype), jnp.zeros_like(share)


_warp.defvjp(_warp_fwd, _warp_bwd)
