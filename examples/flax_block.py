"""A small language model as Flax's tutorials write it; the caller chooses its attention."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jla.layers import GatedDeltaNet

WIDTH, HEADS = 64, 4


def softmax_attention(rngs: nnx.Rngs) -> nnx.Module:
    """What the tutorials have."""
    return nnx.MultiHeadAttention(num_heads=HEADS, in_features=WIDTH, decode=False, rngs=rngs)


def gated_deltanet(rngs: nnx.Rngs) -> nnx.Module:
    """What takes its place."""
    return GatedDeltaNet(WIDTH, num_heads=HEADS, head_dim=16, expand_v=1, rngs=rngs)


class TransformerBlock(nnx.Module):
    """Attention and feed-forward, each with dropout on a residual, then a norm."""

    def __init__(self, make_attention: Callable[[nnx.Rngs], nnx.Module], *, rngs: nnx.Rngs):
        self.attention = make_attention(rngs)
        self.dropout1, self.dropout2 = nnx.Dropout(0.1, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.linear1 = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.linear2 = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, inputs: jax.Array, training: bool = False) -> jax.Array:
        mask = nnx.make_causal_mask(inputs[..., 0])
        attended = self.attention(inputs_q=inputs, mask=mask)
        attended = self.dropout1(attended, deterministic=not training)
        x = self.norm1(inputs + attended)
        fed = self.linear2(nnx.relu(self.linear1(x)))
        return self.norm2(x + self.dropout2(fed, deterministic=not training))


class TinyGPT(nnx.Module):
    """Token and position embeddings, blocks, and a head over ``vocabulary``."""

    def __init__(
        self,
        make_attention: Callable[[nnx.Rngs], nnx.Module],
        *,
        vocabulary: int,
        length: int,
        blocks: int = 2,
        rngs: nnx.Rngs,
    ):
        self.tokens = nnx.Embed(vocabulary, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(length, WIDTH, rngs=rngs)
        self.blocks = nnx.List([TransformerBlock(make_attention, rngs=rngs) for _ in range(blocks)])
        self.head = nnx.Linear(WIDTH, vocabulary, rngs=rngs)

    def __call__(self, ids: jax.Array, training: bool = False) -> jax.Array:
        x = self.tokens(ids) + self.positions(jnp.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, training)
        return self.head(x)
