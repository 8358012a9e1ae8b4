"""Kernels on several devices: every device runs its own rows and heads. Imports no Pallas.

XLA cannot divide a kernel. What may be divided is told by labels, one string an array and one
character an axis: axes of one letter are divided alike, those with ``"."`` and those after the
string's end are whole on every device. ``"h"`` are heads (or channels); ``"g"`` are the fewer heads
of queries and keys, of which a device gets those that its ``"h"`` read. A result without a letter
is the sum over the parts.

On a mesh of Explicit axes the types say what lies where: :func:`per_device` goes through
``jax.shard_map``. On Auto axes only XLA's partitioner knows, after tracing: :func:`partitioned`
asks it, and lets it gather what is divided along other axes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

WHOLE = "."
MAPPED = "zyxwvuts"  # letters of the axes that jax.vmap adds


class Layout(NamedTuple):
    """Labels of a function's arrays.

    Attributes:
        operands: a string each; of a tree of arrays alike, one for the tree.
        results: strings in tuples, as the results are; likewise.
        multiple: a device's heads ``"h"`` must be a multiple of it.
    """

    operands: tuple[str, ...]
    results: Any
    multiple: int = 1


# Of q, k, v, values [B, T, H] per token, an initial state, marks [B, T]; outputs and final states.
RECURRENCE = Layout(("b.g", "b.g", "b.h", "b.h", "bh", "b"), ("b.h", "bh"))


def alone() -> bool:
    """Whether a kernel traced here runs as it is: one device, or all axes are shard_map's."""
    return jax.sharding.get_abstract_mesh().are_all_axes_manual or len(jax.devices()) == 1


def shares() -> int:
    """How many devices are likely to divide a call that is traced here."""
    return 1 if alone() else len(jax.devices())


