"""Continues prompts: one prefill and one compiled loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.core import Tracer

from jla.generation.sampling import Sampling, choose, penalise_repetition
from jla.models import CausalLM
from jla.models.causal_lm import documents
from jla.models.decoder import check_input_ids
from jla.ops import segments

Stream = Callable[[np.ndarray], None]
_FROM_CONFIG: Any = object()


class _Stop(NamedTuple):
    """Static settings of the loop."""

    max_new_tokens: int
    eos: tuple[int, ...]
    pad: int
    stream: Stream | None


class _Carry(NamedTuple):
    step: jax.Array
    tokens: jax.Array  # int32 [B, max_new_tokens]
    logits: jax.Array  # [B, V] of the token to choose next
    cache: Any
    done: jax.Array  # bool [B]
    seen: jax.Array | None  # bool [B, V], only for a repetition penalty


def generate(
    model: CausalLM,
    input_ids: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    max_new_tokens: int = 32,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    eos_token_id: int | Sequence[int] | None = _FROM_CONFIG,
    pad_token_id: int | None = None,
    key: jax.Array | int | None = None,
    cache: Any = None,
    attention_mask: jax.Array | None = None,
    stream: Stream | None = None,
) -> jax.Array:
    """Continues every row of ``input_ids``: greedily, or by sampling if that is asked for.

    The whole generation is one compiled program. Rows may be padded left, right or inside; a row
    with several documents continues its last one.

    Args:
        model: a causal language model.
        input_ids: int ``[B, T]`` prompts.
        segment_ids: int ``[B, T]``, 0 = padding.
        max_new_tokens: columns to add.
        do_sample: True draws tokens, False takes the likeliest; None draws iff one of the next four
            is given. ``temperature=0`` is greedy.
        temperature, top_k, top_p, min_p: see :class:`jla.generation.Sampling`.
        repetition_penalty: above 1 makes tokens of the row's current document less likely.
        eos_token_id: a row stops after one of these; the config's if not given, ``()`` or None
            never stops.
        pad_token_id: fills a stopped row; the config's, else the first EOS, else 0.
        key: for sampling, a ``jax.random`` key, a seed, or a key per row ``[B]``. From one key each
            row draws with ``fold_in(key, row)``, so a row's text does not depend on the batch.
        cache: continues this cache (a shared prefix, say) instead of a new one.
        attention_mask: Hugging Face's, 0 = padding; adds padding to ``segment_ids``.
        stream: called on the host with the tokens int32 ``[B]`` of every step, in order.

    Returns:
        int32 ``[B, T + max_new_tokens]``: the prompts as given, then the new tokens from column T
        on, whichever side was padded.

    Raises:
        ValueError: a row without a real token, a value out of range, sampling without a key or
            sampling options with ``do_sample=False``, a cache with too little room.
    """
    check_input_ids(input_ids, model.config.vocab_size)
    shape = jnp.shape(input_ids)
    segment_ids = documents(segment_ids, attention_mask, shape)
    _check_prompts(segment_ids, shape)
    if not _is_integer(max_new_tokens) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be an integer of at least 0, got {max_new_tokens}")
    sampling = _sampling(do_sample, temperature, top_k, top_p, min_p)
    if repetition_penalty is not None and not repetition_penalty > 0:
        raise ValueError(f"repetition_penalty must be above 0, got {repetition_penalty}")
    keys = None if sampling is None else _row_keys(key, shape[0])
    _check_room(model, cache, shape[1] + max_new_tokens)
    input_ids = jnp.asarray(input_ids, jnp.int32)
    if max_new_tokens == 0:
        return input_ids
    stop = _stop(model.config, max_new_tokens, eos_token_id, pad_token_id, stream)
    graphdef, state = nnx.split(model)
    tokens = _run(
        graphdef,
        state,
        input_ids,
        segment_ids,
        cache,
        keys,
        sampling,
        repetition_penalty,
        stop=stop,
    )
    if stream is not None:
        jax.effects_barrier()
    return tokens


@partial(jax.jit, static_argnums=(0,), static_argnames=("stop",))
def _run(graphdef, state, input_ids, segment_ids, cache, keys, sampling, penalty, *, stop):
    model = nnx.merge(graphdef, state)
    carry = _prefill(model, input_ids, segment_ids, cache, penalty, stop)

    def unfinished(carry):
        return (carry.step < stop.max_new_tokens) & ~jnp.all(carry.done)

    def advance(carry):
        chosen, carry = _choose(carry, keys, sampling, penalty, stop)
        # The last token's logits are not needed, but a loop body has one shape: its cost is 1 / N.
        out = model(chosen[:, None], cache=carry.cache)
        return carry._replace(logits=out.logits[:, 0], cache=out.cache)

    carry = lax.while_loop(unfinished, advance, carry)
    return jnp.concatenate([input_ids, carry.tokens], axis=1)


def _prefill(model, input_ids, segment_ids, cache, penalty, stop) -> _Carry:
    batch, length = input_ids.shape
    if cache is None:
        cache = model.new_cache(batch, length + stop.max_new_tokens)
    out = model.model(input_ids, segment_ids=segment_ids, cache=cache)
    real = jnp.ones(input_ids.shape, bool) if segment_ids is None else segment_ids != 0
    last = length - 1 - jnp.argmax(real[:, ::-1], axis=1)
    # Only the last real token's logits: [B, T, V] would be the largest array of all.
    logits = model.logits(segments.take_time(out.last_hidden_state, last[:, None]))[:, 0]
    seen = None
    if penalty is not None:
        if segment_ids is not None:
            document = segments.document_index(segment_ids)
            real = real & (document == document[:, -1:])
        seen = _mark(jnp.zeros(logits.shape, bool), input_ids, real)
    tokens = jnp.full((batch, stop.max_new_tokens), stop.pad, jnp.int32)
    return _Carry(jnp.int32(0), tokens, logits, out.cache, jnp.zeros((batch,), bool), seen)


def _choose(carry: _Carry, keys, sampling, penalty, stop: _Stop):
    logits = carry.logits
    if carry.seen is not None:
        logits = penalise_repetition(logits, carry.seen, penalty)
    if keys is not None:
        keys = jax.vmap(lambda key: jax.random.fold_in(key, carry.step))(keys)
    chosen = jnp.where(carry.done, stop.pad, choose(logits, keys, sampling))
    done = carry.done | jnp.isin(chosen, jnp.array(stop.eos, jnp.int32))
    tokens = lax.dynamic_update_index_in_dim(carry.tokens, chosen, carry.step, axis=1)
    if stop.stream is not None:
        jax.debug.callback(stop.stream, chosen, ordered=True)
    seen = carry.seen
    if seen is not None:
        seen = _mark(seen, chosen[:, None], ~carry.done[:, None])
    return chosen, carry._replace(step=carry.step + 1, tokens=tokens, done=done, seen=seen)


def _mark(seen, tokens, real):
    """Adds the real ``tokens [B, T]`` to the sets ``seen [B, V]``."""
    drop = jnp.where(real, tokens, seen.shape[1])
    return jax.vmap(lambda row, at: row.at[at].set(True, mode="drop"))(seen, drop)


def _sampling(do_sample, temperature, top_k, top_p, min_p) -> Sampling | None:
    given = Sampling(temperature, top_k, top_p, min_p)
    asked = any(value is not None for value in given)
    if do_sample is False:
        if asked and temperature != 0:
            raise ValueError(
                f"do_sample=False takes the likeliest token, yet sampling is described: {given}"
            )
        return None
    if temperature == 0 or not (asked or do_sample):
        return None
    allowed = {
        "temperature": (temperature, lambda x: x > 0, "at least 0"),
        "top_k": (top_k, lambda x: x >= 1, "at least 1"),
        "top_p": (top_p, lambda x: 0 < x <= 1, "above 0 and at most 1"),
        "min_p": (min_p, lambda x: 0 <= x <= 1, "between 0 and 1"),
    }
    for name, (value, fits, accepted) in allowed.items():
        if value is not None and not fits(value):
            raise ValueError(f"{name} must be {accepted}, got {value}")
    return given


def _is_integer(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _row_keys(key, batch: int) -> jax.Array:
    if key is None:
        raise ValueError("sampling needs key: a jax.random key, a seed, or a key per row")
    if _is_integer(key):
        key = jax.random.key(key)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim == 0:
        return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))
    if key.shape != (batch,):
        raise ValueError(f"key must be one key or one per row [{batch}], got shape {key.shape}")
    return key


def _stop(config, max_new_tokens, eos_token_id, pad_token_id, stream) -> _Stop:
    eos = config.eos_token_id if eos_token_id is _FROM_CONFIG else eos_token_id
    eos = () if eos is None else tuple(int(e) for e in np.atleast_1d(eos))
    pad = config.pad_token_id if pad_token_id is None else pad_token_id
    if pad is None:
        pad = eos[0] if eos else 0
    return _Stop(int(max_new_tokens), eos, int(pad), stream)


def _check_prompts(segment_ids, shape):
    if shape[1] == 0:
        raise ValueError(f"input_ids must have at least one token a row, got shape {shape}")
    if segment_ids is None or isinstance(segment_ids, Tracer):
        return
    empty = np.flatnonzero(~np.any(np.asarray(segment_ids) != 0, axis=1))
    if empty.size:
        raise ValueError(f"rows {empty.tolist()} are all padding: there is no prompt to continue")


def _check_room(model, cache, tokens):
    room = None if cache is None else model.model.room(cache)
    if room is None or isinstance(room, Tracer):
        return
    if int(np.min(np.asarray(room))) < tokens:
        raise ValueError(
            f"cache has room for {int(np.min(np.asarray(room)))} more tokens in its fullest row, "
            f"the prompts and max_new_tokens need {tokens}: make it with a larger max_length"
        )
