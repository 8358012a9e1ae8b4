"""Recurrent ops name the argument, what was given and what is accepted."""

import numpy as np
import pytest

from jla.ops import delta_rule, gated_delta_rule

B, T, GROUPS, H, K, V = 2, 5, 3, 6, 4, 3


def inputs():
    return {
        "q": np.ones((B, T, GROUPS, K), np.float32),
        "k": np.ones((B, T, GROUPS, K), np.float32),
        "v": np.ones((B, T, H, V), np.float32),
        "g": np.zeros((B, T, H), np.float32),
        "beta": np.ones((B, T, H), np.float32),
    }


def ones(*shape):
    return np.ones(shape, np.float32)


CASES = {
    "rank of q": ({"q": ones(B, T, K)}, r"q must be \[B, T, H, D\], got shape \(2, 5, 4\)"),
    "rank of v": ({"v": ones(B, T, H, V, 1)}, r"v must be \[B, T, H, D\], got shape .*3, 1\)"),
    "heads of k": ({"k": ones(B, T, 2, K)}, r"k must have q's shape \(2, 5, 3, 4\), got .*2, 4\)"),
    "time of v": ({"v": ones(B, 4, H, V)}, r"v must start with q's \[B, T\] = \(2, 5\), got"),
    "heads of v": (
        {"v": ones(B, T, 4, V), "g": ones(B, T, 4), "beta": ones(B, T, 4)},
        r"v's 4 heads must be a multiple of .* 3",
    ),
    "no token": (
        {n: x[:, :0] for n, x in inputs().items()},
        r"must not be empty, got shapes \(2, 0, 3, 4\)",
    ),
    "heads of g": ({"g": ones(B, T, GROUPS)}, r"g must be \[B, T, H\] = \(2, 5, 6\), got"),
    "rank of beta": ({"beta": ones(B, T, H, V)}, r"beta must be \[B, T, H\] = \(2, 5, 6\), got"),
    "state": (
        {"initial_state": ones(B, H, V, K)},
        r"initial_state must be \[B, H, K, V\] = \(2, 6, 4, 3\), got shape \(2, 6, 3, 4\)",
    ),
    "shape of ids": (
        {"segment_ids": np.ones((B, T - 1), int)},
        r"segment_ids must have shape \(2, 5\).* got \(2, 4\)",
    ),
    "negative ids": ({"segment_ids": np.full((B, T), -1)}, r"segment_ids must be >= 0 .* -1"),
    "chunk size": (
        {"chunk_size": 48, "impl": "chunk"},
        r"chunk_size of gated_delta_rule must be 16, 32, 64 or 128, got 48",
    ),
    "impl": ({"impl": "triton"}, r"impl of gated_delta_rule must be 'auto' or one of .*'triton'"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_names_what_is_wrong(name):
    change, message = CASES[name]
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**{**inputs(), **change})


def test_ids_that_are_no_integers():
    with pytest.raises(TypeError, match="segment_ids must be integers .*got dtype float32"):
        gated_delta_rule(**inputs(), segment_ids=ones(B, T))


def test_the_ungated_form_says_the_same():
    args = {name: x for name, x in inputs().items() if name != "g"}
    with pytest.raises(ValueError, match=r"beta must be \[B, T, H\]"):
        delta_rule(**{**args, "beta": ones(B, T)})
