"""A checkpoint that is looked at before its weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jla.convert import CheckpointError, from_pretrained
from jla.convert.files import Tensors
from jla.convert.pretrained import abstract_model, checkpoint_folder, file_dtype, read_config
from jla.layers import TokenMixer
from jla.models import CausalLM, Config


class Checkpoint(NamedTuple):
    """A folder, its config, and the model's shapes and dtypes."""

    folder: Path
    config: Config
    shapes: CausalLM

    def load(self, dtype: str | None = None) -> CausalLM:
        """The model; ``dtype`` of its parameters, the file's if None."""
        return from_pretrained(None, self.folder, dtype=None if dtype is None else jnp.dtype(dtype))

    def limit(self) -> int | None:
        """Tokens of context; None where no layer attends to all of them."""
        mixers = [block.attn for block in self.shapes.model.layers]
        whole = any(attends(mixer) and window(mixer) is None for mixer in mixers)
        return self.config.max_position_embeddings if whole else None


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
        weights: whether a hub repository's weights are fetched; without them the dtype is the one
            that its config names.

    Raises:
        FileNotFoundError, ValueError: as :func:`jla.convert.from_pretrained`.
    """
    weights = weights or Path(folder_or_repo_id).is_dir()
    patterns = ["*.json", *(["*.safetensors"] if weights else [])]
    folder = checkpoint_folder(folder_or_repo_id, patterns=patterns)
    try:
        family, config = read_config(folder)
        dtype = file_dtype(Tensors(folder)) if weights else jnp.dtype(config.dtype or "float32")
        shapes = abstract_model(family, config, param_dtype=dtype)
        jax.eval_shape(lambda: shapes.new_cache(1, 1))  # some impossible sizes show only here
        return Checkpoint(folder, config, shapes)
    except (ArithmeticError, LookupError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'} makes no model: {error!r}") from error
