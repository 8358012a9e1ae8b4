"""P1 to P5 of the contract, asked of every mixer of the table.

One program per row and length serves all questions: it takes ids, a cache and cotangents and gives
outputs, the cache after, and gradients of parameters, inputs and cache. Its exact-length answers
without ids are the oracle of padding; padding, once shown, lets every document alone be computed
in the same program.
"""

import jax
import numpy as np
import pytest
from cases import HIDDEN, rows
from helpers import assert_close, assert_trees_close, assert_trees_equal, random

from layers.contract import BATCH, Answer, floats, probe, sum_trees

LENGTH = 70


def inputs(length=LENGTH, seed=0):
    return random(seed, (BATCH, length, HIDDEN)), random(seed + 50, (BATCH, length, HIDDEN))


def spread(tokens, at, fill):
    """Row by row puts ``tokens [B, n, D]`` at the places ``at`` of ``fill [B, T, D]``."""
    out = fill.copy()
    for row, places in enumerate(at):
        out[row, places] = tokens[row][: len(places)]
    return out


def pick(values, at):
    return np.stack([values[row, places] for row, places in enumerate(at)])


def ids_at(at, ids=1):
    """Ids ``[B, LENGTH]``: ``ids`` (per real token) at the places ``at``, 0 elsewhere."""
    out = np.zeros((len(at), LENGTH), np.int32)
    for row, places in enumerate(at):
        out[row, places] = ids if np.ndim(ids) == 0 else ids[row]
    return out


def check_same(p, got: Answer, want: Answer, at, *, times=1.0):
    """``got`` is ``want`` with padding around the real tokens at ``at``."""
    assert_close(pick(got.y, at), want.y, what="y", times=times)
    assert_close(pick(got.d_x, at), want.d_x, what="d_x", times=times)
    assert_trees_close(p.seen(got.cache), p.seen(want.cache), what="cache", times=times)
    assert_trees_close(got.d_params, want.d_params, what="d_params", times=times)
    assert_trees_close(got.d_cache, want.d_cache, what="d_cache", times=times)
    padding = np.ones(got.y.shape[:2], bool)
    for row, places in enumerate(at):
        padding[row, places] = False
    assert not got.y[padding].any(), "padding outputs something"
    assert not got.d_x[padding].any(), "padding has a gradient"


# --- P1: a padding token is an identity step -----------------------------------------------------

PLACES = {"left": np.arange(6, 70), "right": np.arange(64), "inside": None, "ends": None}
PLACES["inside"] = np.sort(np.random.default_rng(3).permutation(70)[:64])
PLACES["ends"] = np.r_[2:35, 36:67]  # pads left, right and inside at once


@rows("padding", variants=False)
@pytest.mark.parametrize("warm", [False, True], ids=["new", "warm"])
def test_padding_changes_nothing(row, warm):
    """S04, S05, S06: outputs, gradients and the cache are those of the row without padding, which
    decays no state and enters no window or normaliser, also inside and on a warm cache."""
    p = probe(row)
    x, weights = inputs(64)
    cache = p.warm() if warm else p.new_cache()
    d_after = p.random_like(20, cache)
    want = p(x, None, cache, weights, d_after)
    garbage = random(8, (BATCH, LENGTH, HIDDEN), scale=100.0)
    layouts = list(PLACES)
    for turn in range(2 if warm else 4):
        at = [PLACES[layouts[(turn + row) % 4]] for row in range(BATCH)]
        got = p(spread(x, at, garbage), ids_at(at), cache, spread(weights, at, garbage), d_after)
        check_same(p, got, want, at)


@rows("short rows", variants=False)
@pytest.mark.parametrize("length", [1, 5])
def test_rows_shorter_than_window_and_chunk(row, length):
    """S04, S07, S16: one token is a row as any other, and its window starts with zeros."""
    p = probe(row)
    x, weights = inputs(length, 1)
    cache = p.new_cache()
    d_after = p.random_like(30, cache)
    want = p(x, None, cache, weights, d_after)
    garbage = random(9, (BATCH, LENGTH, HIDDEN), scale=100.0)
    at = [np.arange(length), np.arange(LENGTH - length, LENGTH), np.arange(length) * 13 + 11]
    got = p(spread(x, at, garbage), ids_at(at), cache, spread(weights, at, garbage), d_after)
    check_same(p, got, want, at)


