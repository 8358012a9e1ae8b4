"""Text from models: one compiled loop, greedy or sampled."""

from jla.generation.generate import generate
from jla.generation.packed import Prefilled, prefill_packed
from jla.generation.sampling import Sampling

__all__ = ["Prefilled", "Sampling", "generate", "prefill_packed"]
