"""The table of models that the contract suite asks, and the functions it asks them through.

Compiling takes nearly all of a test's time. Every question is therefore put to one of two compiled
functions per row, in shapes that the questions share: :meth:`Runner.probe` (loss, logits, all
gradients) and :meth:`Runner.step` (a piece of a row, with a cache).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import helpers
import jax
import numpy as np
from flax import nnx
from helpers import random

from jla.models import (
    AutoModelForCausalLM,
    Config,
    DeltaNetConfig,
    GatedDeltaNetConfig,
    GatedDeltaProductConfig,
    GLAConfig,
    GSAConfig,
    HGRN2Config,
    HGRNConfig,
    KDAConfig,
    LinearAttentionConfig,
    Mamba2Config,
    Mamba3Config,
    MambaConfig,
    RetNetConfig,
    RWKV6Config,
    RWKV7Config,
    SambaConfig,
    TransformerConfig,
)

BATCH, LENGTH, VOCAB = 4, 33, 61

_shared: dict[str, Any] = dict(
    hidden_size=24, intermediate_size=40, vocab_size=VOCAB, initializer_range=0.2
)
# K = 6, V = 9 and twice as many heads for values.
_delta = _shared | dict(num_heads=2, num_v_heads=4, head_dim=6, expand_v=1.5)
# Mamba's stacks have no MLPs.
_bare = {name: value for name, value in _shared.items() if name != "intermediate_size"}
# A small epsilon leaves few digits to a document's first token: see the mixers' rows. The warp,
# which RWKV-7's configs have by default, pulls at positions without a label too.
_rwkv7 = _shared | dict(
    norm_eps=1e-3,
    use_l2warp=False,
    head_dim=8,
    decay_low_rank_dim=4,
    gate_low_rank_dim=5,
    a_low_rank_dim=4,
    v_low_rank_dim=3,
)
_rwkv6 = _shared | dict(norm_eps=1e-2, num_heads=3, proj_low_rank_dim=4, gate_low_rank_dim=5)
_grouped = _shared | dict(num_heads=6, num_kv_heads=3)
_window = dict(num_heads=4, num_kv_heads=2, window_size=5)


@dataclass(frozen=True)
class Row:
    """One row of :data:`MODELS`.

    Attributes:
        config: of a small model with sizes that hide little.
        fast: whether questions that cost much are asked in the fast slice too.
        cannot: question -> reason.
    """

    config: Config
    fast: bool = False
    cannot: Mapping[str, str] = field(default_factory=dict)


MODELS: dict[str, Row] = {
    "gated_deltanet": Row(GatedDeltaNetConfig(num_hidden_layers=2, **_delta)),
    "gated_deltanet-hybrid": Row(
        GatedDeltaNetConfig(
            num_hidden_layers=2,
            attn={"layers": [1], "rope_theta": 50.0, **_window},
            **_delta,
        ),
        fast=True,
    ),
    # The largest combination: a list of plans, attention residuals, a tied head, every option.
    "gated_deltanet-all": Row(
        GatedDeltaNetConfig(
            num_hidden_layers=3,
            attn=[
                {"layers": [1], "qkv_bias": True, **_window},
                {"layers": [2], "num_heads": 2, "rope_theta": 20.0},
            ],
            attnres_block_size=2,
            tie_word_embeddings=True,
            use_gate=False,
            use_short_conv=False,
            allow_neg_eigval=True,
            hidden_act="powlu",
            **_delta,
        ),
    ),
    "delta_net": Row(
        DeltaNetConfig(
            num_hidden_layers=2,
            num_heads=2,
            expand_v=1.5,
            use_gate=True,
            attn={"layers": [0], **_window},
            **_shared,
        ),
    ),
    "kda": Row(KDAConfig(num_hidden_layers=2, attn={"layers": [0], **_window}, **_delta)),
    "kda-bounded": Row(KDAConfig(num_hidden_layers=1, safe_gate=True, lower_bound=-3.0, **_delta)),
    "gated_deltaproduct": Row(
        GatedDeltaProductConfig(
            num_hidden_layers=2,
            num_heads=3,
            head_dim=6,
            expand_v=1.5,
            num_householder=2,
            use_forget_gate=True,
            attn={"layers": [0], **_window},
            **_shared,
        ),
    ),
    "mamba": Row(MambaConfig(num_hidden_layers=2, state_size=5, **_bare)),
    "mamba2": Row(Mamba2Config(num_hidden_layers=2, head_dim=8, state_size=5, n_groups=2, **_bare)),
    "mamba3": Row(Mamba3Config(num_hidden_layers=2, head_dim=8, state_size=6, n_groups=3, **_bare)),
    "mamba3-ranks": Row(
        Mamba3Config(
            num_hidden_layers=2,
            head_dim=16,
            state_size=6,
            is_mimo=True,
            mimo_rank=3,
            is_outproj_norm=True,
            rope_fraction=1.0,
            tie_word_embeddings=True,
            **_bare,
        )
    ),
    "samba": Row(
        SambaConfig(num_hidden_layers=2, state_size=5, attn={"layers": [1], **_window}, **_bare)
    ),
    "samba-residuals": Row(
        SambaConfig(
            num_hidden_layers=3,
            state_size=3,
            attn={"layers": [0, 2], "qkv_bias": True, **_window},
            attnres_block_size=2,
            hidden_ratio=1,
            use_bias=True,
            **_bare,
        )
    ),
    "rwkv7": Row(RWKV7Config(num_hidden_layers=3, value_dim=48, **_rwkv7)),
    # The first values to share are those of layer 1.
    "rwkv7-hybrid": Row(
        RWKV7Config(
            num_hidden_layers=4,
            attn={"layers": [0], **_window},
            norm_first=False,
            norm_bias=False,
            tie_word_embeddings=True,
            hidden_act="relu",
            **_rwkv7,
        ),
    ),
    "rwkv6": Row(RWKV6Config(num_hidden_layers=3, **_rwkv6)),
    "rwkv6-hybrid": Row(
        RWKV6Config(num_hidden_layers=2, attn={"layers": [1], **_window}, norm_bias=False, **_rwkv6)
    ),
    "gla": Row(GLAConfig(num_hidden_layers=2, **_grouped, use_short_conv=True)),
    "retnet": Row(RetNetConfig(num_hidden_layers=2, **_grouped)),
    # Softmax attention between layers that take a lower bound.
    "hgrn2-hybrid": Row(
        HGRN2Config(num_hidden_layers=3, expand_ratio=8, attn={"layers": [1], **_window}, **_shared)
    ),
    "hgrn": Row(HGRNConfig(num_hidden_layers=2, expand_ratio=2, use_short_conv=True, **_shared)),
    "gsa": Row(GSAConfig(num_hidden_layers=2, num_slots=5, use_short_conv=True, **_grouped)),
    "linear_attn": Row(
        LinearAttentionConfig(
            num_hidden_layers=2, feature_map="elu", norm_feature_map=True, **_grouped
        )
    ),
    "transformer": Row(
        TransformerConfig(
            num_hidden_layers=2, num_heads=4, num_kv_heads=2, qk_norm=True, qkv_bias=True, **_shared
        ),
    ),
    "transformer-window": Row(
        TransformerConfig(
            num_hidden_layers=2,
            num_heads=3,
            window_size=5,
            rope_theta=None,
            tie_word_embeddings=True,
            **_shared,
        ),
    ),
}
FAST = [name for name, row in MODELS.items() if row.fast]
# A model of each kind of cache: for questions that every family's mixer is asked by itself too.
SAMPLE = [*FAST, "rwkv7", "samba", "mamba3", "hgrn", "transformer-window"]


def build(config: Config, **options):
    """A model with random parameters."""
    from_config = AutoModelForCausalLM.from_config
    return helpers.build(lambda: from_config(config, rngs=nnx.Rngs(0), **options))


class Runner:
    """A model with its compiled functions.

    Attributes:
        model: the model.
        state: its parameters, what the functions take first.
    """

    def __init__(self, config: Config, **options):
        self.config = config
        self.model = build(config, **options)
        self.graphdef, self.state = nnx.split(self.model)
        self.probe = jax.jit(self._probe)
        self.step = jax.jit(self._step)

    def _probe(self, state, embeds, segment_ids, labels):
        """``(loss, logits), (gradients of parameters, of embeds)``."""

        def loss(state, embeds):
            model = nnx.merge(self.graphdef, state)
            out = model(inputs_embeds=embeds, segment_ids=segment_ids, labels=labels)
            return out.loss, out.logits

        grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        return grad(state, embeds)

    def _step(self, state, input_ids, segment_ids, cache):
        out = nnx.merge(self.graphdef, state)(input_ids, segment_ids=segment_ids, cache=cache)
        return out.logits, out.cache

    def embed(self, ids) -> np.ndarray:
        """Rows of the embeddings as numpy, ``[B, T, D]``."""
        return np.asarray(self.model.model.embeddings.embedding[...])[ids]


@functools.cache
def runner(name: str, **options) -> Runner:
    """The row's runner, made once per process."""
    return Runner(MODELS[name].config, **options)


