"""``jla info``."""

from __future__ import annotations

import collections
import json
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jla.cli.checkpoint import Checkpoint, attends, look_at, window


def run(folder_or_repo_id: str, as_json: bool) -> None:
    """Prints what :func:`describe` says, as JSON or as text."""
    facts = describe(look_at(folder_or_repo_id, weights=False))
    print(json.dumps(facts, indent=2) if as_json else text(facts))


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything that is printed. Bytes are those in memory once the checkpoint is loaded."""
    model, config = checkpoint.shapes, checkpoint.config
    layers = [layer(block) for block in model.model.layers]
    attending = [i for i, block in enumerate(model.model.layers) if attends(block.attn)]
    return {
        "model_type": config.model_type,
        "class": type(model).__name__,
        "parameters": parameters(model),
        "vocab_size": config.vocab_size,
        "layers": layers,
        "hybrid_layers": attending if len(attending) < len(layers) else [],
        "context_limit": checkpoint.limit(),
        "state": {
            "bytes_per_row": sum(entry["state_bytes"] for entry in layers),
            "bytes_per_token": sum(entry["bytes_per_token"] for entry in layers),
        },
    }


def parameters(model: nnx.Module) -> dict[str, Any]:
    """Count and bytes of the parameters, and the count of each dtype."""
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    dtypes = collections.Counter()
    for leaf in leaves:
        dtypes[jnp.dtype(leaf.dtype).name] += leaf.size
    return {"count": sum(dtypes.values()), "bytes": size(leaves), "dtypes": dict(dtypes)}


def layer(block) -> dict[str, Any]:
    """The mixer of a block and its state of one row: what is fixed, and what a token adds.

    Attention with a window adds until the window is full.
    """
    one, two = (
        size(jax.eval_shape(lambda length=length: block.new_cache(1, length, None)))
        for length in (1, 2)
    )
    return {
        "mixer": type(block.attn).__name__,
        "window": window(block.attn),
        "state_bytes": 2 * one - two,
        "bytes_per_token": two - one,
    }


def size(tree) -> int:
    """Bytes of all arrays of a tree."""
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def text(facts: dict[str, Any]) -> str:
    """The facts for people."""
    counted = facts["parameters"]
    dtypes = ", ".join(f"{count:,} {name}" for name, count in counted["dtypes"].items())
    mixers = collections.Counter(entry["mixer"] for entry in facts["layers"])
    windows = sorted({entry["window"] for entry in facts["layers"]} - {None})
    hybrid = ", ".join(map(str, facts["hybrid_layers"]))
    state = facts["state"]
    rows = {
        "model": f"{facts['model_type']} ({facts['class']})",
        "parameters": f"{counted['count']:,} in {counted['bytes']:,} bytes ({dtypes})",
        "vocabulary": f"{facts['vocab_size']:,}",
        "layers": ", ".join(f"{count} {name}" for name, count in mixers.items()) or "none",
        "hybrid": f"attention in layers {hybrid}" if hybrid else "no",
        "window": ", ".join(f"{each:,} tokens" for each in windows) or "none",
        "state": f"{state['bytes_per_row']:,} bytes a row, "
        f"{state['bytes_per_token']:,} more per token of context",
    }
    return "\n".join(f"{name:<11}{value}" for name, value in rows.items())
