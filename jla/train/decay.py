"""Which parameters weight decay may touch."""

from __future__ import annotations

from typing import Any

import jax

DECAYED = frozenset({"kernel", "embedding"})


def decay_mask(params: Any) -> Any:
    """True for kernels and embeddings, False for everything else, as optax's ``mask`` wants it.

    Decay rates and step biases (``A_log``, ``dt_bias``, ``D``), norm scales and biases are not
    decayed: pulling them to 0 changes what a mixer remembers, not how large its weights are.

    Args:
        params: ``nnx.state(model, nnx.Param)`` or any pytree with the same paths.

    Returns:
        A pytree of bools of the same structure.

    Example:
        >>> decay_mask({"q_proj": {"kernel": 1.0}, "A_log": 2.0})
        {'A_log': False, 'q_proj': {'kernel': True}}
    """

    def decayed(path, _):
        names = [str(getattr(entry, "key", getattr(entry, "name", ""))) for entry in path]
        return any(name in DECAYED for name in names)

    return jax.tree_util.tree_map_with_path(decayed, params)
