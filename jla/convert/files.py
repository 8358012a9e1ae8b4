"""safetensors checkpoints: one file, or shards with an index; read and written without torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jla.convert.state_dict import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of a checkpoint folder, read from disk one at a time, when looked up.

    Raises:
        CheckpointError: no checkpoint in the folder, missing shards, a file that is cut short or is
            not safetensors, or an index that its shards contradict.
    """

    def __init__(self, folder: Path):
        self._files = {name: folder / file for name, file in _locate(folder).items()}
        self._open: tuple[Path, Any] | None = None

    def __getitem__(self, name: str) -> np.ndarray:
        path = self._files[name]
        if self._open is None or self._open[0] != path:
            self._open = (path, safe_open(path, framework="numpy"))
        return self._open[1].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def dtypes(self) -> dict[str, str]:
        """safetensors' dtype name (``"F32"``, ``"BF16"``, ...) of every tensor, unread."""
        found = {}
        for path in sorted(set(self._files.values())):
            with safe_open(path, framework="numpy") as file:
                found |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        return found


def _locate(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_names(folder / SINGLE), SINGLE)
    if not (folder / INDEX).is_file():
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (json.JSONDecodeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX} is not a safetensors index: {error!r}") from None
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise CheckpointError(f"{folder} lacks the shards {', '.join(absent)} that its index names")
    present = {name: shard for shard in shards for name in _names(folder / shard)}
    wrong = sorted(name for name, shard in weight_map.items() if present.get(name) != shard)
    if wrong:
        raise CheckpointError(f"the index names tensors its shards lack: {', '.join(wrong)}")
    return present


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise CheckpointError(f"{path} is cut short or not a safetensors file: {error}") from None


def write_checkpoint(
    folder: Path, texts: Mapping[str, str], tensors: Mapping[str, np.ndarray], max_shard_size: int
) -> None:
    """Writes text files and tensors to ``folder``, whole or not at all.

    Everything is first written to a hidden folder inside ``folder`` and renamed into place; files
    of an earlier checkpoint that the new one does not have are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = _split(tensors, max_shard_size)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as aside:
        for name, text in texts.items():
            Path(aside, name).write_text(text, encoding="utf-8")
        for name, part in shards.items():
            # The metadata tells transformers which framework's layout this is.
            save_file(part, Path(aside, name), metadata={"format": "pt"})
        if len(shards) > 1:
            Path(aside, INDEX).write_text(_index(shards), encoding="utf-8")
        written = sorted(os.listdir(aside))
        for name in written:
            os.chmod(Path(aside, name), 0o666 & ~_umask())
            os.replace(Path(aside, name), folder / name)
    for path in folder.iterdir():
        stale = path.name in (SINGLE, INDEX) or _SHARD.fullmatch(path.name)
        if stale and path.name not in written:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def _split(tensors, max_shard_size) -> dict[str, dict[str, np.ndarray]]:
    groups: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > max_shard_size:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    total = len(groups)
    return {f"model-{i:05d}-of-{total:05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _index(shards) -> str:
    total = sum(tensor.nbytes for part in shards.values() for tensor in part.values())
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    return (
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
