"""Calls of the command ``jla``, and what may come of them."""

import json
import re
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from typer.testing import CliRunner

from jla.cli import app

ROOT = Path(__file__).parent.parent.parent
SHIPPED = ROOT / "examples" / "checkpoints" / "tiny_gated_deltanet"


def call(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def output(*args) -> str:
    """What a call that must succeed prints."""
    done = call(*args)
    assert done.exit_code == 0, done.stderr or done.exception
    assert done.stderr == "", "a progress bar is for terminals"
    return done.stdout


def assert_one_line(done, message, code=2):
    """A call that must fail says why in one line, and nothing else."""
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    assert re.fullmatch(rf"jla: .*{message}.*\n", done.stderr), done.stderr


def copy_with_tokenizer(folder: Path, **settings) -> Path:
    """The shipped checkpoint with a tokenizer whose tokens are bytes, numbered otherwise."""
    shutil.copytree(SHIPPED, folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={each: i for i, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
