"""Models from checkpoints and back: a local folder, or a repository of the Hugging Face hub."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jla.convert.files import Tensors, write_checkpoint
from jla.convert.state_dict import CheckpointError, load_state_dict, to_state_dict
from jla.models import MODELS, CausalLM, Config
from jla.models.auto import lookup

DTYPES = {"F64": jnp.float64, "F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16}
SIZES = {"KB": 10**3, "MB": 10**6, "GB": 10**9}

Sharding = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]


def from_pretrained[Model: CausalLM](
    cls: type[Model] | None,
    folder_or_repo_id: str | os.PathLike,
    *,
    dtype=None,
    compute_dtype=None,
    precision=None,
    scan_layers: bool = False,
    remat: bool | Callable = False,
    sharding: Sharding | jax.sharding.Sharding | None = None,
    revision: str | None = None,
    **config_overrides: Any,
) -> Model:
    """Loads an FLA checkpoint.

    Args:
        cls: the family, or None to go by the config's ``model_type``.
        folder_or_repo_id: a folder with ``config.json`` and safetensors, or a hub repository id.
        dtype: dtype of the parameters in memory; the file's, tensor by tensor, if None. ``A_log``,
            ``dt_bias`` and their like are float32 always.
        compute_dtype: the modules' ``dtype``; that of parameters and inputs together if None.
        precision, scan_layers, remat: as in the model's constructor.
        sharding: where arrays go, one sharding for all or a function of (FLA name, shape); each
            tensor is read and put there before the next is read. The default device if None.
        revision: branch, tag or commit of a hub repository.
        **config_overrides: fields of the config to change.

    Raises:
        FileNotFoundError: no such folder, and not the id of a repository that can be reached.
        CheckpointError: the checkpoint does not fit its config or is damaged.
        ValueError: unknown ``model_type`` or a config with impossible values.
    """
    folder = checkpoint_folder(folder_or_repo_id, revision)
    family, config = read_config(folder, **config_overrides)
    if cls is not None and not issubclass(family, cls):
        raise ValueError(f"{folder} holds a {family.__name__}, not a {cls.__name__}")
    tensors = Tensors(folder)
    model = abstract_model(
        family,
        config,
        dtype=compute_dtype,
        param_dtype=file_dtype(tensors) if dtype is None else dtype,
        precision=precision,
        scan_layers=scan_layers,
        remat=remat,
    )
    load_state_dict(model, tensors, keep_dtype=dtype is None, place=_placer(sharding))
    return cast(Model, model)


def save_pretrained(
    model: CausalLM, folder: str | os.PathLike, *, max_shard_size: int | str = "50GB"
) -> None:
    """Writes ``config.json`` and safetensors that FLA loads, whole or not at all.

    Args:
        model: its parameters are written in their memory dtype.
        folder: made if it does not exist.
        max_shard_size: bytes, or like ``"5GB"``; a larger checkpoint is cut into shards.

    Raises:
        OSError: the folder cannot be written; nothing of the checkpoint is left in it.
        ValueError: a shard size that cannot be read.
    """
    tensors = to_state_dict(model)
    text = config_text(model, [tensor.dtype for tensor in tensors.values()])
    write_checkpoint(Path(folder), {"config.json": text}, tensors, _bytes(max_shard_size))


def config_text(model: CausalLM, dtypes: Sequence[Any]) -> str:
    """``config.json`` of a model whose tensors are stored in ``dtypes``."""
    config = json.loads(model.config.to_json_string(use_diff=True))
    config["architectures"] = [type(model).__name__]
    if floating := [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]:
        config["dtype"] = str(collections.Counter(floating).most_common(1)[0][0])
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def checkpoint_folder(
    folder_or_repo_id: str | os.PathLike,
    revision: str | None = None,
    patterns: Sequence[str] = ("*.json", "*.safetensors"),
) -> Path:
    """A folder as it is, or that of the hub repository whose files ``patterns`` were fetched.

    Raises:
        FileNotFoundError: neither.
    """
    path = Path(folder_or_repo_id)
    if path.is_dir():
        return path
    name = str(folder_or_repo_id)
    if path.exists() or not _is_repo_id(name):
        raise FileNotFoundError(f"{name} is neither a folder nor the id of a hub repository")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{name} is no folder, and no hub repository of that name can be fetched: {error}"
        ) from error


def _is_repo_id(name: str) -> bool:
    parts: Sequence[str] = name.split("/")
    return len(parts) == 2 and all(parts) and not name.startswith((".", "~"))


def read_config(folder: Path, **overrides: Any) -> tuple[type[CausalLM], Config]:
    """The family and the config of a folder's ``config.json``.

    Raises:
        CheckpointError: no ``config.json``, or one that is not a config.
        ValueError: an unknown ``model_type`` or impossible values.
    """
    settings = _read_settings(folder) | overrides
    family = lookup(settings["model_type"])
    return family, family.model_class.config_class.from_dict(settings)


def abstract_model(family: type[CausalLM], config: Config, **options: Any) -> CausalLM:
    """A model of shapes and dtypes alone; ``options`` are those of its constructor."""
    return nnx.eval_shape(lambda: family(config, rngs=nnx.Rngs(0), **options))


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise CheckpointError(f"{path} has no model_type; known ones are {sorted(MODELS)}")
    return settings


def _special_float(entry: dict[str, Any]) -> Any:
    """Transformers writes an infinity, which JSON lacks, as ``{"__float__": "Infinity"}``."""
    return float(entry["__float__"]) if entry.keys() == {"__float__"} else entry


def file_dtype(tensors: Tensors):
    """The floating dtype that most tensors of a checkpoint have."""
    counts = collections.Counter(DTYPES[d] for d in tensors.dtypes().values() if d in DTYPES)
    dtype = counts.most_common(1)[0][0] if counts else jnp.float32
    return jnp.float32 if dtype is jnp.float64 and not jax.config.jax_enable_x64 else dtype


def _placer(sharding):
    if sharding is None:
        return None
    if isinstance(sharding, jax.sharding.Sharding):
        return lambda name, host: jax.device_put(host, sharding)
    return lambda name, host: jax.device_put(host, sharding(name, np.shape(host)))


def _bytes(size: int | str) -> int:
    if isinstance(size, int):
        number, unit = size, 1
    else:
        digits, unit = size[:-2], SIZES.get(size[-2:].upper(), 0)
        number = int(digits) if digits.isdecimal() else 0
    if number * unit < 1:
        raise ValueError(f"max_shard_size must be bytes or like '500MB' or '5GB', got {size!r}")
    return number * unit
