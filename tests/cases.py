"""The table of mixers that the contract suite asks, one row each.

A row says how to build a small mixer with odd sizes (3 heads, K != V, groups). A question that a
row cannot answer stands in ``cannot`` with the reason; the suite turns it into a strict expected
failure, so a fix shows up at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import helpers
import jax.numpy as jnp
import pytest
from flax import nnx

from jla.layers import (
    KDA,
    Attention,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedLinearAttention,
    GatedSlotAttention,
    HGRN2Attention,
    HGRNAttention,
    LinearAttention,
    Mamba,
    Mamba2,
    Mamba3,
    MultiScaleRetention,
    RWKV6Attention,
    RWKV7Attention,
    TokenMixer,
)
from jla.layers.channel_mixing import RWKV6FeedForward, RWKV7FeedForward


@dataclass(frozen=True)
class Mixer:
    """One row of :data:`MIXERS`.

    Attributes:
        build: ``build(rngs=..., dtype=..., param_dtype=..., impl=...)`` makes the mixer.
        other_impl: an implementation that ``"auto"`` does not take at the suite's lengths.
        variant: the row differs from another one in options only. What JAX and Flax do to a module
            does not depend on those, so there a variant waits for the whole table (slow).
        meaningful: the part of a cache that later tokens can see, the rest set to 0.
        cannot: question -> reason.
    """

    build: Callable[..., TokenMixer]
    other_impl: str = "reference"
    variant: bool = False
    meaningful: Callable = lambda cache: cache
    cannot: Mapping[str, str] = field(default_factory=dict)


def filled_slots(cache):
    """An attention cache whose empty slots are 0: a document's end leaves old keys behind."""
    slots = jnp.arange(cache["k"].shape[1])
    filled = (slots < cache["length"][:, None])[..., None, None]
    return {**cache, "k": jnp.where(filled, cache["k"], 0), "v": jnp.where(filled, cache["v"], 0)}


def _without_impl(make, *args, **options):
    """A mixer whose class takes no ``impl``."""
    return lambda impl="auto", **settings: make(*args, **options, **settings)


NO_IMPL = {"unknown impl": "there is no implementation to name"}
HIDDEN = 24

_delta = partial(GatedDeltaNet, HIDDEN, num_heads=3, head_dim=8)
_plain_delta = partial(DeltaNet, hidden_size=HIDDEN, num_heads=3)
_kda = partial(KDA, HIDDEN, num_heads=3, head_dim=6)
_product = partial(GatedDeltaProduct, HIDDEN, num_heads=3, head_dim=6)
_attention = partial(Attention, HIDDEN)
_mamba2 = partial(Mamba2, hidden_size=HIDDEN)
_mamba3 = partial(Mamba3, HIDDEN)
# What a head reads after one token is a multiple of that token's value. The group norm divides the
# size away, and with a small epsilon most digits of its gradient.
_rwkv6 = partial(
    RWKV6Attention, hidden_size=HIDDEN, num_heads=3, gate_low_rank_dim=5, norm_eps=1e-2
)
_rwkv7 = partial(
    RWKV7Attention,
    hidden_size=HIDDEN,
    head_dim=8,
    decay_low_rank_dim=4,
    gate_low_rank_dim=5,
    a_low_rank_dim=4,
    v_low_rank_dim=3,
    norm_eps=1e-3,
    num_hidden_layers=3,
)
_shared = dict(hidden_size=HIDDEN, num_heads=6, num_kv_heads=3)
_gla = partial(GatedLinearAttention, hidden_size=HIDDEN)
_retention = partial(MultiScaleRetention, hidden_size=HIDDEN)
_slots = partial(GatedSlotAttention, hidden_size=HIDDEN)
_linear = partial(LinearAttention, hidden_size=HIDDEN)
_softmax = partial(Mixer, other_impl="chunk", meaningful=filled_slots)
_channels = partial(Mixer, other_impl="chunk")

