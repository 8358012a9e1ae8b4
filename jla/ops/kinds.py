"""One door to every op that has implementations by name, and the explanation of what runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jla.ops import (
    constant_decay,
    conv,
    delta,
    dplr,
    gated_sum,
    linear,
    norm,
    slots,
    softmax,
    ssm,
    trapezoidal,
)
from jla.ops.dispatch import Choice


class _Kind(NamedTuple):
    run: Callable
    choose: Callable[..., Choice]


def _choose_rwkv6(r, k, v, *args, **options) -> Choice:
    return linear.RWKV6.choose(r, k, v, *args, **options)


def _choose_rwkv7(r, w, k, v, *args, **options) -> Choice:
    return dplr.DPLR.choose(r, k, v, *args, **options)


KINDS = {
    "attention": _Kind(softmax.attention, softmax.choose),
    "causal_conv1d": _Kind(conv.causal_conv1d, conv.choose),
    "delta_rule": _Kind(delta.delta_rule, delta.GATED_DELTA_RULE.choose),
    "dplr_delta_rule": _Kind(dplr.dplr_delta_rule, dplr.DPLR.choose),
    "gated_delta_product": _Kind(delta.gated_delta_product, delta.GATED_DELTA_RULE.choose),
    "gated_delta_rule": _Kind(delta.gated_delta_rule, delta.GATED_DELTA_RULE.choose),
    "gdn2": _Kind(delta.gdn2, delta.GDN2.choose),
    "gla": _Kind(linear.gla, linear.GLA.choose),
    "gsa": _Kind(slots.gsa, slots.KEYS.choose),
    "hgrn": _Kind(gated_sum.hgrn, gated_sum.choose),
    "iplr_delta_rule": _Kind(dplr.iplr_delta_rule, dplr.DPLR.choose),
    "kda": _Kind(delta.kda, delta.KDA.choose),
    "lightning_attention": _Kind(constant_decay.lightning_attention, linear.SIMPLE_GLA.choose),
    "linear_attn": _Kind(constant_decay.linear_attn, constant_decay.choose_linear_attn),
    "mamba3": _Kind(trapezoidal.mamba3, trapezoidal.choose_mamba3),
    "retention": _Kind(constant_decay.retention, linear.SIMPLE_GLA.choose),
    "rms_norm": _Kind(norm.rms_norm, norm.choose),
    "rwkv6": _Kind(linear.rwkv6, _choose_rwkv6),
    "rwkv7": _Kind(dplr.rwkv7, _choose_rwkv7),
    "selective_scan": _Kind(ssm.selective_scan, ssm.choose_selective_scan),
    "simple_gla": _Kind(linear.simple_gla, linear.SIMPLE_GLA.choose),
    "ssd": _Kind(ssm.ssd, ssm.choose_ssd),
}


def linear_attention(kind: str, *args, **options):
    """Runs the op called ``kind``, most often on ``q, k, v`` and its own further arguments.

    Args:
        kind: a key of ``KINDS``, the op's name: ``"gated_delta_rule"``, ``"gla"``, ``"kda"``, ...
        *args, **options: passed to the op of that name.

    Raises:
        ValueError: unknown kind.
    """
    return _lookup(kind).run(*args, **options)


def explain(kind: str, *args, impl: str = "auto", **options) -> Choice:
    """What ``linear_attention(kind, ...)`` would run, and why not the others.

    Nothing is computed: the arguments may be ``jax.ShapeDtypeStruct``. ``print`` the answer.

    Raises:
        ValueError: unknown kind or impl.
        ImplUnavailable: a named impl that cannot run this call.
    """
    return _lookup(kind).choose(*args, impl=impl, **options)


def _lookup(kind: str) -> _Kind:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {sorted(KINDS)}, got {kind!r}")
    return KINDS[kind]
