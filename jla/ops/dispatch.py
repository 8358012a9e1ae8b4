"""Which implementation of an op runs, and why the others don't.

A named ``impl`` runs or raises with its reason. ``"auto"`` decides from static facts (device,
dtype, shape, options) before anything runs, catches nothing, and takes the portable form when
unsure.
"""

from __future__ import annotations

import contextlib
import contextvars
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax

from jla.kernels import limits

_pins: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
    "jla_impl", default=types.MappingProxyType({})
)
_EVERY = "*"
IMPLS = ("auto", "chunk", "cudnn", "mosaic", "reference")


class ImplUnavailable(NotImplementedError):
    """A named implementation cannot run this call; the message holds the reason."""


@dataclass(frozen=True)
class Choice:
    """The decision for one call.

    Attributes:
        op: name of the op.
        impl: the implementation that runs.
        refused: reason for every implementation that cannot run this call.
        why: one phrase, why ``impl`` was taken.
    """

    op: str
    impl: str
    refused: Mapping[str, str]
    why: str

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.impl} ({self.why})"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self.refused.items()])


def select(
    op: str,
    impl: str,
    offers: Mapping[str, str | None],
    order: tuple[str, ...],
    *,
    because: str | None = None,
) -> Choice:
    """Chooses an implementation.

    Args:
        op: name of the op, for messages and pins.
        impl: ``"auto"`` or a key of ``offers``.
        offers: implementation -> ``None`` if it can run this call, else the reason why not.
        order: what ``"auto"`` prefers, best first; the last one always runs.
        because: why this order, where it is not the usual one.

    Raises:
        ValueError: unknown ``impl``.
        ImplUnavailable: the named (or pinned) ``impl`` cannot run this call.
    """
    why = "named by the caller"
    if impl == "auto":
        pins = _pins.get()
        everywhere = pins.get(_EVERY, "auto")
        impl = pins.get(op, everywhere if everywhere in offers else "auto")
        why = "pinned by use_impl"
    refused = {name: reason for name, reason in offers.items() if reason is not None}
    if impl == "auto":
        chosen = next(name for name in order if name not in refused)
        usual = "first of " + ", ".join(order) + " that can run"
        return Choice(op, chosen, refused, f"auto: {because or usual}")
    if impl not in offers:
        raise ValueError(f"impl of {op} must be 'auto' or one of {sorted(offers)}, got {impl!r}")
    if impl in refused:
        raise ImplUnavailable(f"{op}: impl={impl!r} cannot run this call: {refused[impl]}")
    return Choice(op, impl, refused, why)


def select_scan(op: str, impl: str, length: int) -> Choice:
    """Chooses for a recurrence in every channel by itself, over ``length`` tokens.

    Its chunk form is no matrix product but an associative scan: fewer steps in a row for more
    operations, which pays where many run at once. On CPUs (``benchmarks/RESULTS.md``) it is slower.
    """
    offers = {"reference": None, "chunk": None, "mosaic": limits.NO_KERNEL}
    if length > 1 and jax.default_backend() != "cpu":
        return select(op, impl, offers, ("chunk", "reference"))
    because = "the scan over tokens is faster on CPUs" if length > 1 else "there is one token"
    return select(op, impl, offers, ("reference",), because=because)


@contextlib.contextmanager
def use_impl(impl: str | None = None, /, **per_op: str) -> Iterator[None]:
    """Pins the implementation of every call that says ``impl="auto"``.

    ``use_impl("reference")`` pins every op that has a ``"reference"`` (a norm, say, has no
    ``"chunk"``), ``use_impl(gated_delta_rule="chunk")`` one of them. The pin acts where an op is
    *traced*: a function that ``jax.jit`` compiled outside keeps what it was compiled with.

    Raises:
        TypeError: neither an implementation nor an op is named.
        ValueError: no op has ``impl``.
    """
    if impl not in (None, *IMPLS):
        raise ValueError(f"impl must be one of {list(IMPLS)}, got {impl!r}")
    if impl is None and not per_op:
        raise TypeError("use_impl needs an implementation, or op=implementation pairs")
    everywhere = {} if impl is None else {_EVERY: impl}
    token = _pins.set({**_pins.get(), **everywhere, **per_op})
    try:
        yield
    finally:
        _pins.reset(token)
