"""The command ``jla`` on the shipped checkpoint, and on whatever else a user may give it."""

import importlib
import io
import json
import math
import os
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import fresh
import jax
import jax.numpy as jnp
import models.cases
import numpy as np
import pytest
from convert.checkpoints import assert_same, read
from flax import nnx
from helpers import assert_close
from safetensors.numpy import load_file, save_file

import jla.cli.convert
import jla.cli.info
import jla.cli.ppl
from cli.call import ROOT, SHIPPED, assert_one_line, call, copy_with_tokenizer, output
from jla.cli import app
from jla.cli.checkpoint import Checkpoint, look_at
from jla.cli.generate import Writer
from jla.convert.pretrained import abstract_model
from jla.eval import ByteCodec, TokenizerCodec
from jla.eval.perplexity import windows
from jla.models import MODELS, AutoModelForCausalLM, GatedDeltaNetConfig

TEXT = b"The import statement binds a name; assert fails."
COMMANDS = ("info", "generate", "convert", "eval ppl", "eval lm-eval", "bench", "version")
HEAVY = ("jax", "flax", "transformers", "numpy", "lm_eval", "datasets", "orbax", "tqdm")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A checkpoint with attention in layer 1, at most 16 tokens long."""
    attention = {"layers": [1], "num_heads": 2}
    config = GatedDeltaNetConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_heads=2,
        head_dim=4,
        vocab_size=256,
        max_position_embeddings=16,
        attn=attention,
    )
    folder = tmp_path_factory.mktemp("checkpoints") / "hybrid"
    AutoModelForCausalLM.from_config(config, rngs=nnx.Rngs(0)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    """The shipped checkpoint with a tokenizer whose tokens are bytes, numbered otherwise."""
    return copy_with_tokenizer(tmp_path_factory.mktemp("checkpoints") / "tokenizer")


@pytest.fixture
def spoiled(tmp_path):
    """Makes a copy of the shipped checkpoint with other fields of the config."""

    def make(**fields):
        folder = tmp_path / "spoiled"
        shutil.copytree(SHIPPED, folder)
        config = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def test_help_loads_nothing_heavy():
    code = f"""
import sys
from jla.cli import app
for command in {COMMANDS}:
    for args in (["--help"], ["eval", "--help"], [*command.split(), "--help"]):
        try:
            app(args)
        except SystemExit as end:
            assert end.code == 0