def tokens(seed: int, shape) -> np.ndarray:
    """Random ids of the vocabulary, int32."""
    return np.random.default_rng(seed).integers(0, VOCAB, shape, dtype=np.int32)


def noise(shape) -> np.ndarray:
    """Large random content for padding, float32."""
    return random(99, shape, scale=30.0)


def place(spans, shape=(BATCH, LENGTH)) -> tuple[np.ndarray, list[np.ndarray]]:
    """Lays documents out in rows.

    Args:
        spans: per document ``(row, columns)``, columns a slice or an array of positions.

    Returns:
        ``segment_ids`` (document i has id i + 1, the rest is padding) and for every document its
        flat positions.
    """
    ids = np.zeros(shape, np.int32)
    where = []
    for i, (row, columns) in enumerate(spans):
        at = np.arange(shape[1])[columns]
        ids[row, at] = i + 1
        where.append(row * shape[1] + at)
    return ids, where


def fill(documents, where, rest: np.ndarray) -> np.ndarray:
    """``rest [B, T, ...]`` with each document's values at its positions."""
    out = rest.reshape(-1, *rest.shape[2:]).copy()
    for values, at in zip(documents, where, strict=True):
        out[at] = values
    return out.reshape(rest.shape)


def read(x, where) -> list[np.ndarray]:
    """Each document's part of ``x [B, T, ...]``."""
    flat = np.asarray(x).reshape(-1, *np.shape(x)[2:])
    return [flat[at] for at in where]


def forward(model, *args, **kwargs):
    """One jitted call of a model, compiled anew: for shapes that only one question needs."""
    graphdef, state = nnx.split(model)
    return jax.jit(lambda state, a, k: nnx.merge(graphdef, state)(*a, **k))(state, args, kwargs)
