"""A checkpoint that is looked at before its weights are loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from tqdm import tqdm

from jla.convert import CheckpointError, from_pretrained
from jla.convert.files import Tensors
from jla.convert.pretrained import abstract_model, checkpoint_folder, file_dtype, read_config
from jla.eval import ByteCodec, Codec, TokenizerCodec
from jla.eval.tokens import FILES
from jla.layers import TokenMixer
from jla.models import CausalLM, Config


class Checkpoint(NamedTuple):
    """A folder, its config, and the model's shapes and dtypes."""

    folder: Path
    config: Config
    shapes: CausalLM

    def load(self, dtype: str | None = None, *, scan_layers: bool = False) -> CausalLM:
        """The model, under a progress bar if stderr is a terminal.

        Args:
            dtype: of its parameters; the file's, tensor by tensor, if None.
            scan_layers: as in the model's constructor.
        """
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        total = None if scan_layers else len(jax.tree.leaves(nnx.state(self.shapes, nnx.Param)))
        with tqdm(desc="load", total=total, unit="tensor", leave=False, disable=None) as bar:

            def place(name, shape):
                bar.update()
                return device

            return from_pretrained(
                None,
                self.folder,
                dtype=None if dtype is None else jnp.dtype(dtype),
                scan_layers=scan_layers,
                sharding=place,
            )

    def limit(self) -> int | None:
        """Tokens of context; None where no layer attends to all of them."""
        mixers = [block.attn for block in self.shapes.model.layers]
        whole = any(attends(mixer) and window(mixer) is None for mixer in mixers)
        return self.config.max_position_embeddings if whole else None

    def length(self, given: int | None, option: str) -> int:
        """How many tokens the model reads at once: ``given``, else the config's length.

        Raises:
            ValueError: more than :meth:`limit`; the message names the ``option``.
        """
        limit = self.limit()
        if given is not None and limit is not None and given > limit:
            raise ValueError(f"{option} {given} exceeds the model's limit of {limit} tokens")
        return given or self.config.max_position_embeddings or 2048

    def codec(self, as_bytes: bool) -> Codec:
        """What turns text into this checkpoint's ids: its tokenizer, or bytes.

        Raises:
            FileNotFoundError: the folder has no tokenizer.
            ValueError: the tokenizer cannot be read, or a vocabulary is not one of bytes.
        """
        if not as_bytes:
            return TokenizerCodec(self.folder)
        if self.config.vocab_size != 256:
            raise ValueError(
                f"--bytes needs a vocabulary of 256, this model's is {self.config.vocab_size}"
            )
        return ByteCodec()


def attends(mixer: TokenMixer) -> bool:
    """Whether a mixer keeps something of each token, as attention does."""
    return bool(mixer.growing)


def window(mixer: TokenMixer) -> int | None:
    """How many tokens a mixer with a window sees, None for one without."""
    return getattr(mixer, "window_size", None)


def look_at(folder_or_repo_id: str, *, weights: bool = True) -> Checkpoint:
    """The checkpoint, no tensor of it loaded.

    Args:
        folder_or_repo_id: as :func:`jla.convert.from_pretrained` takes it.
        weights: whether a hub repository's weights and tokenizer are fetched; without them the
            dtype is the one that its config names.

    Raises:
        FileNotFoundError, ValueError: as :func:`jla.convert.from_pretrained`.
    """
    weights = weights or Path(folder_or_repo_id).is_dir()
    patterns = ["*.json", *(["*.safetensors", *FILES] if weights else [])]
    folder = checkpoint_folder(folder_or_repo_id, patterns=patterns)
    with impossible_sizes(folder):
        family, config = read_config(folder)
        dtype = file_dtype(Tensors(folder)) if weights else jnp.dtype(config.dtype or "float32")
        shapes = abstract_model(family, config, param_dtype=dtype)
        jax.eval_shape(lambda: shapes.new_cache(1, 1))  # some impossible sizes show only here
        return Checkpoint(folder, config, shapes)


@contextlib.contextmanager
def impossible_sizes(folder: Path) -> Iterator[None]:
    """Says of a config what it is when making its model fails somewhere inside."""
    try:
        yield
    except (ArithmeticError, LookupError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'} makes no model: {error!r}") from error