MIXERS: dict[str, Mixer] = {
    "gdn": Mixer(partial(_delta, expand_v=1.5, num_v_heads=6)),
    "gdn-plain": Mixer(
        partial(_delta, expand_v=0.5, use_gate=False, use_short_conv=False),
        variant=True,
    ),
    "gdn-options": Mixer(
        partial(
            _delta,
            expand_v=2,
            allow_neg_eigval=True,
            conv_size=3,
            conv_bias=True,
            output_gate_activation="sigmoid",
        ),
        variant=True,
    ),
    "deltanet": Mixer(partial(_plain_delta, expand_v=1.5, use_gate=True)),
    "deltanet-sum": Mixer(
        partial(
            _plain_delta,
            expand_k=0.75,
            conv_bias=True,
            allow_neg_eigval=True,
            qk_activation="elu",
            qk_norm="sum",
        ),
        variant=True,
    ),
    "deltanet-plain": Mixer(
        partial(_plain_delta, use_beta=False, use_short_conv=False, qk_activation="identity"),
        variant=True,
    ),
    "kda": Mixer(partial(_kda, expand_v=1.5, num_v_heads=6)),
    "kda-bounded": Mixer(
        partial(
            _kda,
            expand_v=0.5,
            safe_gate=True,
            lower_bound=-5.0,
            allow_neg_eigval=True,
            use_short_conv=False,
        ),
        variant=True,
    ),
    "gdn2": Mixer(partial(GatedDeltaNet2, HIDDEN, num_heads=3, head_dim=6, num_v_heads=6)),
    "gdn2-options": Mixer(
        partial(
            GatedDeltaNet2,
            HIDDEN,
            expand_v=1.5,
            num_heads=3,
            head_dim=6,
            allow_neg_eigval=True,
            conv_bias=True,
            conv_size=3,
        ),
        variant=True,
    ),
    "deltaproduct": Mixer(partial(_product, expand_v=1.5, num_v_heads=6)),
    "deltaproduct-plain": Mixer(
        partial(
            _product,
            expand_v=0.5,
            use_output_gate=False,
            use_short_conv=False,
            use_forget_gate=False,
            allow_neg_eigval=False,
            num_householder=3,
        ),
        variant=True,
    ),
    "gla": Mixer(
        partial(GatedLinearAttention, **_shared, expand_k=1.0, expand_v=1.5, use_short_conv=True)
    ),
    "gla-plain": Mixer(
        partial(
            _gla,
            num_heads=3,
            feature_map="relu",
            use_output_gate=False,
            elementwise_affine=False,
            clamp_min=-0.05,
        ),
        variant=True,
    ),
    "retention": Mixer(partial(MultiScaleRetention, **_shared, use_short_conv=True)),
    "retention-plain": Mixer(
        # Of a row of one token, epsilon alone gives q and k a gradient: see RWKV-6.
        partial(
            _retention,
            num_heads=3,
            expand_v=0.5,
            feature_map="gelu",
            gate_fn="gelu",
            norm_eps=1e-3,
        ),
        variant=True,
    ),
    "hgrn2": Mixer(
        partial(HGRN2Attention, hidden_size=HIDDEN, expand_ratio=7, use_short_conv=True)
    ),
    "hgrn2-plain": Mixer(
        partial(HGRN2Attention, hidden_size=HIDDEN, num_heads=3, expand_ratio=None), variant=True
    ),
    "hgrn": _channels(
        partial(HGRNAttention, hidden_size=HIDDEN, expand_ratio=2, use_short_conv=True)
    ),
    "hgrn-plain": _channels(
        partial(HGRNAttention, hidden_size=HIDDEN, elementwise_affine=False), variant=True
    ),
    "gsa": Mixer(
        partial(GatedSlotAttention, **_shared, expand_k=1.5, num_slots=5, use_short_conv=True)
    ),
    "gsa-plain": Mixer(partial(_slots, num_heads=3, feature_map="t2r", scale=None), variant=True),
    "linear_attn": Mixer(
        partial(
            LinearAttention,
            **_shared,
            expand_v=1.5,
            feature_map="hedgehog",
            do_feature_map_norm=True,
        )
    ),
    "linear_attn-dpfp": Mixer(
        partial(
            _linear,
            num_heads=3,
            feature_map="dpfp",
            output_norm="identity",
            norm_q=True,
            norm_k=True,
        ),
        variant=True,
    ),
    # Four features of either sign nearly cancel for one query, and the norm enlarges what bfloat16
    # rounds off them: the same epsilon as RWKV-7's.
    "linear_attn-tied": Mixer(
        partial(_linear, num_heads=3, expand_k=0.5, tie_feature_map_qk=True, norm_eps=1e-3),
        variant=True,
    ),
    "attention": _softmax(partial(_attention, num_heads=6, num_kv_heads=3, qkv_bias=True)),
    "attention-window": _softmax(
        partial(_attention, num_heads=3, num_kv_heads=1, window_size=4, qk_norm=True)
    ),
    "rwkv6": Mixer(partial(_rwkv6, expand_k=0.5, proj_low_rank_dim=4)),
    "rwkv6-options": Mixer(
        partial(_rwkv6, expand_k=1, expand_v=0.5, gate_fn="sigmoid", elementwise_affine=False),
        variant=True,
    ),
    "rwkv7": Mixer(partial(_rwkv7, value_dim=48, layer_idx=1)),
    "rwkv7-first": Mixer(partial(_rwkv7, layer_idx=0, elementwise_affine=False), variant=True),
    # Feed-forwards of models: they have no recurrence to choose an implementation of.
    "rwkv6-ffn": Mixer(_without_impl(RWKV6FeedForward, HIDDEN), variant=True, cannot=NO_IMPL),
    "rwkv7-ffn": Mixer(
        _without_impl(RWKV7FeedForward, HIDDEN, layer_idx=1, num_hidden_layers=3),
        variant=True,
        cannot=NO_IMPL,
    ),
    "attention-nope": _softmax(partial(_attention, num_heads=3, rope_theta=None), variant=True),
    "mamba": _channels(partial(Mamba, HIDDEN, state_size=5, intermediate_size=20)),
    "mamba-options": _channels(
        partial(
            Mamba,
            HIDDEN,
            state_size=3,
            conv_kernel=3,
            use_conv_bias=False,
            intermediate_size=28,
            dt_rank=5,
            dt_init="constant",
            use_bias=True,
        ),
        variant=True,
    ),
    "mamba2": Mixer(partial(_mamba2, head_dim=8, state_size=5, n_groups=2)),
    # S16: a skip per channel and another head size.
    "mamba2-options": Mixer(
        partial(
            _mamba2,
            head_dim=16,
            state_size=7,
            conv_kernel=3,
            use_conv_bias=False,
            D_has_hdim=True,
            norm_before_gate=True,
            dt_limit=(0.05, 0.2),
            use_bias=True,
        ),
        variant=True,
    ),
    "mamba2-plain": Mixer(partial(_mamba2, head_dim=8, state_size=6, rmsnorm=False), variant=True),
    "mamba3": Mixer(partial(_mamba3, state_size=6, head_dim=8, n_groups=2)),
    "mamba3-ranks": Mixer(
        partial(_mamba3, state_size=10, head_dim=16, is_mimo=True, mimo_rank=3), variant=True
    ),
    "mamba3-options": Mixer(
        partial(
            _mamba3,
            state_size=6,
            head_dim=8,
            rope_fraction=1.0,
            A_floor=0.5,
            is_outproj_norm=True,
            is_mimo=True,
            mimo_rank=2,
            use_bias=True,
        ),
        variant=True,
    ),
}


def build(row: str, **options) -> TokenMixer:
    """The row's mixer with random parameters."""
    return helpers.build(lambda: MIXERS[row].build(rngs=nnx.Rngs(1), **options))


# One row of each kind of state: a matrix with the delta rule, keys and values, a scan of channels,
# parts, and one with values of an earlier layer.
SAMPLE = ("gdn", "attention-window", "hgrn", "mamba3", "rwkv7")


def rows(
    question: str,
    table: Mapping[str, Mixer] = MIXERS,
    *,
    variants: bool = True,
    sample: bool = False,
):
    """``parametrize`` over the table; a row that cannot answer is a strict expected failure.

    Without ``variants`` these rows are marked slow, with ``sample`` all rows but those of
    ``SAMPLE``. Tests run row by row, not test by test.
    """

    def param(name, case):
        reason = case.cannot.get(question)
        marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
        if (case.variant and not variants) or (sample and name not in SAMPLE):
            marks.append(pytest.mark.slow)
        return pytest.param(name, marks=marks, id=name)

    params = [param(name, case) for name, case in table.items()]
    return pytest.mark.parametrize("row", params, scope="module")