@rows("padding only", variants=False)
def test_rows_of_padding_only(row):
    p = probe(row)
    x, weights = inputs(LENGTH, 2)
    cache = p.warm(3)
    d_after = p.random_like(40, cache)
    got = p(100 * x, np.zeros((BATCH, LENGTH)), cache, weights, d_after)
    assert not got.y.any() and not got.d_x.any()
    assert_trees_equal(got.cache, jax.device_get(cache), what="cache")
    passed = p.case.meaningful({**cache, **{n: d for n, d in d_after.items() if d is not None}})
    assert_trees_close(got.d_cache, floats(passed), what="d_cache")
    assert not any(leaf.any() for leaf in jax.tree.leaves(got.d_params))


@rows("mask of ones", variants=False)
@pytest.mark.parametrize("length", [5, pytest.param(64, marks=pytest.mark.slow)])
def test_ids_of_ones_are_no_ids(row, length):
    p = probe(row)
    x, weights = inputs(length, 3)
    want = p(x, None, None, weights)
    for ids in (1, 7):
        got = p(x, np.full((BATCH, length), ids), None, weights)
        check_same(p, got, want, [np.arange(length)] * BATCH)


@rows("one row", sample=True)
def test_one_row_is_treated_as_a_row_of_many(row):
    """S03: no shortcut for a batch of one skips the padding."""
    p = probe(row)
    x, _ = inputs(LENGTH, 4)
    ids = packed_ids()
    ids[0, :5] = 0
    many, cache = p.forward(p.params, x, ids, p.new_cache())
    for r in (0, 2):
        pick_row = lambda tree: jax.tree.map(lambda leaf: leaf[r : r + 1], tree)  # noqa: B023, E731
        one, after = p.forward(p.params, x[r : r + 1], ids[r : r + 1], p.new_cache(1))
        assert_close(one, many[r : r + 1])
        assert_trees_close(p.seen(after), p.seen(pick_row(cache)))


# --- P2: packed documents are separate documents -------------------------------------------------

# Document lengths per row: boundaries at 63, 64 and 65, documents of one token.
PACKED = [(63, 1, 6), (1, 64, 5), (64, 1, 5)]
# Ids need only differ at boundaries: reused, decreasing, large.
IDS = [(1, 2, 1), (7, 3, 7), (2**31 - 1, 1, 9)]
LONGEST = max(map(max, PACKED))


def packed_ids(lengths=PACKED, ids=IDS):
    return np.stack([np.repeat(i, n) for n, i in zip(lengths, ids, strict=True)]).astype(np.int32)


def alone(p, x, weights, cache, d_after, lengths=PACKED):
    """Every document in a call of its own: what a packed row must give."""
    y, d_x, grads = np.zeros_like(x), np.zeros_like(x), []
    count = len(lengths[0])
    zeros = jax.tree.map(np.zeros_like, d_after)
    for document in range(count):
        starts = [sum(row[:document]) for row in lengths]
        places = [np.arange(s, s + row[document]) for s, row in zip(starts, lengths, strict=True)]
        front = [np.arange(len(each)) for each in places]
        empty = np.zeros((BATCH, LENGTH, HIDDEN), np.float32)
        taken = [
            spread([v[r, at] for r, at in enumerate(places)], front, empty) for v in (x, weights)
        ]
        last = document == count - 1
        answer = p(
            taken[0],
            ids_at(front),
            cache if document == 0 else p.new_cache(),
            taken[1],
            d_after if last else zeros,
        )
        for r, at in enumerate(places):
            y[r, at], d_x[r, at] = answer.y[r, : len(at)], answer.d_x[r, : len(at)]
        grads.append(answer.d_params)
        if document == 0:
            d_cache = answer.d_cache
    return Answer(y, answer.cache, sum_trees(grads), d_x, d_cache)


