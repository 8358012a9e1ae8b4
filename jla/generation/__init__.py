"""Text from models: one compiled loop, greedy or sampled."""

from jla.generation.generate import generate
from jla.generation.sampling import Sampling

__all__ = ["Sampling", "generate"]
