"""What training a model needs beside optax.

Orbax checkpoints are in :mod:`jla.train.checkpoint`, which needs the extra ``train``.
"""

from jla.train.decay import decay_mask

__all__ = ["decay_mask"]
