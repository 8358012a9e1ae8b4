"""Whether the library works at all on the installed JAX: one tiny model of each family.

`make test` runs it on the newest JAX that pyproject.toml allows; the tests run on a pinned one.
"""

from __future__ import annotations

import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jla import models, ops
from tools.versions import versions

SIZES: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_heads=2, vocab_size=64, intermediate_size=48
)
FAMILIES = {
    "gated_deltanet": models.GatedDeltaNetConfig(head_dim=16, expand_v=1.0, **SIZES),
    "transformer": models.TransformerConfig(**SIZES),
}


def check(config: models.Config) -> None:
    """Forward, backward, generation and a round trip through a checkpoint."""
    model = models.AutoModelForCausalLM.from_config(config, rngs=nnx.Rngs(0))
    ids = jnp.arange(40).reshape(2, 20)
    segment_ids = jnp.ones_like(ids).at[:, 9:].set(2)
    train = nnx.jit(nnx.value_and_grad(lambda m: m(ids, segment_ids, labels=ids).loss))
    leaves = jax.tree.leaves(train(model))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in leaves), "not finite"
    assert model.generate(ids, max_new_tokens=3).shape == (2, 23)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = models.AutoModelForCausalLM.from_pretrained(folder)
    read = nnx.jit(lambda model: model(ids).logits)
    np.testing.assert_array_equal(read(again), read(model))


def check_op() -> None:
    """The chunked form against the token-by-token one."""
    q, k, v = (
        jax.random.normal(key, (1, 70, 2, 8)) for key in jax.random.split(jax.random.key(0), 3)
    )
    gate, beta = -jnp.ones((1, 70, 2)) / 8, jnp.ones((1, 70, 2)) / 2
    outputs = [
        ops.gated_delta_rule(q, k, v, gate, beta, use_qk_l2norm=True, impl=impl)[0]
        for impl in ("reference", "chunk")
    ]
    np.testing.assert_allclose(*outputs, atol=1e-5)


def main() -> None:
    check_op()
    for config in FAMILIES.values():
        check(config)
    print(f"smoke run passed: {versions()}")


if __name__ == "__main__":
    main()
