"""FLA state dicts into modules and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jla.convert.table import Slot, legacy_names, slots
from jla.nn.param import is_float32_param

# Torch names of a tied head: the same tensor as the embeddings under another name.
TIED_HEAD, EMBEDDINGS = "lm_head.weight", ".embeddings.weight"


class CheckpointError(ValueError):
    """A checkpoint does not fit its model; the message lists everything that is wrong."""


Place = Callable[[str, np.ndarray], jax.Array]


def load_state_dict(
    module: nnx.Module,
    tensors: Mapping[str, Any],
    *,
    keep_dtype: bool = False,
    place: Place | None = None,
) -> None:
    """Fills every parameter of ``module``, a mixer or a model, from FLA's tensors.

    Loading is complete or fails before anything is changed: each tensor is used once, each
    parameter is filled, all shapes agree.

    Args:
        module: concrete, or abstract from ``nnx.eval_shape``.
        tensors: FLA's names -> arrays in FLA's layout; looked up one at a time, so a mapping that
            reads from files holds one tensor in memory at a time.
        keep_dtype: parameters take the tensors' dtype instead of their own; those that are float32
            by meaning stay float32 either way.
        place: makes the device array of ``(torch name, host array)``, e.g. sharded over a mesh; the
            default device if None. For stacked layers the name is the first layer's.

    Raises:
        CheckpointError: missing, surplus or misshaped tensors, all of them in one message.
    """
    filled = list(slots(module))
    source = _today(module, tensors, {name for slot in filled for name in slot.names})
    tied, embeddings = _drop_tied_head(source, filled)
    problems, values = _name_problems(source, filled), []
    for slot in filled:
        try:
            if all(name in source for name in slot.names):
                values.append(_value(slot, tensors, source, keep_dtype, place))
        except _Misshaped as error:
            problems.append(str(error))
    if tied and not np.array_equal(_read(tensors, source[embeddings]), _host(tensors[tied])):
        problems.append(f"{TIED_HEAD} differs from {embeddings}, but the config ties them")
    if problems:
        raise CheckpointError("; ".join(problems))
    for slot, value in zip(filled, values, strict=True):
        slot.variable.set_value(value)


def to_state_dict(module: nnx.Module) -> dict[str, np.ndarray]:
    """The tensors of ``module`` under FLA's names and in FLA's layout, contiguous, in memory dtype.

    A tied head is written once, under the embeddings' name, as FLA does.
    """
    tensors = {}
    for slot in slots(module):
        value = np.asarray(slot.variable.get_value())
        for i, name in enumerate(slot.names):
            part = value[i] if slot.stacked else value
            # safetensors writes memory as it lies: a transposed view would be written untransposed.
            tensors[name] = np.ascontiguousarray(slot.leaf.write(part))
    return tensors


class _Misshaped(ValueError):
    """One tensor does not have its parameter's shape."""


class _Row(NamedTuple):
    """One row of a tensor."""

    name: str
    index: int


def _today(module, tensors, expected) -> dict[str, str | _Row]:
    """Today's name -> what of ``tensors`` it is; old spellings resolved, unused ones dropped."""
    source: dict[str, str | _Row] = {name: name for name in tensors}
    for old, new in legacy_names(module).items():
        if old not in source or old in expected:
            continue
        names = (new,) if isinstance(new, str) else new or ()
        if source.keys() & set(names):
            continue
        del source[old]
        whole = new is None or isinstance(new, str)
        source |= {name: old if whole else _Row(old, i) for i, name in enumerate(names)}
    return source


def _drop_tied_head(source, filled) -> tuple[Any, str]:
    """Takes a tied head out of ``source``.

    Returns:
        Its name in the file, None if there is none, and the name of the embeddings it is tied to.
    """
    expected = {name for slot in filled for name in slot.names}
    embeddings = next((name for name in expected & source.keys() if name.endswith(EMBEDDINGS)), "")
    if TIED_HEAD in source and TIED_HEAD not in expected and embeddings:
        return source.pop(TIED_HEAD), embeddings
    return None, embeddings


def _name_problems(source, filled) -> list[str]:
    expected = {name for slot in filled for name in slot.names}
    missing, surplus = sorted(expected - source.keys()), sorted(source.keys() - expected)
    problems = []
    if missing:
        problems.append(f"missing tensors: {', '.join(missing)}")
    if TIED_HEAD in missing:
        problems.append("the config does not tie the head to the embeddings (tie_word_embeddings)")
    if surplus:
        problems.append(f"surplus tensors: {', '.join(surplus)}")
    return problems


def _value(slot: Slot, tensors, source, keep_dtype, place) -> jax.Array:
    shape = tuple(slot.variable.shape)
    parts = [_part(slot, name, _read(tensors, source[name]), shape) for name in slot.names]
    host = np.stack(parts) if slot.stacked else parts[0]
    dtype = slot.variable.dtype
    if keep_dtype and jnp.issubdtype(host.dtype, jnp.floating):
        dtype = jnp.float32 if is_float32_param(slot.variable) else host.dtype
    host = host.astype(dtype)
    return jnp.asarray(host) if place is None else place(slot.names[0], host)


def _part(slot: Slot, name, tensor, shape) -> np.ndarray:
    try:
        part = slot.leaf.read(tensor)
    except ValueError as error:
        raise _Misshaped(f"{name}: {error}") from None
    expected = shape[1:] if slot.stacked else shape
    if part.shape != expected:
        want = slot.leaf.write(np.broadcast_to(np.float32(0), expected)).shape
        raise _Misshaped(f"{name} has shape {tensor.shape}, the model needs {want}")
    return part


def _read(tensors, source: str | _Row) -> np.ndarray:
    if isinstance(source, _Row):
        return _host(tensors[source.name])[source.index]
    return _host(tensors[source])


def _host(tensor) -> np.ndarray:
    return np.asarray(tensor)