loaded = set({HEAVY}) & set(sys.modules)
assert not loaded, loaded
"""
    printed = fresh.python("-c", code)
    assert all(f"{command} " in printed for command in COMMANDS)


def test_entry_point_and_module_are_the_app():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["jla"].partition(":")
    assert getattr(importlib.import_module(module), name) is app
    assert fresh.python("-m", "jla.cli", "version") == output("version")
    assert output("version").startswith(f"jla {jla.__version__} (jax ")


def test_info_of_the_shipped_checkpoint(monkeypatch):
    monkeypatch.setattr("jla.convert.files.Tensors.__getitem__", None)  # nothing is loaded
    facts = json.loads(output("info", SHIPPED, "--json"))
    stored = load_file(SHIPPED / "model.safetensors")
    assert facts["model_type"] == "gated_deltanet"
    assert facts["vocab_size"] == 256
    assert facts["parameters"]["count"] == sum(each.size for each in stored.values())
    assert facts["parameters"]["bytes"] == sum(each.nbytes for each in stored.values())
    assert facts["parameters"]["dtypes"].keys() == {"bfloat16", "float32"}
    assert [layer["mixer"] for layer in facts["layers"]] == 4 * ["GatedDeltaNet"]
    assert facts["hybrid_layers"] == [] and facts["context_limit"] is None
    # Per layer: a float32 state, bfloat16 windows of q, k and v (3 tokens), and a segment id.
    layer = 4 * (4 * 32 * 32) + 2 * (3 * 3 * 128) + 4
    assert facts["state"]["bytes_per_row"] == 4 * layer
    assert facts["state"]["bytes_per_token"] == 0
    assert "4 GatedDeltaNet" in output("info", SHIPPED)


def test_info_of_a_hybrid(hybrid):
    facts = json.loads(output("info", hybrid, "--json"))
    assert facts["hybrid_layers"] == [1] and facts["context_limit"] == 16
    # float32 keys and values of 8 numbers.
    assert facts["state"]["bytes_per_token"] == facts["layers"][1]["bytes_per_token"] == 2 * 8 * 4
    model = AutoModelForCausalLM.from_pretrained(hybrid)
    expected = facts["state"]["bytes_per_row"] + 10 * facts["state"]["bytes_per_token"]
    assert jla.cli.info.size(model.new_cache(1, 10)) == expected
    assert "attention in layers 1" in output("info", hybrid)


@pytest.mark.parametrize("row", models.cases.MODELS)
def test_info_of_every_family(row):
    config = models.cases.MODELS[row].config
    shapes = abstract_model(MODELS[config.model_type], config)
    facts = json.loads(json.dumps(jla.cli.info.describe(Checkpoint(Path(), config, shapes))))
    assert len(facts["layers"]) == config.num_hidden_layers
    cache = jla.cli.info.size(jax.eval_shape(lambda: shapes.new_cache(3, 2)))
    assert cache == 3 * (facts["state"]["bytes_per_row"] + 2 * facts["state"]["bytes_per_token"])
    attending = [i for i, each in enumerate(facts["layers"]) if each["mixer"] == "Attention"]
    if 0 < len(attending) < len(facts["layers"]):
        assert facts["hybrid_layers"] == attending
    assert jla.cli.info.text(facts)


def test_info_of_a_repository_fetches_no_weights(monkeypatch, tmp_path):
    shutil.copy(SHIPPED / "config.json", tmp_path)
    asked = []

    def fetch(name, revision, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert output("info", "someone/model", "--json") == output("info", SHIPPED, "--json")
    assert asked == [("someone/model", ["*.json"])]


def test_a_repositorys_tokenizer_is_fetched_with_the_weights(monkeypatch, with_tokenizer):
    asked = []

    def fetch(name, revision, allow_patterns):
        asked.extend(allow_patterns)
        return str(with_tokenizer)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert look_at("someone/model").codec(as_bytes=False).encode(b"ab", "")
    assert {"*.json", "*.safetensors", "tokenizer.model", "merges.txt"} <= {*asked}


def test_loading_shows_its_progress_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for screen in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", screen)
        look_at(str(SHIPPED)).load()
        assert ("/74 [" in screen.getvalue()) == screen.isatty()


def test_generate_continues_bytes(tmp_path):
    (tmp_path / "prompt").write_bytes(TEXT)
    args = [SHIPPED, "--bytes", "--max-new-tokens", 12]
    streamed = output("generate", *args, "--prompt", TEXT.decode())
    facts = json.loads(output("generate", *args, "--prompt-file", tmp_path / "prompt", "--json"))
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    ids = model.generate(jnp.array([[0, *TEXT]]), max_new_tokens=12)[0, len(TEXT) + 1 :]
    assert facts["tokens"] == ids.tolist() and facts["prompt_tokens"] == len(TEXT) + 1
    assert facts["text"] == streamed == bytes(ids.tolist()).decode()
    assert not facts["finished"]
    args += ["--prompt", TEXT.decode(), "--dtype", "float32"]
    drawn = {output("generate", *args, "--temperature", 3, "--seed", s) for s in (1, 2)}
    assert len(drawn) == 2, "the seed decides what is drawn"


def test_generate_through_the_folders_tokenizer(with_tokenizer):
    args = [with_tokenizer, "--prompt", "for é", "--max-new-tokens", 12]
    facts = json.loads(output("generate", *args, "--json"))
    assert facts["prompt_tokens"] == len("for é".encode())
    codec = TokenizerCodec(with_tokenizer)
    assert codec.decode(facts["tokens"]).decode() == facts["text"] == output("generate", *args)


def test_only_whole_characters_are_streamed(with_tokenizer, capsysbinary):
    codec, text = TokenizerCodec(with_tokenizer), "aé→𝄞."
    writer, seen = Writer(codec, stops=(), quiet=False), b""
    for count, token in enumerate(codec.encode(text.encode(), ""), 1):
        writer(np.array([token]))
        seen += capsysbinary.readouterr().out
        assert seen.decode() == text.encode()[:count].decode(errors="ignore")
    writer.close()
    assert seen.decode() == text and not capsysbinary.readouterr().out


def test_what_never_became_a_character_is_written_at_the_end(with_tokenizer, capsysbinary):
    codec = TokenizerCodec(with_tokenizer)
    writer = Writer(codec, stops=(), quiet=False)
    writer(np.array(codec.encode("é".encode(), "")[:1]))
    assert not capsysbinary.readouterr().out
    writer.close()
    assert capsysbinary.readouterr().out.decode() == "\N{REPLACEMENT CHARACTER}"


def test_the_token_that_ends_a_text_is_not_written(capsysbinary):
    writer = Writer(ByteCodec(), stops=(0,), quiet=False)
    for token in b"ab\0":
        writer(np.array([token]))
    writer.close()
    assert writer.finished and writer.ids == [*b"ab"]
    assert capsysbinary.readouterr().out == b"ab"


def test_a_closed_pipe_is_raised_at_the_end(monkeypatch):
    class Closed(io.StringIO):
        @property
        def buffer(self):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    writer = Writer(ByteCodec(), stops=(), quiet=False)
    writer(np.array([97]))
    with pytest.raises(BrokenPipeError):
        writer.close()


def test_convert_there_and_back(tmp_path):
    wide, again, back = tmp_path / "wide", tmp_path / "again", tmp_path / "back"
    report = output("convert", SHIPPED, wide, "--dtype", "float32", "--report")
    output("convert", wide, again, "--dtype", "float32", "--max-shard-size", "1MB")
    output("convert", again, back, "--dtype", "bfloat16")
    stored = load_file(SHIPPED / "model.safetensors")
    assert_same(read(wide), {name: each.astype(np.float32) for name, each in stored.items()})
    assert_same(read(again), read(wide))
    assert len(list(again.glob("model-*.safetensors"))) > 1
    assert_same(read(back), stored)
    rows = [line.split() for line in report.splitlines()]
    assert ["model.embeddings.weight", "256x128", "bfloat16", "float32"] in rows
    assert ["model.layers.0.attn.A_log", "4", "float32", "float32"] in rows
    assert {row[0] for row in rows} >= stored.keys()
    assert sorted(tmp_path.iterdir()) == [again, back, wide]


def test_convert_keeps_dtypes_and_the_tokenizer(with_tokenizer, tmp_path):
    output("convert", with_tokenizer, tmp_path / "same")
    assert_same(read(tmp_path / "same"), read(with_tokenizer))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "same" / name).read_bytes() == (with_tokenizer / name).read_bytes()


def test_convert_reports_what_was_dropped_and_renamed():
    table = jla.cli.convert.table({"old": "float32", "kept": "F8_E4M3"}, {"kept": np.ones((2, 3))})
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["kept", "2x3", "F8_E4M3", "float64"],
        ["old", "float32", "dropped"],
    ]
    assert table.splitlines()[0].split() == ["name", "shape", "dtype", "in", "dtype", "out"]


def test_ppl_is_the_direct_computation(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(TEXT)
    ids = np.array([[0, *TEXT]])
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=jnp.float32)
    read_logits = nnx.jit(lambda model, ids: nnx.log_softmax(model(ids).logits.astype(jnp.float32)))

    def nats(window, stride):
        """Of every target, from the first window that has it."""
        total, done = 0.0, 0
        for begin in range(0, len(TEXT), stride):
            end = min(begin + window, len(TEXT))
            logits = np.asarray(read_logits(model, ids[:, begin:end]))[0]
            total -= sum(logits[i - begin, ids[0, i + 1]] for i in range(done, end))
            done = end
            if end == len(TEXT):
                return total

    found = {}
    for window, stride in [(len(TEXT), 7), (len(TEXT) + 9, 48), (24, 12)]:
        args = ["--bytes", "--dtype", "float32", "--window", window, "--stride", stride, "--json"]
        facts = found[window] = json.loads(output("eval", "ppl", SHIPPED, file, *args))
        expected = nats(window, stride)
        assert facts["tokens"] == facts["bytes"] == len(TEXT)
        assert_close(math.log(facts["perplexity"]), expected / len(TEXT), dtype="float32")
        bits = expected / len(TEXT) / math.log(2)
        assert_close(facts["bits_per_byte"], bits, dtype="float32")
    assert found[len(TEXT)]["perplexity"] == found[len(TEXT) + 9]["perplexity"]
    assert found[24]["perplexity"] > found[len(TEXT)]["perplexity"]


def test_ppl_through_a_tokenizer_and_of_several_files(with_tokenizer, tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_text("a short one", encoding="utf-8")
    files[1].write_text("und ein längerer, ohne Grund", encoding="utf-8")
    facts = json.loads(output("eval", "ppl", with_tokenizer, *files, "--json"))
    sizes = [len(file.read_bytes()) - 1 for file in files]  # the first token is given
    assert [each["tokens"] for each in facts["files"]] == sizes
    assert [each["bytes"] for each in facts["files"]] == sizes
    bits = [each["bits_per_byte"] for each in facts["files"]]
    assert_close(facts["bits_per_byte"], np.average(bits, weights=sizes), tol=1e-6)
    assert len(output("eval", "ppl", with_tokenizer, *files).splitlines()) == 3


@pytest.mark.parametrize("length, window, stride", [(2, 5, 5), (20, 5, 5), (20, 6, 2), (9, 8, 1)])
def test_windows_predict_every_token_once(length, window, stride):
    found = list(windows(length, window, stride))
    predicted = [i for _, first, end in found for i in range(first, end)]
    assert predicted == list(range(length - 1))
    assert all(begin <= first < end <= begin + window for begin, first, end in found)


def test_default_window_and_stride(hybrid):
    assert jla.cli.ppl.sizes(look_at(str(hybrid)), None, None) == (16, 8)
    assert jla.cli.ppl.sizes(look_at(str(SHIPPED)), 5000, None) == (5000, 2500)


PROMPT = ("--prompt", "a", "--bytes")
# What a command needs besides a checkpoint.
MORE = {
    "info": [],
    "generate": PROMPT,
    "convert": ["to"],
    "eval ppl": ["README.md", "--bytes"],
    "eval lm-eval": ["--bytes", "--tasks", "any"],
}


@pytest.mark.parametrize("command", MORE)
def test_wrong_path(command, tmp_path):
    done = call(*command.split(), tmp_path / "nowhere", *MORE[command])
    assert_one_line(done, "nowhere is neither a folder nor the id of a hub repository")


@pytest.mark.parametrize(
    "args, message",
    [
        (["--bytes"], "give --prompt or --prompt-file"),
        (["--bytes", "--prompt", "a", "--prompt-file", "b"], "give --prompt or --prompt-file"),
        (["--bytes", "--prompt", ""], "the prompt is empty"),
        (["--bytes", "--prompt-file", "nowhere"], "No such file or directory: 'nowhere'"),
        (["--prompt", "a"], "tiny_gated_deltanet has no tokenizer; --bytes"),
        ([*PROMPT, "--temperature", "-1"], "temperature must be at least 0, got -1.0"),
        ([*PROMPT, "--top-p", "2"], "top_p must be above 0 and at most 1, got 2.0"),
    ],
)
def test_bad_calls_of_generate(args, message):
    assert_one_line(call("generate", SHIPPED, *args), message)


def test_contexts_beyond_the_limit_of_attention(hybrid, tmp_path):
    long = call("generate", hybrid, "--bytes", "--prompt", "x" * 16, "--max-new-tokens", 1)
    assert_one_line(long, "the prompt's 17 tokens and 1 new ones exceed the model's limit of 16")
    (tmp_path / "text").write_text("text")
    done = call("eval", "ppl", hybrid, tmp_path / "text", "--bytes", "--window", 17)
    assert_one_line(done, "--window 17 exceeds the model's limit of 16")
    done = call("eval", "lm-eval", hybrid, "--bytes", "--tasks", "any", "--max-length", 17)
    assert_one_line(done, "--max-length 17 exceeds the model's limit of 16")


def test_text_that_is_not_utf8(with_tokenizer, tmp_path):
    file = tmp_path / "latin"
    file.write_bytes("naïve".encode("latin-1"))
    assert_one_line(call("eval", "ppl", with_tokenizer, file), "latin is not UTF-8 text")
    done = call("generate", with_tokenizer, "--prompt-file", file)
    assert_one_line(done, "the prompt is not UTF-8 text")
    assert json.loads(output("eval", "ppl", SHIPPED, file, "--bytes", "--json"))["tokens"] == 5


@pytest.mark.parametrize("command", MORE)
@pytest.mark.parametrize("damage", ["model_type", "weights"])
def test_every_command_says_what_is_wrong_with_a_checkpoint(command, damage, spoiled):
    folder = spoiled(**({"model_type": "bert"} if damage == "model_type" else {}))
    if damage == "weights":
        os.truncate(folder / "model.safetensors", 10_000)
    done = call(*command.split(), folder, *MORE[command])
    known = r"must be one of \[.*'gated_deltanet'.*\], got 'bert'"
    assert_one_line(done, {"model_type": known, "weights": "is cut short or not"}[damage])


def test_empty_prompts(with_tokenizer, tmp_path):
    (tmp_path / "empty").touch()
    for given in (["--prompt", ""], ["--prompt-file", tmp_path / "empty"]):
        for args in ([SHIPPED, "--bytes"], [with_tokenizer]):
            assert_one_line(
                call("generate", *args, *given), "the prompt is empty: there is nothing"
            )
    assert_one_line(call("generate", SHIPPED, "--bytes", "--prompt-file", tmp_path), "a directory")


def test_bad_calls_of_ppl(tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    assert_one_line(call("eval", "ppl", SHIPPED, empty, "--bytes"), "empty is too short")
    assert_one_line(call("eval", "ppl", SHIPPED, empty), "has no tokenizer")
    assert_one_line(call("eval", "ppl", SHIPPED, tmp_path / "no", "--bytes"), "No such file")
    done = call("eval", "ppl", SHIPPED, empty, "--bytes", "--window", 4, "--stride", 5)
    assert_one_line(done, "--stride 5 exceeds --window 4")


def test_bad_calls_of_convert(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert_one_line(call("convert", SHIPPED, tmp_path / "full"), "exists and is not an empty")
    assert_one_line(call("convert", SHIPPED, tmp_path / "full" / "file"), "exists and is not")
    assert_one_line(call("convert", SHIPPED, tmp_path / "no" / "to"), "no is no folder to write to")
    done = call("convert", SHIPPED, tmp_path / "to", "--max-shard-size", "much")
    assert_one_line(done, "max_shard_size must be bytes or like '500MB'")
    assert os.listdir(tmp_path) == ["full"]


def test_values_that_float16_cannot_hold(spoiled, tmp_path):
    folder = spoiled()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 0 + 1e6
    save_file(tensors, folder / "model.safetensors")
    done = call("convert", folder, tmp_path / "to", "--dtype", "float16")
    assert_one_line(done, "model.norm.weight has values beyond the range of float16")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"model_type": "bert"}, r"must be one of \[.*'gated_deltanet'.*\], got 'bert'"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_heads": -1}, "config.json makes no model: TypeError"),
        ({"num_heads": 0}, "config.json makes no model: ZeroDivisionError"),
        ({"attn": {"layers": [9], "num_heads": 2}}, "attn names layer 9"),
    ],
)
def test_broken_configs(spoiled, fields, message):
    assert_one_line(call("info", spoiled(**fields)), message)


def test_broken_checkpoints(spoiled):
    folder = spoiled(vocab_size=300)
    assert_one_line(call("generate", folder, *PROMPT), "--bytes needs a vocabulary of 256")
    (folder / "tokenizer.json").write_text("{}")
    assert_one_line(call("generate", folder, "--prompt", "a"), "tokenizer .* cannot be read")
    done = call("convert", folder, folder.parent / "to")
    assert_one_line(done, r"embeddings.weight has shape \(256, 128\), the model needs \(300, 128\)")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert_one_line(call("info", folder), "is cut short or not a safetensors file")
    (folder / "model.safetensors").unlink()
    assert_one_line(call("info", folder), "holds neither model.safetensors nor")
    (folder / "config.json").write_text("{")
    assert_one_line(call("info", folder), "is not JSON")
    (folder / "config.json").unlink()
    assert_one_line(call("info", folder), "has no config.json")


def test_debug_raises_the_error_itself(tmp_path):
    done = call("info", tmp_path / "nowhere", "--debug")
    assert done.exit_code == 1 and isinstance(done.exception, FileNotFoundError)


def test_an_error_of_ours_is_told_apart(monkeypatch):
    monkeypatch.setattr("jla.cli.info.describe", lambda _: {}["no"])
    assert_one_line(call("info", SHIPPED), r"KeyError: 'no' \(--debug shows where\)", code=1)


README = (ROOT / "README.md").read_text()


def is_call_of(command, line):
    return line[: 1 + len(command.split())] == ["jla", *command.split()]


def test_the_readmes_commands_run(tmp_path, monkeypatch):
    for name in ("examples", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    blocks = re.findall(r"^```sh\n(jla.*?)^```", README, re.DOTALL | re.MULTILINE)
    text = "".join(blocks).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    named = {command for command in COMMANDS for line in lines if is_call_of(command, line)}
    assert named == set(COMMANDS)
    for line in lines:
        assert output(*line[1:]).strip()
