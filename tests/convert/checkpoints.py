"""Small checkpoints to load, spoil and compare."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from models.cases import build
from safetensors.numpy import load_file, save_file

from jla import convert
from jla.models import GatedDeltaNetConfig, TransformerConfig

_shared = dict(hidden_size=12, intermediate_size=20, num_hidden_layers=2, vocab_size=17)
DELTA = GatedDeltaNetConfig(num_heads=2, num_v_heads=4, head_dim=4, expand_v=1.5, **_shared)
SOFTMAX = TransformerConfig(num_heads=2, **_shared)
TIED = TransformerConfig(num_heads=2, tie_word_embeddings=True, **_shared)

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def tensors_of(config) -> dict[str, np.ndarray]:
    """A state dict in FLA's spelling, every value unlike the others'."""
    return convert.to_state_dict(build(config))


def write(folder: Path, config, tensors, **keys) -> Path:
    """A checkpoint as FLA writes it, without this project's writer."""
    folder.mkdir(exist_ok=True)
    settings = json.loads(config.to_json_string()) | keys
    (folder / "config.json").write_text(json.dumps(settings))
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(contiguous, folder / FILE, metadata={"format": "pt"})
    return folder


def write_shards(folder: Path, config, tensors, shards: int = 3) -> Path:
    """The same in several files with an index."""
    write(folder, config, {})
    (folder / FILE).unlink()
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::shards]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def read(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder, whatever its files."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def assert_same(ours, theirs) -> None:
    """Same names, dtypes, shapes and bytes."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        given, wanted = np.asarray(ours[name]), np.asarray(tensor)
        assert (given.dtype, given.shape) == (wanted.dtype, wanted.shape), name
        assert given.tobytes() == wanted.tobytes(), name


def state(model) -> dict[str, np.ndarray]:
    """A model's parameters in FLA's spelling."""
    return convert.to_state_dict(model)