def refusal(x: jax.Array, labels: str, multiple: int = 1) -> str | None:
    """Why a call with ``x``, labelled so, cannot be divided among devices, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    if alone() or _all(AxisType.Auto):
        return None
    if not _all(AxisType.Explicit):
        return _mixed()
    for label, size, names in zip(labels.ljust(x.ndim, WHOLE), x.shape, _spec(x), strict=True):
        if names is not None and label == WHOLE:
            return f"only axes with a letter in {labels!r} may be divided, got {jax.typeof(x)}"
        if label == "h" and size // _count(mesh, names) % multiple:
            return f"a device needs a multiple of {multiple} channels, got {jax.typeof(x)}"
    return None


def _all(kind):
    """Whether all axes of the mesh, if there are any, are of a kind; without a mesh Auto."""
    mesh = jax.sharding.get_abstract_mesh()
    return set(mesh.axis_types) == {kind} if not mesh.empty else kind == AxisType.Auto


def _mixed():
    kinds = ", ".join(kind.name for kind in jax.sharding.get_abstract_mesh().axis_types)
    return f"the axes of a mesh must be all Auto, all Explicit or all Manual, got {kinds}"


# ---------------------------------------------------------------------------------- Explicit axes


def per_device(kernel: Callable, layout: Layout, lead: int, *operands):
    """``kernel(*operands)``, on Explicit axes each device's part as operand ``lead`` is divided."""
    mesh = jax.sharding.get_abstract_mesh()
    if alone() or not _all(AxisType.Explicit):
        return kernel(*operands)
    axes = dict(zip(layout.operands[lead], _spec(operands[lead]), strict=False))
    axes |= {"g": axes.get("h"), WHOLE: None}
    heads = dict(zip(layout.operands[lead], operands[lead].shape, strict=False)).get("h")

    def place(labels, x):
        at = labels.find("g")
        if at >= 0 and x.shape[at] % _count(mesh, axes["g"]):
            x = jnp.repeat(x, heads // x.shape[at], axis=at)
        return jax.sharding.reshard(x, _partition_spec(labels, axes))

    def specs(labels):
        return jax.tree.map(lambda each: _partition_spec(each, axes), labels)

    run = jax.shard_map(
        kernel,
        mesh=mesh,
        in_specs=specs(layout.operands),
        out_specs=specs(layout.results),
        check_vma=False,
    )
    return run(*_map(place, layout.operands, operands))


def _spec(x):
    spec = tuple(jax.typeof(x).sharding.spec)
    return (*spec, *(None,) * (x.ndim - len(spec)))


def _partition_spec(labels, axes):
    return P(*(axes.get(label) for label in labels))


def _count(mesh, names):
    """Devices along mesh axes: None, a name or several."""
    names = () if names is None else names if isinstance(names, tuple) else (names,)
    return math.prod(mesh.shape[name] for name in names)


# -------------------------------------------------------------------------------------- Auto axes


def partitioned(function: Callable, layout: Layout, options, *operands):
    """``function(*operands, options)``, each device with its part where several divide the call.

    Operands are arrays or None, options hashable. Shapes of results must follow from those of the
    operands axis by axis. Has no derivatives: it is for the two halves of a custom_vjp.
    """
    if alone():
        return function(*operands, options)
    if not _all(AxisType.Auto):
        raise NotImplementedError(f"{_mixed()}: jax.vmap over an axis divided on Explicit ones?")
    return _divided(function, options, layout, ())(*operands)


# Cached, so that calls outside of jit find the programs they compiled.
@functools.cache
def _divided(function, options, layout, mapped):
    """Of operands; ``mapped`` are the ``in_axes`` of the vmaps around the function."""

    def body(*operands):
        return function(*operands, options)

    for axes in mapped:
        body = jax.vmap(body, axes)
    # custom_partitioning wants a function without constants: those of a jit's are its own.
    body = jax.jit(body)

    @jax.jit
    def program(*operands):
        return _custom_partitioning(body, layout, operands)

    run = custom_vmap(lambda *operands: program(*operands))

    @run.def_vmap
    def _(_, batched, *operands):
        letter = MAPPED[len(mapped)]
        labels = (letter * bool(b) + each for b, each in zip(batched, layout.operands, strict=True))
        more = layout._replace(
            operands=tuple(labels),
            results=jax.tree.map(lambda labels: letter + labels, layout.results),
        )
        axes = tuple(0 if b else None for b in batched)
        out = _divided(function, options, more, (*mapped, axes))(*operands)
        return out, jax.tree.map(lambda _: True, out)

    return run


def _custom_partitioning(body, layout, operands):
    given = _labelled(layout.operands, operands)
    made = []

    def trace(*operands):
        out = body(*operands)
        made[:] = _labelled(layout.results, out)
        return out

    run = custom_partitioning(trace)
    run.def_partition(
        functools.partial(_partition, body, layout),
        decode_shardings=False,  # it fails on divisions that a mesh's axes cannot tell
        sharding_rule=lambda *_: _rule([x[0] for x in given], [x[0] for x in made]),
    )
    return run(*operands)


def _map(function, labels, tree):
    """``function(labels, array)`` over a tree, of which ``labels`` may name whole branches."""
    return jax.tree.map(
        lambda label, branch: jax.tree.map(functools.partial(function, label), branch), labels, tree
    )


def _labelled(labels, tree):
    """(labels, array) of a tree's arrays, a character for every axis."""
    found = []
    _map(lambda label, x: found.append((label.ljust(x.ndim, WHOLE), x)), labels, tree)
    return found


def _rule(given, made):
    """Shardy's sharding rule for labels of operands and of results."""
    whole = itertools.count()

    def factors(labels):
        return " ".join(x if x != WHOLE else f"whole{next(whole)}" for x in labels)

    rule = " -> ".join(", ".join(map(factors, labels)) for labels in (given, made))
    names = tuple(f"whole{i}" for i in range(next(whole)))
    return rule, dict(need_replication_factors=names)


def _partition(body, layout, mesh, operands, results):
    """What XLA's partitioner asks for: one device's function, and how its arrays must lie."""
    arrays = [*_labelled(layout.operands, operands), *_labelled(layout.results, results)]
    if mesh.empty:
        raise NotImplementedError("a kernel on several devices needs NamedShardings of a mesh")
    division = _division(mesh, arrays, layout.multiple)

    def local(*parts):
        out = body(*map(division.take, layout.operands, parts))
        return _map(division.add, layout.results, out)

    places = functools.partial(_map, lambda labels, _: division.sharding(labels))
    return mesh, local, places(layout.results, results), places(layout.operands, operands)


class _Division(NamedTuple):
    """Which axes of a mesh divide a letter's axes, and the sizes of the latter."""

    mesh: jax.sharding.Mesh
    axes: dict[str, tuple[str, ...]]
    sizes: dict[str, int]

    @property
    def straddles(self):
        """Whether devices share heads of queries and keys."""
        return self.sizes.get("g", 0) % _count(self.mesh, self.axes.get("h")) != 0

    def sharding(self, labels):
        groups = None if self.straddles else self.axes.get("h")
        return NamedSharding(self.mesh, _partition_spec(labels, {**self.axes, "g": groups}))

    def take(self, labels, x):
        """Of an operand the q/k heads that this device's heads read."""
        if x is None or "g" not in labels or not self.straddles:
            return x
        return jnp.take(x, self._groups(), axis=labels.index("g"))

    def add(self, labels, x):
        """A result from the devices' parts: their sum over the letters that it lacks."""
        alike = labels if self.straddles else labels.replace("g", "h")
        missing = [
            name for label, names in self.axes.items() if label not in alike for name in names
        ]
        if not missing:
            return x
        total = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if "g" in alike:
            at = labels.index("g")
            whole = jnp.zeros((*x.shape[:at], self.sizes["g"], *x.shape[at + 1 :]), total.dtype)
            total = whole.at[(slice(None),) * at + (self._groups(),)].add(total)
        return jax.lax.psum(total, missing).astype(x.dtype)

    def _groups(self):
        """Indices of this device's q/k heads: no block of ``step`` heads reads more than one."""
        heads, group = self.sizes["h"], self.sizes["h"] // self.sizes["g"]
        share = heads // _count(self.mesh, self.axes["h"])
        step = math.gcd(share, group)
        first = jax.lax.axis_index(self.axes["h"]) * share
        return (first + step * jnp.arange(share // step)) // group


def _division(mesh, arrays, multiple):
    """As the first array says that is divided: XLA has made them agree where it could."""
    sizes, axes = {}, {}
    for labels, x in arrays:
        sizes |= dict(zip(labels, x.shape, strict=True))
    for labels, x in arrays:
        for label, names in zip(labels.replace("g", "h"), _names(mesh, x), strict=True):
            if label == WHOLE or label in axes or not names:
                continue
            unit = _count(mesh, names) * (multiple if label == "h" else 1)
            if sizes[label] % unit == 0 and not any(set(names) & set(x) for x in axes.values()):
                axes[label] = names
    return _Division(mesh, axes, sizes)


def _names(mesh, x):
    """For every axis of an array the axes of the mesh that divide it, outermost first."""
    try:
        places = x.sharding.devices_indices_map(x.shape)
    except ValueError:  # parts of unequal sizes
        return [()] * x.ndim
    starts = np.array(
        [[part.start or 0 for part in places[device]] for device in mesh.devices.flat]
    )
    starts = starts.reshape(*mesh.devices.shape, x.ndim)
    return [_dividing(mesh, starts[..., axis], size) for axis, size in enumerate(x.shape)]


def _dividing(mesh, starts, size):
    """Axes of the mesh that make its devices' parts start so; none if a part of one does."""
    steps = {
        axis: starts.take(1, axis).flat[0] for axis, count in enumerate(starts.shape) if count > 1
    }
    axes = sorted((axis for axis in steps if steps[axis]), key=lambda axis: -steps[axis])
    stride, told = size, np.zeros_like(starts)
    for axis in axes:
        stride //= starts.shape[axis]
        told = told + stride * np.indices(starts.shape)[axis]
    return tuple(mesh.axis_names[axis] for axis in axes) if np.array_equal(told, starts) else ()
