"""One door to every recurrence by name, and the explanation of what runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jla.ops import delta, dplr, linear, softmax
from jla.ops.dispatch import Choice


class _Kind(NamedTuple):
    run: Callable
    choose: Callable[..., Choice]


KINDS = {
    "attention": _Kind(softmax.attention, softmax.choose),
    "delta_rule": _Kind(delta.delta_rule, delta.GATED_DELTA_RULE.choose),
    "dplr_delta_rule": _Kind(dplr.dplr_delta_rule, dplr.DPLR.choose),
    "gated_delta_product": _Kind(delta.gated_delta_product, delta.GATED_DELTA_RULE.choose),
    "gated_delta_rule": _Kind(delta.gated_delta_rule, delta.GATED_DELTA_RULE.choose),
    "gdn2": _Kind(delta.gdn2, delta.GDN2.choose),
    "gla": _Kind(linear.gla, linear.GLA.choose),
    "iplr_delta_rule": _Kind(dplr.iplr_delta_rule, dplr.DPLR.choose),
    "kda": _Kind(delta.kda, delta.KDA.choose),
    "simple_gla": _Kind(linear.simple_gla, linear.SIMPLE_GLA.choose),
}


def linear_attention(kind: str, q, k, v, *args, **options):
    """Runs the op called ``kind`` on ``q, k, v`` and its own further arguments.

    Args:
        kind: a key of ``KINDS``, the op's name: ``"gated_delta_rule"``, ``"gla"``, ``"kda"``, ...
        q, k, v, *args, **options: passed to the op of that name.

    Raises:
        ValueError: unknown kind.
    """
    return _lookup(kind).run(q, k, v, *args, **options)


def explain(kind: str, q, k, v, *args, impl: str = "auto", **options) -> Choice:
    """What ``linear_attention(kind, q, k, v, ...)`` would run, and why not the others.

    Nothing is computed: the arguments may be ``jax.ShapeDtypeStruct``. ``print`` the answer.

    Raises:
        ValueError: unknown kind or impl.
        ImplUnavailable: a named impl that cannot run this call.
    """
    return _lookup(kind).choose(q, k, v, *args, impl=impl, **options)


def _lookup(kind: str) -> _Kind:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {sorted(KINDS)}, got {kind!r}")
    return KINDS[kind]
