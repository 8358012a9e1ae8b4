"""The main job on real input, on a CPU, in a few minutes: ``make demo``.

Reads a checkpoint in flash-linear-attention's format, measures it, generates, fine-tunes, saves,
loads again; then puts a linear-time mixer where a Flax model has attention.
"""

from __future__ import annotations

import inspect
import math
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import corpus
import train_tiny
from flax_block import TinyGPT, gated_deltanet, softmax_attention
from jla.models import AutoModelForCausalLM, CausalLM

PROMPT = "The import statement "
FINE_TUNE_STEPS, SWAP_STEPS = 40, 40


def load() -> CausalLM:
    title("1. Load a checkpoint in flash-linear-attention's format")
    model = AutoModelForCausalLM.from_pretrained(train_tiny.CHECKPOINT, dtype=jnp.float32)
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"{type(model).__name__}: {size:,} parameters, bytes in and out")
    return model


def measure(model: CausalLM) -> None:
    title("2. Bits per byte on text it was not trained on (Python's help topics)")
    held_out = corpus.held_out_documents()
    unigram = corpus.unigram_bits_per_byte(corpus.training_documents(), held_out)
    bits, seconds = timed(lambda: train_tiny.bits_per_byte(model, held_out))
    print(f"byte frequencies alone {unigram:.2f}")
    print(f"Gated DeltaNet         {bits:.2f}   ({seconds:.0f} s with compilation)")


def generate(model: CausalLM, prompt: str, count: int = 240) -> None:
    title(f"3. Generate {count} bytes")
    ids = corpus.encode(prompt)[None, :-1]
    options = dict(max_new_tokens=count, temperature=0.6, top_p=0.95, eos_token_id=(), key=1)
    _, first = timed(lambda: model.generate(ids, **options))
    tokens, seconds = timed(lambda: model.generate(ids, **options))
    print("    " + corpus.decode(tokens[0]).replace("\n", "\n    "))
    print(f"{count / seconds:,.0f} bytes/s (first call, with compilation: {first:.0f} s)")


def fine_tune(model: CausalLM) -> None:
    title("4. Fine-tune it from English to Python source, packed with segment_ids")
    training, unseen = python_sources()
    before = train_tiny.bits_per_byte(model, unseen)
    optimizer = train_tiny.make_optimizer(model, FINE_TUNE_STEPS, 2e-3)
    losses, seconds = timed(
        lambda: train_tiny.train(model, optimizer, training, FINE_TUNE_STEPS, title="fine-tune")
    )
    after = train_tiny.bits_per_byte(model, unseen)
    first, last = np.mean(losses[:5]) / math.log(2), np.mean(losses[-5:]) / math.log(2)
    print(f"training loss {first:.2f} -> {last:.2f} bits/byte in {seconds:.0f} s with compilation")
    print(f"unseen module {before:.2f} -> {after:.2f} bits/byte")
    assert last < first and after < before, "fine-tuning did not lower the loss"


def save_and_load(model: CausalLM) -> None:
    title("5. Save in flash-linear-attention's format and load again")
    ids = jnp.asarray(corpus.encode(PROMPT)[None])
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder)
    np.testing.assert_array_equal(again(ids).logits, model(ids).logits)
    print("config.json and model.safetensors written; the loaded model's logits are equal")


def swap() -> None:
    title("6. Swap the attention of a Flax model, no other line changed")
    for make in (softmax_attention, gated_deltanet):
        line = inspect.getsource(make).strip().splitlines()[-1].strip()
        print(line.replace("return", "    attention ="), flush=True)
        losses, seconds = timed(lambda make=make: train_flax_model(make))
        print(
            f"    loss {losses[0]:.2f} -> {losses[-1]:.2f} nats, {seconds:.0f} s with compilation"
        )
        assert losses[-1] < losses[0], "the loss did not fall"


def train_flax_model(make_attention: Callable) -> list[float]:
    """Some steps of the tutorial's training loop."""
    length, batch = 128, 8
    rows, _ = corpus.pack(corpus.training_documents(), length)
    rows = np.random.default_rng(0).permutation(rows)
    model = TinyGPT(make_attention, vocabulary=256, length=length, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, ids):
        def loss(model):
            logits = model(ids[:, :-1], training=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    starts = range(0, SWAP_STEPS * batch, batch)
    with tqdm(starts, desc="    train", unit="step", mininterval=0.5, leave=False) as bar:
        return [float(step(model, optimizer, rows[i : i + batch])) for i in bar]


def python_sources() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Modules of the standard library as documents, and one that is kept out."""
    import argparse
    import ast
    import calendar
    import configparser
    import dataclasses
    import textwrap

    modules = (argparse, ast, calendar, configparser, dataclasses)
    training = [corpus.encode(inspect.getsource(module)) for module in modules]
    return training, [corpus.encode(inspect.getsource(textwrap))]


def timed(function: Callable):
    """The result and the seconds it took."""
    start = time.perf_counter()
    result = jax.block_until_ready(function())
    return result, time.perf_counter() - start


def title(text: str) -> None:
    print(f"\n{text}", flush=True)


def main() -> None:
    start = time.perf_counter()
    model = load()
    measure(model)
    generate(model, PROMPT)
    fine_tune(model)
    save_and_load(model)
    swap()
    print(f"\nAll of it in {time.perf_counter() - start:.0f} s on {jax.default_backend()}.")


if __name__ == "__main__":
    main()
