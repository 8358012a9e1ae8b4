"""Checkpoint folders: what is read, what is refused, what is written."""

import json
import os

import fresh
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, host_mesh
from jax.sharding import NamedSharding, PartitionSpec
from models.cases import MODELS, build, forward, tokens
from safetensors import safe_open

from convert.checkpoints import (
    DELTA,
    FILE,
    INDEX,
    SOFTMAX,
    assert_same,
    read,
    state,
    tensors_of,
    write,
    write_shards,
)
from jla import convert
from jla.convert import files
from jla.models import AutoModelForCausalLM, GatedDeltaNetForCausalLM, TransformerForCausalLM

Auto = AutoModelForCausalLM
FIXED = ("A_log", "dt_bias")


@pytest.fixture(scope="module")
def tensors():
    return tensors_of(DELTA)


@pytest.mark.parametrize("row", MODELS)
def test_s22_every_constant_comes_back(row, tmp_path):
    """Each tensor holds a constant of its own: none is drawn anew, none is left out, and a second
    export is byte-equal to the first."""
    config = MODELS[row].config
    shapes = {name: tensor.shape for name, tensor in tensors_of(config).items()}
    constants = {name: np.full(s, i + 1, np.float32) for i, (name, s) in enumerate(shapes.items())}
    model = Auto.from_pretrained(write(tmp_path / "given", config, constants))
    assert_same(state(model), constants)
    model.save_pretrained(tmp_path / "one")
    Auto.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "two")
    for name in ("config.json", FILE):
        one, two = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two"))
        assert one == two, name
    assert_same(read(tmp_path / "one"), constants)


def test_a_loaded_model_computes_what_the_saved_one_did(tmp_path):
    model, ids = build(DELTA), tokens(1, (2, 7)) % 17
    model.save_pretrained(tmp_path)
    expected = forward(model, ids).logits
    for options in ({}, {"scan_layers": True, "remat": True}):
        back = GatedDeltaNetForCausalLM.from_pretrained(tmp_path, **options)
        assert_close(forward(back, ids).logits, expected, tol=1e-6)


def test_s24_a_fresh_process_reads_the_transpose(tmp_path):
    """Kernels are stored transposed, contiguous, with the metadata that Transformers asks for."""
    model = build(DELTA)
    kernel = model.model.layers[0].attn.q_proj.kernel
    kernel.set_value(jnp.arange(12 * 8, dtype=jnp.float32).reshape(12, 8))
    model.save_pretrained(tmp_path)
    code = (
        "import sys, json; from safetensors import safe_open\n"
        "with safe_open(sys.argv[1], 'numpy') as f:\n"
        "    w = f.get_tensor('model.layers.0.attn.q_proj.weight')\n"
        "    print(json.dumps([f.metadata(), w.tolist()]))"
    )
    metadata, weight = json.loads(fresh.python("-c", code, str(tmp_path / FILE)))
    assert metadata == {"format": "pt"}
    np.testing.assert_array_equal(weight, np.arange(12 * 8).reshape(12, 8).T)


@pytest.mark.parametrize("narrow", [jnp.bfloat16, np.float16])
def test_narrow_files(narrow, tmp_path, tensors):
    """Kept in their dtype, decay rates apart; written back in their memory dtype."""
    given = {name: tensor.astype(narrow) for name, tensor in tensors.items()}
    model = Auto.from_pretrained(write(tmp_path / "given", DELTA, given))
    expected = {k: v.astype(np.float32) if k.endswith(FIXED) else v for k, v in given.items()}
    assert_same(state(model), expected)
    model.save_pretrained(tmp_path / "back")
    assert_same(read(tmp_path / "back"), expected)
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == str(
        jnp.dtype(narrow)
    )
    logits = jax.eval_shape(lambda: model(jnp.ones((1, 3), jnp.int32))).logits
    assert logits.dtype == narrow