@rows("packing")
@pytest.mark.parametrize("start", ["new", "warm", "other document"])
def test_packed_documents_are_separate(row, start):
    """S02: a boundary reaches convolution, token shift and recurrence."""
    p = probe(row)
    x, weights = inputs(LENGTH, 5)
    ids = packed_ids()
    cache = p.new_cache()
    if start != "new":
        cache = p.warm()
        # The first token continues the cached document iff its id is the one seen last.
        last = ids[:, 0] if start == "warm" else ids[:, 0] - 1 + 2 * (ids[:, 0] == 1)
        cache = {**cache, "segment_id": last.astype(np.int32)}
    d_after = p.random_like(60, cache)
    got = p(x, ids, cache, weights, d_after)
    fresh = p.new_cache() if start == "other document" else {**cache, "segment_id": 0 * ids[:, 0]}
    want = alone(p, x, weights, fresh, d_after)
    if start == "other document":  # the cached document is over: nothing depends on it
        want = want._replace(d_cache=jax.tree.map(np.zeros_like, want.d_cache))
    check_same(p, got, want, [np.arange(LENGTH)] * BATCH)
    assert got.cache["segment_id"].tolist() == ids[:, -1].tolist()


@rows("packing")
def test_padding_between_and_inside_packed_documents(row):
    p = probe(row)
    lengths = [(20, 1, 33), (31, 2, 21), (32, 1, 21)]
    ids, real = [(4, 5, 4), (4, 5, 4), (4, 5, 4)], 54
    x, weights = inputs(real, 6)
    d_after = p.random_like(70, p.new_cache())
    at = [np.sort(np.random.default_rng(r).permutation(LENGTH)[:real]) for r in range(BATCH)]
    garbage = random(7, (BATCH, LENGTH, HIDDEN), scale=100.0)
    got = p(
        spread(x, at, garbage),
        ids_at(at, packed_ids(lengths, ids)),
        None,
        spread(weights, at, garbage),
        d_after,
    )
    wide = np.zeros((BATCH, LENGTH, HIDDEN), np.float32)
    front = [np.arange(real)] * BATCH
    want = alone(
        p, spread(x, front, wide), spread(weights, front, wide), p.new_cache(), d_after, lengths
    )
    want = want._replace(y=want.y[:, :real], d_x=want.d_x[:, :real])
    check_same(p, got, want, at)


# --- P3: any split with the cache carried is one call --------------------------------------------


def in_piece(p, x, ids, cache, weights=None, d_after=None):
    """A long piece goes through the program of whole rows, with padding behind it."""
    length = x.shape[1]
    if length <= 5:
        return p(x, ids, cache, weights, d_after)
    x, ids, weights = (
        None if each is None else np.pad(each, [(0, 0), (0, LENGTH - length), (0, 0)][: each.ndim])
        for each in (x, ids, weights)
    )
    answer = p(x, ids, cache, weights, d_after)
    return answer._replace(y=answer.y[:, :length], d_x=answer.d_x[:, :length])


def in_pieces(p, x, ids, cache, weights, d_after, lengths):
    """The row in pieces; cotangents of the cache are carried back from piece to piece."""
    ends = np.cumsum(lengths)
    parts = [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]
    caches, ys = [cache], []
    for part in parts:
        answer = in_piece(p, x[:, part], ids(part), caches[-1])
        ys.append(answer.y)
        caches.append(answer.cache)
    grads, d_xs = [], []
    for part, before in zip(reversed(parts), reversed(caches[:-1]), strict=True):
        answer = in_piece(p, x[:, part], ids(part), before, weights[:, part], d_after)
        d_after = answer.d_cache
        grads.append(answer.d_params)
        d_xs.append(answer.d_x)
    join = lambda pieces: np.concatenate(pieces, axis=1)  # noqa: E731
    return Answer(join(ys), caches[-1], sum_trees(grads), join(d_xs[::-1]), d_after)


SPLITS = [(64, 1, 5), (1, 2, 2, 64, 1), (5, 64, 1), (2, 1, 1, 1, 64, 1)]


