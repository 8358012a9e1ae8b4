"""Losses straight from hidden states: the logits ``[B, T, V]`` of all tokens never exist at once.

Chunk by chunk of tokens, logits are made, turned into a loss and, when gradients are wanted, at
once into the gradients of hidden states and head. The backward only scales these, so that nothing
is computed twice. Sums over chunks are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jla.ops.chunking import accumulator
from jla.ops.loss import IGNORE, check_reduction, token_losses

# Tokens whose logits exist at a time: enough for full matrix products.
CHUNK = 1024


class Head(NamedTuple):
    """``logits = hidden @ kernel + bias``: ``kernel [D, V]``, ``bias [V]`` or None."""

    kernel: jax.Array
    bias: jax.Array | None = None

    def logits(self, hidden: jax.Array, precision) -> jax.Array:
        """``[..., D]`` to ``[..., V]``, summed and returned wide."""
        y = _product("...d,dv->...v", hidden, self.kernel, precision)
        return y if self.bias is None else y + self.bias.astype(y.dtype)


def fused_linear_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    bias: jax.Array | None = None,
    *,
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    lse_square_scale: float = 0.0,
    reduction: str = "mean",
    use_l2warp: bool = False,
    segment_ids: jax.Array | None = None,
    chunk_size: int = CHUNK,
    precision=None,
) -> jax.Array:
    """:func:`jla.ops.cross_entropy` of ``hidden @ kernel + bias`` (FLA's
    ``fused_linear_cross_entropy_loss``).

    Args:
        hidden: ``[B, T, D]``.
        kernel: ``[D, V]``.
        targets: int ``[B, T]`` in 0..V-1, or ``ignore_index``.
        bias: ``[V]`` or None.
        ignore_index, label_smoothing, logit_scale, logit_softcapping, lse_square_scale, reduction:
            see :func:`jla.ops.cross_entropy`.
        use_l2warp: with the gradient of :func:`jla.ops.l2_warp`.
        segment_ids: int ``[B, T]``, for ``use_l2warp``: 0 is padding and not pulled.
        chunk_size: about how many tokens' logits exist at a time.
        precision: of the matrix products.

    Returns:
        float32 scalar.

    Raises:
        ValueError: shapes that disagree, an unknown reduction.
    """
    _check(hidden, kernel)
    _check_shape("targets", targets, hidden.shape[:2])
    _check_shape("bias", bias, kernel.shape[1:])
    check_reduction(reduction)
    counted = targets != ignore_index
    total = jnp.maximum(jnp.sum(counted), 1) if reduction == "mean" else 1
    real = jnp.ones_like(counted) if segment_ids is None else segment_ids != 0
    pull = 1e-4 * real / jnp.maximum(jnp.sum(real), 1) if use_l2warp else None
    loss = _CrossEntropy(
        ignore_index, label_smoothing, logit_scale, logit_softcapping, lse_square_scale
    )
    tokens = (targets, jnp.where(counted, 1 / total, 0), pull)
    return _chunked(_Run(loss, chunk_size, precision), hidden, Head(kernel, bias), tokens, ())


def kl_divergence(
    hidden: jax.Array,
    kernel: jax.Array,
    teacher_hidden: jax.Array,
    teacher_kernel: jax.Array,
    *,
    real: jax.Array | None = None,
    chunk_size: int = CHUNK,
    precision=None,
) -> jax.Array:
    """``KL(teacher || student)`` of next-token distributions, mean over tokens (FLA's
    ``fused_kl_div_loss``).

    Args:
        hidden: ``[B, T, D]``.
        kernel: ``[D, V]``.
        teacher_hidden, teacher_kernel: ``[B, T, D']``, ``[D', V]``; they get no gradient.
        real: bool ``[B, T]``, tokens that count; all if None.
        chunk_size, precision: as in :func:`fused_linear_cross_entropy`.

    Returns:
        float32 scalar in nats.

    Raises:
        ValueError: shapes that disagree.
    """
    _check(hidden, kernel)
    _check(teacher_hidden, teacher_kernel, "teacher_")
    _check_shape("teacher_hidden", teacher_hidden, hidden.shape[:2])
    _check_shape("teacher_kernel", teacher_kernel, (teacher_hidden.shape[2], kernel.shape[1]))
    real = jnp.ones(hidden.shape[:2], bool) if real is None else real
    weights = real / jnp.maximum(jnp.sum(real), 1)
    run = _Run(_KLDivergence(precision), chunk_size, precision)
    return _chunked(run, hidden, Head(kernel), (teacher_hidden, weights), Head(teacher_kernel))


@dataclass(frozen=True)
class _CrossEntropy:
    ignore_index: int
    label_smoothing: float
    logit_scale: float
    logit_softcapping: float | None
    lse_square_scale: float

    def __call__(self, logits, tokens, _) -> jax.Array:
        targets, weights, pull = tokens
        losses = token_losses(
            logits,
            targets,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            logit_scale=self.logit_scale,
            logit_softcapping=self.logit_softcapping,
            lse_square_scale=self.lse_square_scale,
        )
        total = jnp.sum(losses * weights)
        if pull is None:
            return total
        # Adds nothing but a gradient, at the first of the largest logits.
        top = lax.stop_gradient(jnp.argmax(logits, axis=-1, keepdims=True))
        energy = jnp.square(jnp.take_along_axis(logits, top, axis=-1)[..., 0]) / 2
        return total + jnp.sum(pull * (energy - lax.stop_gradient(energy)))


@dataclass(frozen=True)
class _KLDivergence:
    precision: Any

    def __call__(self, logits, tokens, teacher: Head) -> jax.Array:
        hidden, weights = tokens
        theirs = jax.nn.log_softmax(teacher.logits(hidden, self.precision), axis=-1)
        ours = jax.nn.log_softmax(logits, axis=-1)
        return jnp.sum(jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1) * weights)


@dataclass(frozen=True)
class _Run:
    """``loss(logits, tokens, constants) -> scalar`` of a chunk, and how chunks are made."""

    loss: Callable
    chunk_size: int
    precision: Any


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(run: _Run, hidden, head: Head, tokens, constants) -> jax.Array:
    """The sum of ``run.loss`` over chunks of hidden states and ``tokens``, ``[B, T, ...]`` each."""

    def step(total, chunk):
        x, tokens = chunk
        return total + run.loss(head.logits(x, run.precision), tokens, constants), None

    chunks = _chunks(run, (hidden, tokens))
    return lax.scan(step, jnp.zeros((), accumulator(hidden.dtype)), chunks)[0]


def _chunked_fwd(run: _Run, hidden, head: Head, tokens, constants):
    wide = accumulator(hidden.dtype)

    def step(carry, chunk):
        total, gradients = carry
        x, tokens = chunk
        logits = head.logits(x, run.precision)
        value, d = jax.value_and_grad(run.loss)(logits, tokens, constants)
        narrow = d.astype(x.dtype)
        own = Head(
            _product("...d,...v->dv", x, narrow, run.precision),
            None if head.bias is None else jnp.sum(d, axis=(0, 1)),
        )
        dx = _product("...v,dv->...d", narrow, head.kernel, run.precision).astype(x.dtype)
        return (total + value, jax.tree.map(jnp.add, gradients, own)), dx

    zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, wide), head)
    chunks = _chunks(run, (hidden, tokens))
    (total, d_head), dx = lax.scan(step, (jnp.zeros((), wide), zeros), chunks)
    dx = jnp.moveaxis(dx, 0, 1).reshape(hidden.shape[0], -1, hidden.shape[2])
    d_head = jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), d_head, head)
    return total, (dx[:, : hidden.shape[1]], d_head)


def _chunked_bwd(run, gradients, d):
    scaled = jax.tree.map(lambda leaf: (leaf * d).astype(leaf.dtype), gradients)
    return (*scaled, None, None)


_chunked.defvjp(_chunked_fwd, _chunked_bwd)


def _chunks(run: _Run, tree):
    """``[B, T, ...]`` to ``[N, B, C, ...]``, the end filled with zeros: tokens of weight 0.

    Cut along time, so that rows stay where they are on a mesh.
    """

    def cut(x):
        rows, length = x.shape[:2]
        size = min(max(run.chunk_size // rows, 1), length)
        x = jnp.pad(x, ((0, 0), (0, -length % size), *((0, 0) for _ in x.shape[2:])))
        return jnp.moveaxis(x.reshape(rows, -1, size, *x.shape[2:]), 1, 0)

    return jax.tree.map(cut, tree)


def _product(spec, a, b, precision):
    wide = accumulator(a.dtype)
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=wide)


def _check(hidden, kernel, prefix=""):
    if hidden.ndim != 3:
        raise ValueError(f"{prefix}hidden must be [B, T, D], got shape {hidden.shape}")
    if kernel.ndim != 2 or kernel.shape[0] != hidden.shape[2]:
        raise ValueError(
            f"{prefix}kernel must be [D, V] with D={hidden.shape[2]}, got shape {kernel.shape}"
        )


def _check_shape(name, x, start):
    if x is not None and x.shape[: len(start)] != start:
        raise ValueError(f"{name} must start with {start}, got shape {x.shape}")