def test_files_of_several_dtypes(tmp_path, tensors):
    kinds = [np.float32, jnp.bfloat16, np.float16]
    given = {k: v.astype(kinds[i % 3]) for i, (k, v) in enumerate(tensors.items())}
    model = Auto.from_pretrained(write(tmp_path, DELTA, given))
    assert_same(
        state(model),
        {k: v.astype(np.float32) if k.endswith(FIXED) else v for k, v in given.items()},
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_chosen_dtype(dtype, tmp_path, tensors):
    given = {k: v.astype(jnp.bfloat16) for k, v in tensors.items()}
    model = Auto.from_pretrained(write(tmp_path, DELTA, given), dtype=dtype)
    expected = {
        k: v.astype(np.float32).astype(np.float32 if k.endswith(FIXED) else dtype)
        for k, v in given.items()
    }
    assert_same(state(model), expected)


def test_float64_files(tmp_path, tensors):
    """Kept with 64-bit numbers on, else float32, without a warning."""
    given = {k: v.astype(np.float64) for k, v in tensors.items()}
    write(tmp_path, DELTA, given)
    assert_same(state(Auto.from_pretrained(tmp_path)), tensors)
    assert_same(state(Auto.from_pretrained(tmp_path, dtype=jnp.float32)), tensors)
    with jax.enable_x64(True):
        model = Auto.from_pretrained(tmp_path)
        kept = {k: tensors[k] if k.endswith(FIXED) else v for k, v in given.items()}
        assert_same(state(model), kept)


def test_a_compute_dtype(tmp_path, tensors):
    write(tmp_path, DELTA, tensors)
    model = Auto.from_pretrained(tmp_path, compute_dtype=jnp.bfloat16)
    assert_same(state(model), tensors)
    logits = jax.eval_shape(lambda: model(jnp.ones((1, 3), jnp.int32))).logits
    assert logits.dtype == jnp.bfloat16


def test_sharded_files(tmp_path, tensors):
    """Read from three files; written to as many as the size asks for, with an index."""
    model = Auto.from_pretrained(write_shards(tmp_path / "given", DELTA, tensors))
    assert_same(state(model), tensors)
    model.save_pretrained(tmp_path / "back", max_shard_size="4KB")
    shards = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert index["metadata"]["total_size"] == total
    assert index["weight_map"].keys() == tensors.keys()
    assert sorted(set(index["weight_map"].values())) == shards
    for shard in shards:
        with safe_open(tmp_path / "back" / shard, "numpy") as file:
            assert file.metadata() == {"format": "pt"}
            assert {k for k, v in index["weight_map"].items() if v == shard} == set(file.keys())
            sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118
        assert sum(sizes) <= 4000 or len(sizes) == 1
    assert_same(state(Auto.from_pretrained(tmp_path / "back")), tensors)


def test_stale_files_of_an_earlier_save_are_removed(tmp_path):
    model = build(DELTA)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model-card.safetensors").write_text("mine too")
    listing = {}
    for size in ("4KB", "9KB", "1GB", "4KB"):
        model.save_pretrained(tmp_path, max_shard_size=size)
        listing[size] = sorted(os.listdir(tmp_path))
        assert_same(state(Auto.from_pretrained(tmp_path)), state(model))
    assert listing["1GB"] == ["config.json", "model-card.safetensors", FILE, "notes.txt"]
    assert len(listing["9KB"]) < len(listing["4KB"]) and INDEX in listing["9KB"]


@pytest.mark.parametrize("size", ["5", "0GB", "big", "-1MB", 0, "5TB"])
def test_sizes_that_cannot_be_read(size, tmp_path):
    with pytest.raises(ValueError, match="max_shard_size must be"):
        build(SOFTMAX).save_pretrained(tmp_path / "new", max_shard_size=size)
    assert not (tmp_path / "new").exists()


def test_a_failing_write_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    old = build(DELTA)
    old.save_pretrained(tmp_path, max_shard_size="4KB")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    written = []

    def disk_full(part, path, **options):
        path.write_bytes(b"half a file")
        written.append(path)
        if len(written) == 2:
            raise OSError("No space left on device")

    monkeypatch.setattr(files, "save_file", disk_full)
    changed = build(DELTA)
    changed.model.norm.scale.set_value(changed.model.norm.scale[...] + 1)
    with pytest.raises(OSError, match="No space left"):
        changed.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(written) == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    monkeypatch.undo()
    assert_same(state(Auto.from_pretrained(tmp_path)), state(old))


def test_a_failing_write_leaves_a_new_folder_empty(tmp_path, monkeypatch):
    def disk_full(part, path, **options):
        path.write_bytes(b"half a file")
        raise OSError("No space left on device")

    monkeypatch.setattr(files, "save_file", disk_full)
    with pytest.raises(OSError, match="No space left"):
        build(SOFTMAX).save_pretrained(tmp_path / "new")
    assert not list((tmp_path / "new").glob("**/*"))


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/none/here"):
        with pytest.raises(OSError):
            build(SOFTMAX).save_pretrained(folder)
    assert (tmp_path / "file").read_text() == "mine"
    assert os.listdir(tmp_path) == ["file"]


def test_files_may_be_read_by_whom_the_umask_allows(tmp_path):
    before = os.umask(0o027)
    try:
        build(SOFTMAX).save_pretrained(tmp_path / "new")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()}
    assert modes == {"config.json": 0o640, FILE: 0o640}


