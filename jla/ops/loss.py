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


def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    *,
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
) -> jax.Array:
    """Cross entropy (nats, float32 scalar) over targets that count; 0 if there is none.

    Args:
        logits: ``[..., V]``.
        targets: int ``[...]`` in 0..V-1, or ``ignore_index``; a target beyond the vocabulary gives
            NaN.
        ignore_index: the target that does not count.
        label_smoothing: share of the target that is spread over the vocabulary.
        logit_scale: factor of the logits.
        logit_softcapping: c of ``c tanh(logits / c)``, after the scale; None leaves them.
        lse_square_scale: factor of ``logsumexp^2`` that is added (z-loss, arXiv:2204.02311).
        reduction: ``"mean"`` over targets that count, or ``"sum"``.

    Raises:
        ValueError: an unknown reduction.
    """
    check_reduction(reduction)
    losses = token_losses(
        logits,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        logit_scale=logit_scale,
        logit_softcapping=logit_softcapping,
        lse_square_scale=lse_square_scale,
    )
    counted = jnp.sum(targets != ignore_index) if reduction == "mean" else 1
    return jnp.sum(losses) / jnp.maximum(counted, 1)


def token_losses(
    logits,
    targets,
    *,
    ignore_index,
    label_smoothing,
    logit_scale,
    logit_softcapping,
    lse_square_scale,
) -> jax.Array:
    """The loss ``[...]`` of every token, 0 where it does not count; see :func:`cross_entropy`."""
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32)) * logit_scale
    if logit_softcapping is not None:
        wide = logit_softcapping * jnp.tanh(wide / logit_softcapping)
    counted = targets != ignore_index
    index = jnp.where(counted, targets, 0)
    picked = jnp.take_along_axis(wide, index[..., None], axis=-1, mode="fill")[..., 0]
    picked = jnp.where(index < 0, jnp.nan, picked)
    if label_smoothing:
        spread = jnp.mean(wide, axis=-1)
        picked = (1 - label_smoothing) * picked + label_smoothing * spread
    total = jax.nn.logsumexp(wide, axis=-1)
    return jnp.where(counted, total - picked + lse_square_scale * total**2, 0)


def check_reduction(reduction: str) -> None:
    """Raises ValueError unless ``reduction`` is ``"mean"`` or ``"sum"``."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")


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
