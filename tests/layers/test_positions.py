"""Rotary positions of attention: counted per document, or given; only distances matter."""

import cases
import numpy as np
from flax import nnx
from helpers import assert_close, random

B, T = 2, 6


def test_given_positions_are_the_counted_ones():
    """S08: with padding on the left, counting starts at the first real token."""
    mixer, x = cases.build("attention"), random(0, (B, T, cases.HIDDEN))
    ids = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 2, 2, 0]], np.int32)
    counted = np.array([[0, 0, 0, 1, 2, 3], [0, 1, 2, 0, 1, 0]], np.int32)
    call = nnx.jit(lambda m, x, **options: m(x, segment_ids=ids, **options))
    want = call(mixer, x)
    for given in (dict(positions=counted), dict(input_positions=counted)):
        assert_close(call(mixer, x, **given), want)
    # A rotation by the same angle of queries and keys cancels; a stretched one does not.
    assert_close(call(mixer, x, positions=counted + 5), want)
    assert not np.allclose(call(mixer, x, positions=3 * counted), want, atol=1e-3)


def test_positions_of_all_rows_at_once():
    mixer, x = cases.build("attention"), random(0, (B, T, cases.HIDDEN))
    assert_close(mixer(x, positions=np.arange(T)), mixer(x))