def test_keys_of_a_config_that_we_do_not_know_survive(tmp_path, tensors):
    extra = {"our_note": {"a": [1, None]}, "auto_map": {"x": "y.Z"}, "fuse_everything": True}
    model = Auto.from_pretrained(write(tmp_path / "given", DELTA, tensors, **extra))
    model.save_pretrained(tmp_path / "back")
    saved = json.loads((tmp_path / "back/config.json").read_text())
    assert {key: saved[key] for key in extra} == extra
    assert saved["architectures"] == ["GatedDeltaNetForCausalLM"]
    assert (saved["model_type"], saved["dtype"]) == ("gated_deltanet", "float32")


def test_s21_an_old_config_key(tmp_path):
    config = type(DELTA).from_dict({**DELTA.to_dict(), "use_gate": False})
    folder = write(tmp_path, config, tensors_of(config))
    settings = json.loads((folder / "config.json").read_text())
    settings["use_output_gate"] = settings.pop("use_gate")
    (folder / "config.json").write_text(json.dumps(settings))
    model = Auto.from_pretrained(folder)
    assert model.config.use_gate is False
    assert_same(state(model), tensors_of(config))


def test_config_fields_can_be_overridden(tmp_path):
    folder = write(tmp_path, SOFTMAX, tensors_of(SOFTMAX))
    model = Auto.from_pretrained(folder, window_size=3, pad_token_id=7)
    assert (model.config.window_size, model.config.pad_token_id) == (3, 7)
    assert model.new_cache(1, 10)[0]["attn"]["k"].shape[1] == 3
    with pytest.raises(ValueError, match="window_size must be int"):
        Auto.from_pretrained(folder, window_size="wide")


def spoil(folder, tensors, damage):
    """Writes a damaged checkpoint; what the error must say."""
    shard = "model-00002-of-00003.safetensors"
    if damage == "no config":
        write(folder, DELTA, tensors)
        (folder / "config.json").unlink()
        return "has no config.json"
    if damage == "config is no JSON":
        write(folder, DELTA, tensors)
        (folder / "config.json").write_text("{")
        return "config.json is not JSON"
    if damage == "config without model_type":
        write(folder, DELTA, tensors)
        (folder / "config.json").write_text("{}")
        return "no model_type; known ones are .*gated_deltanet"
    if damage == "no tensors":
        write(folder, DELTA, tensors)
        (folder / FILE).unlink()
        return f"holds neither {FILE} nor"
    if damage in ("cut short", "header cut short", "empty file", "no safetensors"):
        write(folder, DELTA, tensors)
        whole = (folder / FILE).read_bytes()
        keep = {"cut short": -5, "header cut short": 40, "empty file": 0}.get(damage)
        (folder / FILE).write_bytes(b"PK" * 500 if keep is None else whole[:keep])
        return f"{FILE} is cut short or not a safetensors file"
    write_shards(folder, DELTA, tensors)
    if damage == "missing shard":
        (folder / shard).unlink()
        return f"lacks the shards {shard}"
    if damage == "shard cut short":
        (folder / shard).write_bytes((folder / shard).read_bytes()[:-1])
        return f"{shard} is cut short"
    if damage == "index is no JSON":
        (folder / INDEX).write_text("[")
        return "is not a safetensors index"
    if damage == "index without map":
        (folder / INDEX).write_text('{"weight_map": 3}')
        return "is not a safetensors index"
    index = json.loads((folder / INDEX).read_text())
    name = next(key for key, value in index["weight_map"].items() if value == shard)
    if damage == "index names the wrong shard":
        index["weight_map"][name] = "model-00001-of-00003.safetensors"
    else:
        name = "model.layers.9.attn.A_log"
        index["weight_map"][name] = shard
    (folder / INDEX).write_text(json.dumps(index))
    return f"its shards lack: {name}"


