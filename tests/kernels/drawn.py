"""What the tests of kernels draw alike: packed rows, and the names of their cases."""

import dataclasses
from collections.abc import Sequence

import numpy as np


class Named:
    """A dataclass of options that is named by those that are not at their defaults."""

    def __str__(self):
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return "-".join(changed) or "default"


def packed(batch: int, length: int, rng, lengths: Sequence[int], scattered: float = 0.0):
    """Documents with padding at both ends, between and in front of them, int32 ``[batch, length]``.

    ``lengths`` are drawn from; a share ``scattered`` of the tokens is padding besides.
    """
    ids = np.zeros((batch, length), np.int32)
    for row in ids:
        at, name = int(rng.integers(0, 4)), 1
        while at < length:
            end = at + int(rng.choice(lengths))
            row[at:end] = name
            row[at : at + int(rng.integers(0, 3))] = 0
            at, name = end + int(rng.integers(0, 2)) * 3, name % 3 + 1
        row[length - int(rng.integers(0, 3)) :] = 0
    ids[rng.random(ids.shape) < scattered] = 0
    return ids
