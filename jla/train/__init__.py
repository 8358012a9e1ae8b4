"""What training a model needs beside optax."""

from jla.train.decay import decay_mask

__all__ = ["decay_mask"]
