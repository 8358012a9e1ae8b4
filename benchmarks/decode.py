"""Tokens a second of greedy decoding on this machine, behind prefixes of several lengths.

python -m benchmarks.decode

A recurrence's step costs the same wherever it stands: the columns agree up to the machine's noise.
The caches have one shape, so one compiled program serves them all.
"""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jla.models import AutoModelForCausalLM, GatedDeltaNetConfig, RWKV7Config

PREFIXES = (16, 256, 4096)
TOKENS, ROUNDS = 128, 20
TINY: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=24, vocab_size=256
)
MODELS = {
    "gated_deltanet": GatedDeltaNetConfig(num_heads=2, head_dim=32, expand_v=1, **TINY),
    "rwkv7": RWKV7Config(head_dim=32, **TINY),
}


def tokens_per_second(model) -> list[float]:
    """For each prefix the best of ``ROUNDS`` runs of ``TOKENS`` tokens; the prefixes take turns."""
    ids = np.random.default_rng(0).integers(0, 256, (1, max(PREFIXES)), dtype=np.int32)
    caches = [model(ids[:, :n], cache=model.new_cache(1)).cache for n in PREFIXES]
    best = [float("inf")] * len(PREFIXES)
    for _ in range(ROUNDS):
        for i, cache in enumerate(caches):
            options: dict[str, Any] = dict(max_new_tokens=TOKENS, cache=cache, eos_token_id=())
            start = time.perf_counter()
            jax.block_until_ready(model.generate(jnp.asarray(ids[:, :1]), **options))
            best[i] = min(best[i], time.perf_counter() - start)
    return [TOKENS / seconds for seconds in best]


def main() -> None:
    print(
        f"Python {platform.python_version()}, jax {jax.__version__} on {jax.default_backend()}; "
        f"{os.cpu_count()} cores, load average before the run {os.getloadavg()[0]:.1f}.\n"
    )
    print("| model | " + " | ".join(f"{prefix} tokens before" for prefix in PREFIXES) + " |")
    print("| --- |" + " --- |" * len(PREFIXES))
    for name, config in MODELS.items():
        model = AutoModelForCausalLM.from_config(config, rngs=nnx.Rngs(0), scan_layers=True)
        rates = " | ".join(f"{rate:.0f}" for rate in tokens_per_second(model))
        print(f"| {name} | {rates} |", flush=True)


if __name__ == "__main__":
    main()
