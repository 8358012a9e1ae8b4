"""Models as Orbax checkpoints: FLA's ``config.json`` beside the parameters as a pytree."""

from __future__ import annotations

import collections
import json
import os
import textwrap
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts
from flax import nnx

from jla.convert import CheckpointError
from jla.convert.pretrained import abstract_model, config_text, read_config
from jla.models import CausalLM
from jla.nn.param import is_float32_param

PARAMS = "params"

Name = tuple[str, ...]


def save_orbax(model: CausalLM, folder: str | os.PathLike) -> None:
    """Writes ``config.json`` and the parameters, an Orbax checkpoint in the folder ``params``.

    The parameters are ``nnx.to_pure_dict(nnx.state(model, nnx.Param))`` in their memory dtype; they
    appear last and at once.

    Args:
        model: whose layers may be scanned.
        folder: made if it does not exist; must not hold ``params``.

    Raises:
        OSError: the folder cannot be written.
        ValueError: there are ``params`` already.
    """
    folder = Path(folder).resolve()
    if (folder / PARAMS).exists():
        raise ValueError(f"{folder / PARAMS} exists")
    folder.mkdir(parents=True, exist_ok=True)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    leaves = [leaf.dtype for leaf in jax.tree.leaves(params)]
    (folder / "config.json").write_text(config_text(model, leaves), encoding="utf-8")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / PARAMS, params)


def load_orbax(folder: str | os.PathLike, *, dtype=None) -> CausalLM:
    """The model that :func:`save_orbax` wrote.

    ``params`` may also be what a training loop saved of ``nnx.state(model, nnx.Param)``, as a state
    or as a pure dict, of single or of scanned layers.

    Args:
        folder: with ``config.json`` and ``params``.
        dtype: of the parameters in memory; the stored, one by one, if None. ``A_log``, ``dt_bias``
            and their like are float32 always.

    Raises:
        CheckpointError: no such folder, or its parameters are damaged or do not fit its config.
        ValueError: unknown ``model_type`` or a config with impossible values.
    """
    folder = Path(folder).resolve()
    family, config = read_config(folder)
    values = _read(folder / PARAMS)
    kinds = collections.Counter(value.dtype for value in values.values())
    options = dict(param_dtype=kinds.most_common(1)[0][0] if dtype is None else dtype)
    layouts = [abstract_model(family, config, scan_layers=s, **options) for s in (False, True)]
    model = next((m for m in layouts if _params(m).keys() == values.keys()), layouts[0])
    variables = _params(model)
    _check(folder, {name: tuple(variable.shape) for name, variable in variables.items()}, values)
    for name, variable in variables.items():
        stored = dtype is None and not is_float32_param(variable)
        value = values[name]
        variable.set_value(value if stored else value.astype(variable.dtype))
    return model


def _params(model: nnx.Module) -> dict[Name, nnx.Variable]:
    found = nnx.iter_graph(model)
    return {tuple(map(str, path)): leaf for path, leaf in found if isinstance(leaf, nnx.Param)}


def _read(folder: Path) -> dict[Name, jax.Array]:
    """The arrays of an Orbax checkpoint, on the default device."""
    if not (folder / "_METADATA").is_file():
        raise CheckpointError(f"{folder} is no Orbax checkpoint: it has no _METADATA")
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    as_stored = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)  # noqa: E731
    try:
        _read_once(folder)
        with ocp.StandardCheckpointer() as checkpointer:
            tree: Any = checkpointer.metadata(folder).item_metadata.tree
            restored = checkpointer.restore(folder, jax.tree.map(as_stored, tree))
    except Exception as error:  # of many kinds, Orbax's and tensorstore's, some pages long
        reason = textwrap.shorten(str(error), 300)
        raise CheckpointError(
            f"{folder} cannot be read as an Orbax checkpoint: {reason}"
        ) from error
    leaves = jax.tree_util.tree_leaves_with_path(restored)
    return {_name(path): leaf for path, leaf in leaves}


def _read_once(folder: Path) -> None:
    """Raises where a value is damaged.

    Orbax reads all arrays side by side: where some are damaged, one error is raised and the others
    are printed, some of them long after.
    """
    if not json.loads((folder / "_METADATA").read_text())["use_ocdbt"]:
        return
    (folder / "manifest.ocdbt").stat()  # a database without one would be taken for an empty one
    store: Any = ts.KvStore.open({"driver": "ocdbt", "base": f"{folder.as_uri()}/"}).result()
    for key in store.list().result():
        store.read(key).result()


def _name(path) -> Name:
    """Of a leaf; a variable saved as such adds a level."""
    name = tuple(str(entry.key) for entry in path)
    return name[:-1] if name[-1] == "value" else name


def _check(folder: Path, shapes: dict[Name, tuple[int, ...]], values) -> None:
    problems = [
        f"{what} parameters: {', '.join(map('.'.join, sorted(names)))}"
        for what, names in [
            ("missing", shapes.keys() - values.keys()),
            ("surplus", values.keys() - shapes.keys()),
        ]
        if names
    ]
    problems += [
        f"{'.'.join(name)} has shape {values[name].shape}, the model needs {shape}"
        for name, shape in shapes.items()
        if name in values and values[name].shape != shape
    ]
    if problems:
        raise CheckpointError(f"{folder / PARAMS}: {'; '.join(problems)}")
