"""From logits to the next token: greedy, or drawn from a filtered distribution."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sampling(NamedTuple):
    """Filters of the next token's distribution, applied in this order (Transformers' order).

    A filter that is None is left out. Values may be traced: changing one does not recompile.

    Attributes:
        temperature: divides the logits.
        top_k: keeps so many most likely tokens (ties with the last one stay).
        top_p: keeps the smallest set of most likely tokens that holds this probability.
        min_p: keeps tokens at least this fraction as likely as the likeliest.
    """

    temperature: jax.Array | float | None = None
    top_k: jax.Array | int | None = None
    top_p: jax.Array | float | None = None
    min_p: jax.Array | float | None = None


def penalise_repetition(logits: jax.Array, seen: jax.Array, penalty) -> jax.Array:
    """Makes tokens of ``seen`` (bool ``[B, V]``) less likely (CTRL, arXiv:1909.05858).

    Their logits are divided by ``penalty`` where positive and multiplied by it where negative.
    """
    weaker = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen, weaker, logits)


def filter_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """``[B, V]`` logits with every token that a filter drops at ``-inf``."""
    if sampling.temperature is not None:
        logits = logits / sampling.temperature
    if sampling.top_k is not None:
        last = jnp.minimum(sampling.top_k, logits.shape[-1]) - 1
        descending = jnp.sort(logits, axis=-1, descending=True)
        logits = _keep(logits, logits >= jnp.take(descending, last, axis=-1)[:, None])
    if sampling.top_p is not None:
        logits = _keep(logits, _in_nucleus(logits, sampling.top_p))
    if sampling.min_p is not None:
        likely = jax.nn.softmax(logits, axis=-1)
        top = jnp.max(likely, axis=-1, keepdims=True)
        logits = _keep(logits, likely >= sampling.min_p * top)
    return logits


def choose(logits: jax.Array, keys: jax.Array | None, sampling: Sampling | None) -> jax.Array:
    """The next token int32 ``[B]``: the likeliest without ``sampling``, else drawn, a key a row."""
    if sampling is None or keys is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    filtered = filter_logits(logits.astype(jnp.float32), sampling)
    return jax.vmap(jax.random.categorical)(keys, filtered).astype(jnp.int32)


def _keep(logits, kept):
    return jnp.where(kept, logits, -jnp.inf)


def _in_nucleus(logits, top_p):
    order = jnp.argsort(logits, axis=-1, descending=True)
    likely = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    # A token stays if those before it do not hold top_p yet; the likeliest always stays.
    before = jnp.cumsum(likely, axis=-1) - likely
    kept = (before < top_p).at[:, 0].set(True)
    return jnp.put_along_axis(jnp.zeros_like(kept), order, kept, axis=-1, inplace=False)
