"""Times whole layers and training steps, with the kernels and with plain JAX.

    python -m benchmarks.models --layers
    python -m benchmarks.models --train gated_deltanet --impl auto

A layer is timed forward and backward, hidden size 2048, bfloat16. ``--train`` takes one model of
about 1.3 billion parameters through steps of AdamW on 16,384 tokens, bfloat16 with float32
parameters and every block recomputed; it tells the seconds from the start of the process to the end
of the first step, and tokens a second after it. ``gated_deltanet`` and ``mamba2`` have the default
sizes of FLA (the first: 6 heads of 256, values of 512), ``gated_deltanet_128`` 16 heads of 128.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from concurrent import futures

START = time.perf_counter()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from jla import ops  # noqa: E402
from jla.bench.timing import median_ms  # noqa: E402
from jla.layers import GatedDeltaNet, Mamba2  # noqa: E402
from jla.models import AutoModelForCausalLM, GatedDeltaNetConfig, Mamba2Config  # noqa: E402

HIDDEN, TOKENS = 2048, 16384
SHAPES = [(8, 2048), (1, 16384)]
LAYERS = {
    "GatedDeltaNet": lambda **o: GatedDeltaNet(HIDDEN, head_dim=128, num_heads=16, expand_v=1, **o),
    "Mamba2": lambda **o: Mamba2(hidden_size=HIDDEN, num_heads=64, head_dim=64, **o),
}
MODELS = {
    "gated_deltanet": GatedDeltaNetConfig(),
    "gated_deltanet_128": GatedDeltaNetConfig(
        num_hidden_layers=24, head_dim=128, num_heads=16, expand_v=1
    ),
    "mamba2": Mamba2Config(),
}


def pinned(impl: str) -> contextlib.AbstractContextManager:
    """Every op runs ``impl``, as it likes with ``"auto"``."""
    return contextlib.nullcontext() if impl == "auto" else ops.use_impl(impl)


def time_layer(name: str, shape: tuple[int, int], impl: str) -> dict:
    """Forward and backward of a layer in ms."""
    layer = LAYERS[name](dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(layer)
    x = jax.random.normal(jax.random.key(1), (*shape, HIDDEN), jnp.bfloat16)

    def loss(state, x):
        return jnp.sum(nnx.merge(graphdef, state)(x).astype(jnp.float32) ** 2)

    with pinned(impl):
        step = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(state, x).compile()
    return dict(layer=name, B=shape[0], T=shape[1], impl=impl, ms=median_ms(lambda: step(state, x)))


def train(name: str, impl: str, steps: int = 8) -> dict:
    """A few steps of training."""
    seconds = {"imports": time.perf_counter() - START}

    def done(what):
        seconds[what] = time.perf_counter() - START - sum(seconds.values())

    def make():
        return AutoModelForCausalLM.from_config(
            MODELS[name], dtype=jnp.bfloat16, scan_layers=True, remat=True, rngs=nnx.Rngs(0)
        )

    optimiser = optax.adamw(1e-4)

    def initialise():
        state = nnx.state(make())
        return jax.block_until_ready((state, jax.jit(optimiser.init)(state)))

    # The shapes are enough to compile the step, while another thread makes the parameters.
    started = futures.ThreadPoolExecutor().submit(initialise)
    graphdef, state = nnx.split(nnx.eval_shape(make))
    moments = jax.eval_shape(optimiser.init, state)

    def step(state, moments, ids):
        def loss(state):
            return nnx.merge(graphdef, state)(ids, labels=ids).loss

        value, grads = jax.value_and_grad(loss)(state)
        updates, moments = optimiser.update(grads, moments, state)
        return optax.apply_updates(state, updates), moments, value

    ids = jax.random.randint(jax.random.key(1), (8, TOKENS // 8), 0, MODELS[name].vocab_size)
    with pinned(impl):
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(state, moments, ids)
    done("tracing")
    run = lowered.compile()
    done("compilation")
    state, moments = started.result()
    done("waiting for parameters")
    state, moments, value = run(state, moments, ids)
    first = jax.block_until_ready(value)
    done("first step")
    began = time.perf_counter()
    for _ in range(steps):
        state, moments, value = run(state, moments, ids)
    jax.block_until_ready(value)
    rate = steps * TOKENS / (time.perf_counter() - began)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state))
    return dict(
        model=name, impl=impl, parameters=parameters, tokens_per_second=round(rate),
        seconds_to_first_step=round(sum(seconds.values()), 1),
        seconds={what: round(s, 1) for what, s in seconds.items()},
        loss=[float(first), float(value)],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--train", choices=list(MODELS))
    parser.add_argument("--impl", default="auto", choices=["auto", "chunk"])
    options = parser.parse_args()
    if options.layers:
        for name in LAYERS:
            for shape in SHAPES:
                for impl in ("auto", "chunk"):
                    print(json.dumps(time_layer(name, shape, impl)), flush=True)
    if options.train:
        print(json.dumps(train(options.train, options.impl)), flush=True)


if __name__ == "__main__":
    main()
