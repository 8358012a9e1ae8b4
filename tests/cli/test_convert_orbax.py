"""Checkpoints between flash-linear-attention's format and Orbax's, and conversions cut short."""

import json
import os
import signal
import subprocess
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from convert.checkpoints import assert_same, read
from flax import nnx
from safetensors.numpy import load_file

from cli.call import ROOT, SHIPPED, assert_one_line, call, copy_with_tokenizer, output
from jla.convert import CheckpointError, to_state_dict
from jla.models import AutoModelForCausalLM
from jla.train.checkpoint import load_orbax, save_orbax


@pytest.fixture(scope="module")
def orbax(tmp_path_factory):
    """The shipped checkpoint and a tokenizer, as Orbax's."""
    folder = tmp_path_factory.mktemp("orbax")
    source = copy_with_tokenizer(folder / "source")
    output("convert", source, folder / "orbax", "--to", "orbax")
    return folder / "orbax"


def test_there_and_back(orbax, tmp_path):
    report = output("convert", orbax, tmp_path / "back", "--report")
    stored = load_file(SHIPPED / "model.safetensors")
    assert_same(read(tmp_path / "back"), stored)
    assert {line.split()[0] for line in report.splitlines()} >= stored.keys()
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    assert {*os.listdir(orbax)} == {*names, "params"}
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (orbax / name).read_bytes()


def test_between_dtypes(orbax, tmp_path):
    wide, back = tmp_path / "wide", tmp_path / "back"
    report = output("convert", orbax, wide, "--to", "orbax", "--dtype", "float32", "--report")
    rows = [line.split() for line in report.splitlines()]
    assert ["model.embeddings.weight", "256x128", "bfloat16", "float32"] in rows
    assert ["model.layers.0.attn.A_log", "4", "float32", "float32"] in rows
    output("convert", wide, back, "--dtype", "bfloat16")
    assert_same(read(back), load_file(SHIPPED / "model.safetensors"))


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("saved", [nnx.to_pure_dict, lambda state: state], ids=["dict", "state"])
def test_what_a_training_loop_saved(saved, scan_layers, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, scan_layers=scan_layers)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", saved(nnx.state(model, nnx.Param)))
    (tmp_path / "config.json").write_bytes((SHIPPED / "config.json").read_bytes())
    again = load_orbax(tmp_path)
    assert_same(to_state_dict(again), to_state_dict(model))
    assert len(again.model.layers) == len(model.model.layers)
    wide = load_orbax(tmp_path, dtype=jnp.float32)
    assert {each.dtype.name for each in to_state_dict(wide).values()} == {"float32"}


def test_nothing_is_overwritten(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    (tmp_path / "params").mkdir()
    with pytest.raises(ValueError, match="params exists"):
        save_orbax(model, tmp_path)


def test_parameters_that_do_not_fit_the_config(orbax, tmp_path):
    config = json.loads((orbax / "config.json").read_text())
    (tmp_path / "params").symlink_to(orbax / "params")
    for fields, message in [
        (dict(vocab_size=300), r"embeddings.embedding has shape \(256, 128\), .*\(300, 128\)"),
        (dict(num_hidden_layers=5), r"missing parameters: model.layers.4.attn.A_log, "),
        (dict(tie_word_embeddings=False), r"missing parameters: lm_head.kernel$"),
        (dict(num_hidden_layers=3), r"surplus parameters: model.layers.3.attn.A_log, "),
        (dict(num_heads=0), "config.json makes no model: ZeroDivisionError"),
        (dict(model_type="bert"), r"model_type must be one of \[.*\], got 'bert'"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        assert_one_line(call("convert", tmp_path, tmp_path / "to"), message)
    (tmp_path / "config.json").unlink()
    assert_one_line(call("convert", tmp_path, tmp_path / "to"), "has no config.json")
    with pytest.raises(CheckpointError, match="params is no Orbax checkpoint"):
        load_orbax(SHIPPED)


def test_broken_checkpoints(tmp_path):
    output("convert", SHIPPED, tmp_path / "orbax", "--to", "orbax")
    params = tmp_path / "orbax" / "params"
    data = max((path for path in params.rglob("*") if path.is_file()), key=os.path.getsize)
    os.truncate(data, 1000)
    done = call("convert", tmp_path / "orbax", tmp_path / "to")
    assert_one_line(done, "params cannot be read as an Orbax checkpoint: ")
    (params / "manifest.ocdbt").unlink()
    done = call("convert", tmp_path / "orbax", tmp_path / "to")
    assert_one_line(done, "No such file or directory: .*manifest.ocdbt")
    (params / "_METADATA").unlink()
    done = call("convert", tmp_path / "orbax", tmp_path / "to")
    assert_one_line(done, "params is no Orbax checkpoint: it has no _METADATA")
    assert not (tmp_path / "to").exists()


def test_shards_are_of_safetensors(tmp_path):
    done = call("convert", SHIPPED, tmp_path / "to", "--to", "orbax", "--max-shard-size", "1MB")
    assert_one_line(done, "--max-shard-size is for --to fla")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("to", ["fla", "orbax"])
def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch, to, error):
    """Interrupted behind the weights, before the tokenizer's files."""

    def interrupt(*args):
        (aside,) = tmp_path.iterdir()
        assert list(aside.glob("target/config.json")), "something was written"
        raise error

    monkeypatch.setattr("jla.cli.convert.copy_tokenizer", interrupt)
    done = call("convert", SHIPPED, tmp_path / "target", "--to", to)
    assert done.exit_code != 0 and not list(tmp_path.iterdir())


KILLED = """
import os, signal
import jla.convert.files as files
write = files.save_file
def half(*args, **options):
    write(*args, **options)
    os.kill(os.getpid(), signal.SIGKILL)
files.save_file = half
from jla.cli import app
app()
"""


def test_a_killed_conversion_leaves_no_target(tmp_path):
    """Killed between two shards; what is left does not stand in the way."""
    target = tmp_path / "target"
    args = ["convert", str(SHIPPED), str(target), "--max-shard-size", "1MB"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED, *args], env=environment, timeout=240)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.rglob("model-00001-of-*")) and not target.exists()
    output(*args)
    assert_same(read(target), load_file(SHIPPED / "model.safetensors"))
