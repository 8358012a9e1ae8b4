"""A model of lm-evaluation-harness: its three kinds of request, in batches of ragged rows.

Rows are padded behind, so a row's numbers depend neither on its batch nor on its neighbours, and
lengths are rounded up, so that few programs are compiled.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from jla.eval.tokens import Codec
from jla.models import CausalLM
from jla.ops.segments import take_time

GREEDY = ("do_sample", "repetition_penalty")
OPTIONS = (*GREEDY, "temperature", "top_k", "top_p", "min_p")  # of jla.generation.generate

log = logging.getLogger(__name__)


class Scored(NamedTuple):
    """A row: all its ids, and how many of the last are predicted."""

    ids: list[int]
    predicted: int


class Generation(NamedTuple):
    """What requests have in common that are continued together."""

    until: tuple[str, ...]
    max_new_tokens: int
    options: tuple[tuple[str, Any], ...]  # of jla.generation.generate


class HarnessLM(TemplateLM):
    """What ``lm_eval.simple_evaluate(model=...)`` takes.

    Args:
        model: a causal language model.
        codec: text to ids and back, :class:`jla.eval.ByteCodec` or
            :class:`jla.eval.TokenizerCodec`.
        batch_size: rows of a batch.
        max_length: tokens that are read at once: longer contexts lose their beginning, longer
            documents are read in windows. The config's ``max_position_embeddings`` if None, 2048
            if it has none.
        seed: of the draws, where a task asks for sampling.

    Raises:
        ValueError: a batch size or length below 1, a codec without a prefix, or a request that
            cannot be met: it asks for more new tokens than ``max_length`` has room for, or for a
            way of generating that is not known.
    """

    max_gen_toks = 256  # where a task names no number, as in the harness' own models

    def __init__(
        self,
        model: CausalLM,
        codec: Codec,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        seed: int = 0,
    ):
        super().__init__()
        max_length = max_length or model.config.max_position_embeddings or 2048
        for name, value in {"batch_size": batch_size, "max_length": max_length}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if codec.prefix is None:
            raise ValueError("the tokenizer has neither BOS nor EOS to stand before a text")
        self.model, self.codec, self.prefix = model, codec, codec.prefix
        self.batch_size, self.max_length, self.seed = batch_size, max_length, seed
        self._known_stops: dict[tuple[str, ...], tuple[int, ...]] = {}

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        return self.prefix

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text; the prefix if the config names none."""
        return next(iter(self._ends), self.prefix)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text, those that open a document included unless told otherwise."""
        return self.codec.encode(
            string.encode(), "a request", special=add_special_tokens is not False
        )

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Of every continuation, and whether greedy decoding would have made it."""
        return super().loglikelihood(requests, disable_tqdm=True)  # of encoding; scoring has a bar

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Of every whole text, in windows of ``max_length`` tokens that predict each token once."""
        texts = [request.args[0] for request in requests]
        windows = [self._windows(text) for text in texts]
        scores = iter(self._scores(itertools.chain(*windows)))
        totals = [sum(total for total, _ in itertools.islice(scores, len(w))) for w in windows]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to the first of the request's stop strings."""
        alike = collections.defaultdict(list)
        for i, request in enumerate(requests):
            arguments: Any = request.args
            alike[self._generation(arguments[1])].append(i)
        texts = [""] * len(requests)
        with bar("generate", len(requests)) as done:
            for settings, members in alike.items():
                prompts = {i: self._prompt(requests[i].args[0], settings) for i in members}
                for batch in self._batches({i: len(ids) for i, ids in prompts.items()}):
                    rows = self._continue([prompts[i] for i in batch], batch, settings)
                    for i, ids in zip(batch, rows, strict=True):
                        texts[i] = self._text(ids, settings)
                        self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
                    done.update(len(batch))
        return texts

    def _loglikelihood_tokens(self, requests, **kwargs) -> list[tuple[float, bool]]:
        rows = [self._scored(context, continuation) for _, context, continuation in requests]
        scores = self._scores(rows)
        for (texts, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def _scored(self, context: list[int], continuation: list[int]) -> Scored:
        if len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens exceeds max_length={self.max_length}"
            )
        ids = [*(context or [self.prefix]), *continuation]
        return Scored(self._cut(ids, self.max_length + 1), len(continuation))

    def _cut(self, ids: list[int], length: int) -> list[int]:
        if len(ids) > length:
            log.warning("a context of %d tokens was cut to its last %d", len(ids), length)
        return ids[-length:]

    def _windows(self, text: str) -> list[Scored]:
        pairs = get_rolling_token_windows(
            self.tok_encode(text, add_special_tokens=False),
            prefix_token=self.prefix,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [self._scored(*make_disjoint_window(pair)) for pair in pairs]

    def _scores(self, rows: Iterable[Scored]) -> list[tuple[float, bool]]:
        rows = list(rows)
        scores = [(0.0, True)] * len(rows)
        with bar("score", len(rows)) as done:
            for batch in self._batches({i: len(row.ids) for i, row in enumerate(rows)}):
                for i, score in zip(batch, self._score([rows[i] for i in batch]), strict=True):
                    scores[i] = score
                done.update(len(batch))
        return scores

    def _score(self, rows: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Log-likelihood of the predicted ids of each row, and whether each is the likeliest."""
        inputs, _ = self._padded([row.ids[:-1] for row in rows])
        width = min(max(32, power_of_two(max(row.predicted for row in rows))), inputs.shape[1])
        at, targets = np.zeros((2, len(inputs), width), np.int32)
        for i, (ids, predicted) in enumerate(rows):
            at[i, :predicted] = np.arange(len(ids) - 1 - predicted, len(ids) - 1)
            targets[i, :predicted] = ids[len(ids) - predicted :]
        likely, greedy = map(np.asarray, _predict(self.model, inputs, at, targets))
        if not np.isfinite(likely).all():
            raise ValueError("the model's log-likelihoods are not finite; another dtype may help")
        return [
            (float(likely[i, :n].astype(np.float64).sum()), bool(greedy[i, :n].all()))
            for i, (_, n) in enumerate(rows)
        ]

    def _continue(self, prompts, numbers, settings: Generation) -> np.ndarray:
        """New ids of each prompt; a row draws by its request's number, whatever its batch."""
        inputs, segment_ids = self._padded(prompts)
        numbers = np.resize(numbers, len(inputs))
        keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(self.seed)))(numbers)
        tokens = self.model.generate(
            jnp.asarray(inputs),
            jnp.asarray(segment_ids),
            max_new_tokens=settings.max_new_tokens,
            eos_token_id=(*self._ends, *self._stops(settings.until)),
            key=keys,
            **dict(settings.options),
        )
        return np.asarray(tokens)[: len(prompts), inputs.shape[1] :]

    def _padded(self, rows: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Ids and segment_ids int32 ``[N, T]``, padded behind; rows to fill a batch are the first.

        N and T are rounded up.
        """
        count = min(self.batch_size, power_of_two(len(rows)))
        ids, segment_ids = np.zeros((2, count, rounded(max(1, *map(len, rows)))), np.int32)
        for i, row in enumerate(itertools.islice(itertools.cycle(rows), count)):
            ids[i, : len(row)], segment_ids[i, : len(row)] = row, 1
        return ids, segment_ids

    def _batches(self, lengths: dict[int, int]) -> Iterator[tuple[int, ...]]:
        """Keys in batches of alike lengths, the longest first: what is too large fails at once."""
        return itertools.batched(sorted(lengths, key=lambda i: -lengths[i]), self.batch_size)

    def _generation(self, asked: dict[str, Any]) -> Generation:
        settings: dict[str, Any] = dict(normalize_gen_kwargs(asked, self.max_gen_toks))
        until, new = settings.pop("until"), settings.pop("max_gen_toks")
        options = {name: settings.pop(name) for name in OPTIONS if name in settings}
        if unknown := {name for name in settings if (name, settings[name]) != ("num_beams", 1)}:
            raise ValueError(
                f"generation_kwargs {sorted(unknown)} are not supported, {sorted(OPTIONS)} are"
            )
        if not options["do_sample"]:  # the harness' rule: then nothing else about drawing counts
            options = {name: value for name, value in options.items() if name in GREEDY}
        if not 0 < new < self.max_length:
            raise ValueError(
                f"max_gen_toks={new} must be above 0 and leave room for a prompt: "
                f"max_length is {self.max_length}"
            )
        return Generation(tuple(filter(None, until)), new, tuple(options.items()))

    def _prompt(self, context: str, settings: Generation) -> list[int]:
        ids = self.tok_encode(context) or [self.prefix]
        return self._cut(ids, self.max_length - settings.max_new_tokens)

    def _text(self, ids: np.ndarray, settings: Generation) -> str:
        kept, stops = [], self._stops(settings.until)
        for token in ids.tolist():
            if token in self._ends:
                break
            kept.append(token)
            if token in stops:
                break  # what follows is padding
        text = self.codec.decode(kept).decode(errors="replace")
        return postprocess_generated_text(text, list(settings.until), think_end_token=None)

    @functools.cached_property
    def _ends(self) -> tuple[int, ...]:
        eos = self.model.config.eos_token_id
        return () if eos is None else tuple(np.atleast_1d(eos).tolist())

    @functools.cached_property
    def _texts(self) -> list[str]:
        """Of every id."""
        ids = range(self.model.config.vocab_size)
        return [self.codec.decode([i]).decode(errors="replace") for i in ids]

    def _stops(self, until: tuple[str, ...]) -> tuple[int, ...]:
        """Ids that hold a stop string, so that generating can end there.

        A stop string of several ids is found in the text, afterwards.
        """
        if until not in self._known_stops:
            texts = self._texts if until else []
            holds = [any(stop in text for stop in until) for text in texts]
            self._known_stops[until] = tuple(np.flatnonzero(holds).tolist())
        return self._known_stops[until]


@nnx.jit
def _predict(model, inputs, at, targets):
    """Log-likelihood float32 ``[N, C]`` of ``targets`` after the inputs ``at``, and greedy or not.

    Only those positions' logits are made: ``[N, T, V]`` would be the largest array of all.
    """
    hidden = take_time(model.model(inputs).last_hidden_state, at)
    logits = model.logits(hidden).astype(jnp.float32)
    likely = jnp.take_along_axis(nnx.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return likely, jnp.argmax(logits, axis=-1) == targets


def power_of_two(number: int) -> int:
    """The next one from ``number`` on."""
    return 1 << (number - 1).bit_length()


def rounded(length: int) -> int:
    """A length with some padding, at most 64 tokens or a quarter: four shapes per doubling."""
    step = max(64, power_of_two(length) // 8)
    return -(-length // step) * step


def bar(title: str, total: int) -> tqdm:
    """For terminals."""
    return tqdm(desc=title, total=total, unit="request", disable=None)