@rows("splits", variants=False)
@pytest.mark.parametrize("lengths", SPLITS, ids=str)
def test_a_split_row_is_one_call(row, lengths):
    """S15: pieces of more than one token on a live cache."""
    p = probe(row)
    x, weights = inputs(LENGTH, 10)
    # Documents that end at, before and behind the cuts, padding on both sides of some.
    ids = np.stack(
        [
            np.repeat([1, 2, 1], [5, 60, 5]),
            np.repeat([0, 3, 0, 3, 4, 0], [2, 2, 2, 57, 4, 3]),
            np.ones(LENGTH, int),
        ]
    ).astype(np.int32)
    cache = p.warm(1)
    d_after = p.random_like(80, cache)
    want = p(x, ids, cache, weights, d_after)
    got = in_pieces(p, x, lambda part: ids[:, part], cache, weights, d_after, lengths)
    # What a finished document leaves in a cache nobody can see has no gradient either way.
    check_same(p, got, want, [np.nonzero(i)[0] if i.all() else np.arange(LENGTH) for i in ids])
    assert got.cache["segment_id"].tolist() == want.cache["segment_id"].tolist()


@rows("splits", variants=False)
def test_no_ids_continue_the_last_document(row):
    p = probe(row)
    x, weights = inputs(LENGTH, 11)
    first = np.stack([np.repeat([1, 2], [60, 4]), np.repeat([5, 0], [60, 4]), np.repeat(3, 64)])
    full = np.concatenate([first, np.repeat([[2], [5], [3]], 6, axis=1)], axis=1).astype(np.int32)
    d_after = p.random_like(90, p.new_cache())
    want = p(x, full, None, weights, d_after)

    def ids(part):
        return first[:, part] if part.start < 64 else None

    got = in_pieces(p, x, ids, p.new_cache(), weights, d_after, (64, 5, 1))
    check_same(p, got, want, [np.arange(LENGTH)] * BATCH)


@rows("splits")
def test_token_by_token_is_one_call(row):
    p = probe(row)
    x, _ = inputs(LENGTH, 12)
    ids = packed_ids()
    want = p(x, ids)
    cache, ys = p.new_cache(), []
    for t in range(LENGTH):
        y, cache = p.forward(p.params, x[:, t : t + 1], ids[:, t : t + 1], cache)
        ys.append(y)
    assert_close(np.concatenate(ys, axis=1), want.y)
    assert_trees_close(p.seen(cache), p.seen(want.cache))


# --- P4: nothing sees the future -----------------------------------------------------------------


@rows("causality")
def test_the_past_is_bit_identical_and_has_no_gradient_from_the_future(row):
    p = probe(row)
    x, weights = inputs(LENGTH, 13)
    for ids in (packed_ids(), np.ones((BATCH, LENGTH))):
        before = p(x, ids).y
        for place in (1, 3, 5, 31, 32, 33, 63, 64, 65, 69):
            changed = x.copy()
            changed[:, place:] = random(place, changed[:, place:].shape, scale=10.0)
            lost = weights.copy()
            lost[:, place:] = 0
            got = p(changed, ids, None, lost)
            assert_trees_equal(got.y[:, :place], before[:, :place], what=f"outputs before {place}")
            assert not got.d_x[:, place:].any(), f"gradient of inputs from {place} on"
            assert got.d_x[:, :place].any()


# --- P5: every implementation gives the same -----------------------------------------------------


@rows("implementations")
def test_every_implementation_gives_the_same(row):
    """P5; S09: from a warm cache, packed, outputs, cache and all gradients."""
    p = probe(row)
    other = probe(row, impl=p.case.other_impl)
    x, weights = inputs(LENGTH, 14)
    ids, cache = packed_ids(ids=[(1, 2, 1), (1, 3, 7), (2, 1, 9)]), p.warm(1)
    d_after = p.random_like(95, cache)
    got, want = (each(x, ids, cache, weights, d_after) for each in (p, other))
    check_same(p, got, want, [np.arange(LENGTH)] * BATCH)


@pytest.mark.slow
@rows("lengths", variants=False)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 31, 33, 63, 64, 65, 70, 129])
def test_every_length_padded_and_exact(row, length):
    p = probe(row)
    x, weights = inputs(length, 15)
    room = p.mixer.new_cache(BATCH, 136)
    want = p(x, None, room, weights)
    garbage = random(16, (BATCH, 136, HIDDEN), scale=100.0)
    at = [np.arange(length), np.arange(136 - length, 136), np.arange(3, 3 + length)]
    ids = np.zeros((BATCH, 136), np.int32)
    for r, places in enumerate(at):
        ids[r, places] = 1
    got = p(spread(x, at, garbage), ids, room, spread(weights, at, garbage))
    check_same(p, got, want, at)
