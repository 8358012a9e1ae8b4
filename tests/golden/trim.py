"""Makes the copy of the golden files that the repository carries from the full archives.

    python tests/golden/trim.py FOLDER_WITH_THE_ARCHIVES [PATTERN ...]
    python tests/golden/trim.py --api FILE_WITH_ALL_SIGNATURES

Kept exactly, as float32: the config, the weights, the inputs, and of every recorded result a few
rows and columns. Nothing is rounded.
"""

from __future__ import annotations

import fnmatch
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load, load_file

sys.path.insert(0, str(Path(__file__).parent.parent))
import golden  # noqa: E402
from golden import draws  # noqa: E402

HERE = Path(__file__).parent
SERIALISED = "serialised_default_config_json"
ARCHIVES = {"model": "fla-models.tar.xz", "layer": "fla-layers.tar.xz"}
PATTERNS = [
    "model/delta_net__*",
    "model/gated_deltanet__*",
    "model/gated_deltaproduct__*",
    "model/kda__*",
    "model/gla__*",
    "model/gsa__*",
    "model/hgrn2__*",
    "model/hgrn__*",
    "model/linear_attn__*",
    "model/retnet__*",
    "model/transformer__*",
    "model/rwkv6__*",
    "model/rwkv7__*",
    "layer/DeltaNet",
    "layer/GatedDeltaNet",
    "layer/GatedDeltaNet2",
    "layer/GatedDeltaProduct",
    "layer/KimiDeltaAttention",
    "model/mamba__*",
    "model/mamba2__*",
    "model/mamba3__*",
    "model/samba__*",
    "layer/Mamba",
    "layer/Mamba2",
    "layer/Mamba3",
    "layer/Mamba3__mimo",
    "layer/Attention",
    "layer/RWKV6Attention",
    "layer/RWKV7Attention*",
    "layer/GatedLinearAttention",
    "layer/GatedSlotAttention",
    "layer/HGRN2Attention",
    "layer/HGRNAttention",
    "layer/LinearAttention",
    "layer/MultiScaleRetention",
]
# FLA's finite-difference checks of itself: nothing compares with them.
DROPPED_META = ("fd_rel_err",)
# Inputs, and results that are small or wanted whole.
WHOLE = ("input_ids", "labels", "loss", "aux_loss", "cu_seqlens", "attention_mask", "generated")
WHOLE_IN_LAYERS = ("x", "dy", "v_first", "shared_k", "shared_v")
# Time steps worth seeing: the ends, chunk borders, document borders (29, 96 when packed), the end
# of the padding (9).
STEPS = (0, 1, 2, 3, 8, 9, 10, 15, 16, 28, 29, 30, 31, 32, 47, 63, 64, 65, 69)
PACKED_STEPS = (0, 1, 3, 28, 29, 30, 32, 63, 64, 65, 95, 96, 97, 99, 128, 139)


