"""What segment ids mean: documents, positions, resumption, and ``cu_seqlens`` both ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jla.ops import cu_seqlens_from_segment_ids, segment_ids_from_cu_seqlens, segments

IDS = np.array([[0, 5, 5, 0, 5, 2, 0, 0, 5, 5, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]], np.int32)


def test_documents_of_a_row():
    starts = segments.document_starts(IDS)
    assert np.nonzero(starts[0])[0].tolist() == [5, 8]
    assert not starts[1].any()
    assert segments.document_positions(IDS)[0].tolist() == [0, 0, 1, 0, 2, 0, 0, 0, 0, 1, 0]
    assert segments.document_positions(IDS)[1].tolist() == list(range(11))
    assert segments.document_index(IDS)[0].tolist() == [0] * 5 + [1] * 3 + [2] * 3


def test_real_neighbours():
    assert segments.previous_real(IDS)[0].tolist() == [-1, -1, 1, 2, 2, 4, 5, 5, 5, 8, 9]
    assert segments.next_real(IDS)[0].tolist() == [1, 2, 4, 4, 5, 8, 8, 8, 9, 11, 11]


@pytest.mark.parametrize(
    ("piece", "last", "restart", "after"),
    [
        ([0, 3, 3], 3, False, 3),  # the document goes on
        ([0, 3, 3], 2, True, 3),  # another one begins
        ([0, 3, 3], 0, False, 3),  # nothing seen yet
        ([0, 0, 0], 2, False, 2),  # only padding
        ([3, 4, 0], 3, False, 4),
    ],
)
def test_resuming_with_the_id_seen_last(piece, last, restart, after):
    got = segments.resume(jnp.asarray([piece]), jnp.asarray([last]))
    assert (bool(got.restart[0]), int(got.last_id[0])) == (restart, after)


@pytest.mark.parametrize(
    ("cu_seqlens", "length"), [([0, 3, 4, 9], 9), ([0, 3, 4, 9], 12), ([0, 64], 64), ([0], 4)]
)
def test_cu_seqlens_there_and_back(cu_seqlens, length):
    ids = segment_ids_from_cu_seqlens(np.array(cu_seqlens), length)
    assert ids.shape == (1, length) and ids.dtype == jnp.int32
    assert cu_seqlens_from_segment_ids(ids).tolist() == cu_seqlens
    traced = jax.jit(segment_ids_from_cu_seqlens, static_argnums=1)(np.array(cu_seqlens), length)
    assert np.array_equal(traced, ids)


def test_ids_of_cu_seqlens():
    assert segment_ids_from_cu_seqlens([0, 2, 2, 3], 5)[0].tolist() == [1, 1, 3, 0, 0]
    assert cu_seqlens_from_segment_ids([7, 7, 2, 7, 0]).tolist() == [0, 2, 3, 4]
    assert cu_seqlens_from_segment_ids([0, 0]).tolist() == [0]


@pytest.mark.parametrize("cu_seqlens", [[1, 2], [0, 3, 2], [0, 9], [[0, 1]], []], ids=str)
def test_bad_cu_seqlens(cu_seqlens):
    with pytest.raises(ValueError, match=r"cu_seqlens must be .* length=8, got"):
        segment_ids_from_cu_seqlens(cu_seqlens, 8)


@pytest.mark.parametrize("ids", [[0, 1, 1], [1, 0, 2]], ids=str)
def test_padding_that_cu_seqlens_cannot_say(ids):
    with pytest.raises(ValueError, match="padding before or between documents"):
        cu_seqlens_from_segment_ids(ids)


def test_cu_seqlens_of_one_row_only():
    with pytest.raises(ValueError, match=r"one row, \[1, T\] or \[T\], got shape \(2, 3\)"):
        cu_seqlens_from_segment_ids(np.ones((2, 3), int))


def test_bad_segment_ids():
    check = segments.check_segment_ids
    with pytest.raises(TypeError, match="segment_ids must be integers.*float32"):
        check(jnp.ones((2, 3)), (2, 3))
    with pytest.raises(ValueError, match=r"segment_ids must have shape \(2, 4\).*got \(2, 3\)"):
        check(jnp.ones((2, 3), int), (2, 4))
    with pytest.raises(ValueError, match=r"segment_ids must be >= 0.*-4"):
        check(jnp.array([[1, -4]]), (1, 2))


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint32, np.int64])
def test_every_integer_dtype_serves(dtype):
    ids = segments.check_segment_ids(np.array([[1, 1, 0]], dtype), (1, 3))
    assert ids.dtype == jnp.int32 and ids.tolist() == [[1, 1, 0]]