DAMAGES = [
    "no config",
    "config is no JSON",
    "config without model_type",
    "no tensors",
    "cut short",
    "header cut short",
    "empty file",
    "no safetensors",
    "missing shard",
    "shard cut short",
    "index is no JSON",
    "index without map",
    "index names the wrong shard",
    "index names an unknown tensor",
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints(damage, tmp_path, tensors):
    message = spoil(tmp_path / "given", tensors, damage)
    with pytest.raises(convert.CheckpointError, match=message) as error:
        Auto.from_pretrained(tmp_path / "given")
    assert str(tmp_path) in str(error.value) or "lack" in str(error.value)


def test_a_checkpoint_that_does_not_fit_lists_everything(tmp_path, tensors):
    given = dict(tensors)
    del given["model.norm.weight"]
    given["extra"] = np.zeros(2, np.float32)
    given["lm_head.weight"] = given["lm_head.weight"][:, :-1]
    with pytest.raises(convert.CheckpointError) as error:
        Auto.from_pretrained(write(tmp_path, DELTA, given))
    for part in ("missing tensors: model.norm.weight", "surplus tensors: extra"):
        assert part in str(error.value)
    assert "lm_head.weight has shape (17, 11), the model needs (17, 12)" in str(error.value)


def test_an_unknown_model_type_lists_the_known_ones(tmp_path, tensors):
    write(tmp_path, DELTA, tensors, model_type="retnet_of_tomorrow")
    with pytest.raises(ValueError, match="gated_deltanet.*transformer.*'retnet_of_tomorrow'"):
        Auto.from_pretrained(tmp_path)


def test_a_checkpoint_of_another_family(tmp_path, tensors):
    write(tmp_path, DELTA, tensors)
    with pytest.raises(ValueError, match="GatedDeltaNetForCausalLM, not a TransformerForCausalLM"):
        TransformerForCausalLM.from_pretrained(tmp_path)


def test_impossible_values_in_a_config(tmp_path, tensors):
    write(tmp_path, DELTA, tensors, hidden_size=0, norm_eps="small")
    with pytest.raises(ValueError, match="norm_eps must be float, got 'small'"):
        Auto.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["./none", "none", "a/b/c", "~/none", "/none/at/all"])
def test_no_such_folder(name):
    with pytest.raises(FileNotFoundError, match="neither a folder nor the id of a hub repository"):
        Auto.from_pretrained(name)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="neither a folder"):
        Auto.from_pretrained(tmp_path / "file")


def test_a_repository_while_offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="some-one/some-model is no folder, and no hub"):
        Auto.from_pretrained("some-one/some-model")


def test_a_repository_while_online(tmp_path, tensors, monkeypatch):
    write(tmp_path, DELTA, tensors)
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = Auto.from_pretrained("some-one/some-model", revision="v2")
    assert_same(state(model), tensors)
    assert asked == [("some-one/some-model", "v2", ["*.json", "*.safetensors"])]


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_straight_to_a_mesh(explicit, scan_layers, tmp_path, tensors):
    """Every array lies where the function says, in pieces, and the values are the file's."""
    write(tmp_path, DELTA, tensors)
    mesh, asked = host_mesh({"model": 4}, explicit=explicit), {}

    def sharding(name, shape):
        asked[name] = shape
        spec = [None] * len(shape)
        wide = [axis for axis, size in enumerate(shape) if size % 4 == 0]
        if wide:
            spec[wide[-1]] = "model"
        return NamedSharding(mesh, PartitionSpec(*spec))

    model = Auto.from_pretrained(tmp_path, sharding=sharding, scan_layers=scan_layers)
    q = "model.layers.0.attn.q_proj.weight"
    assert asked[q] == ((2, 12, 8) if scan_layers else (12, 8))
    kernel = model.model.layers[0].attn.q_proj.kernel[...]
    assert kernel.sharding.spec[-1] == "model"
    assert kernel.addressable_shards[0].data.shape[-1] == 2
    assert_same(state(model), tensors)


def test_one_sharding_for_all_and_the_same_logits(tmp_path, tensors):
    write(tmp_path, DELTA, tensors)
    mesh = host_mesh({"data": 4}, explicit=False)
    everywhere = NamedSharding(mesh, PartitionSpec())
    model = Auto.from_pretrained(tmp_path, sharding=everywhere)
    assert all(leaf.sharding == everywhere for leaf in jax.tree.leaves(nnx.state(model)))
    ids = tokens(1, (4, 7)) % 17
    with jax.set_mesh(mesh):
        rows = jax.device_put(ids, NamedSharding(mesh, PartitionSpec("data")))
        logits = forward(model, rows).logits
    assert_close(np.asarray(logits), forward(Auto.from_pretrained(tmp_path), ids).logits)


def test_saving_a_model_that_lies_on_a_mesh(tmp_path, tensors):
    write(tmp_path / "given", DELTA, tensors)
    mesh = host_mesh({"model": 4}, explicit=False)

    def sharding(name, shape):
        spec = PartitionSpec("model") if shape[0] % 4 == 0 else PartitionSpec()
        return NamedSharding(mesh, spec)

    Auto.from_pretrained(tmp_path / "given", sharding=sharding).save_pretrained(tmp_path / "back")
    assert_same(read(tmp_path / "back"), tensors)