def members(archive: Path, patterns: list[str]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """``(kind/case, file name -> content)`` of the cases of an archive that match."""
    files: dict[str, dict[str, bytes]] = {}
    with tarfile.open(archive, "r|xz") as tar:
        for member in tar:
            case, _, name = member.name.removeprefix("./").rpartition("/")
            if member.isfile() and any(fnmatch.fnmatch(case, p) for p in patterns):
                files.setdefault(case, {})[name] = tar.extractfile(member).read()
    yield from sorted(files.items())


def trim(kind: str, files: dict[str, bytes]) -> bytes:
    """One case as an ``.npz`` inside ``.xz``; :func:`golden.load` reads it."""
    meta = json.loads(files["meta.json"])
    arrays: dict[str, np.ndarray] = {}
    recipes = {}
    for name, tensor in load(files["model.safetensors"]).items():
        recipe = draws.find(meta["case"]["seed"], tensor)
        if recipe is None:
            arrays[f"weight/{name}"] = tensor
            continue
        drawn = draws.draw(meta["case"]["seed"], recipe, tensor.shape)
        at = np.flatnonzero(drawn != tensor)
        recipes[name] = {"draw": recipe, "shape": tensor.shape}
        if at.size:
            arrays[f"fix/{name}"] = at.astype(np.uint32)
            arrays[f"fixed/{name}"] = tensor.ravel()[at]
    for name, values in load(files["io.safetensors"]).items():
        index = kept(kind, name, values.shape)
        arrays[f"io/{name}"] = narrowed(values[np.ix_(*index)])
        for axis, positions in enumerate(index):
            if len(positions) < values.shape[axis]:
                arrays[f"at/{axis}/{name}"] = positions.astype(np.int32)
    texts = {"config": files["config.json"].decode(), "recipes": json.dumps(recipes)}
    texts["meta"] = json.dumps({k: v for k, v in meta.items() if k not in DROPPED_META})
    for name, text in texts.items():
        arrays[f"text/{name}"] = np.frombuffer(text.encode(), np.uint8)
    file = io.BytesIO()
    np.savez(file, **arrays)
    return lzma.compress(file.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def narrowed(values: np.ndarray) -> np.ndarray:
    """float16 where that is exact; the loader widens it again."""
    if values.dtype != np.float32:
        return values
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float16)
    return narrow if np.array_equal(narrow.astype(np.float32), values) else values


def kept(kind: str, name: str, shape: tuple[int, ...]) -> list[np.ndarray]:
    """The positions of each axis that stay."""
    every = [np.arange(size) for size in shape]
    if name in WHOLE or (kind == "layer" and name in WHOLE_IN_LAYERS) or not shape:
        return every
    if name.startswith("grad."):
        return [spread(size, 8 if axis == 0 else 24) for axis, size in enumerate(shape)]
    if name.startswith("cache."):
        return [every[0], *(spread(size, 12) for size in shape[1:])]
    if name.startswith("packed"):
        return [every[0], steps(shape[1], PACKED_STEPS), spread(shape[2], 12)]
    return [every[0], steps(shape[1], STEPS), *(spread(size, 24) for size in shape[2:])]


def steps(length: int, wanted: tuple[int, ...]) -> np.ndarray:
    """The wanted time steps, all of a short run."""
    return np.arange(length) if length <= 16 else np.array([t for t in wanted if t < length])


def spread(size: int, count: int) -> np.ndarray:
    """``count`` positions over the whole axis, both ends among them."""
    return np.unique(np.linspace(0, size - 1, min(size, count)).round().astype(int))


def verify(case: str, files: dict[str, bytes]) -> None:
    """Reads a trimmed case back and compares it with the full one, bit by bit."""
    back = golden.trimmed(*case.split("/"))
    assert (back.folder / "config.json").read_bytes() == files["config.json"]
    pairs = [(load_file(back.folder / "model.safetensors"), load(files["model.safetensors"]))]
    full = load(files["io.safetensors"])
    pairs.append((back.recorded, {name: back.part(name, full[name]) for name in full}))
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name].dtype == value.dtype and np.array_equal(ours[name], value), name


def trim_api(source: str) -> None:
    """Of flash-linear-attention's signatures, what the tests compare with: one entry per line."""
    api = json.loads(Path(source).read_text())
    lines = [
        json.dumps({"config": name, "cls": each["cls"], "json": each[SERIALISED]})
        for name, each in api["configs"].items()
    ]
    lines += [json.dumps({"layer": k, "init": v["init"]}) for k, v in api["layers"].items()]
    (HERE / "fla_api.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(folder: str, *patterns: str) -> None:
    for kind, archive in ARCHIVES.items():
        wanted = [p for p in patterns or PATTERNS if p.startswith(kind)]
        for case, files in members(Path(folder, archive), wanted):
            target = HERE / f"{case}.npz.xz"
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(trim(kind, files))
            verify(case, files)
            print(f"{target.stat().st_size:8d} {case}")


if __name__ == "__main__":
    trim_api(sys.argv[2]) if sys.argv[1] == "--api" else main(*sys.argv[1:])
