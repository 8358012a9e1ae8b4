"""Kernels of the short causal convolution: one warpgroup a block, two channels a thread.

A block owns a strip of channels over ``TILES`` tiles of ``TOKENS`` tokens. TMA brings the tiles
into a ring in shared memory; there a thread meets its own two channels only, so that threads never
wait for each other, and the results take the place of the inputs.

In a packed row a block walks over segment ids as scalars: padding leaves the window of the last
W - 1 real tokens as it is, a document's first token clears it. A tile without either runs as in a
dense row. The window before a tile is searched backwards from there; before the row it is the
initial state, whose rows count as -1, -2, ...
"""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jla.kernels import common as cm

TOKENS, TILES = 16, 8
SPAN = TOKENS * TILES  # tokens of a block
STAGES, BACKWARD_STAGES = 4, 3  # of the ring: several blocks fit on a multiprocessor
ID_SLOT = 32  # a TMA copy lands on a multiple of 128 bytes


def strip_width(channels):
    """Channels of a block, 0 where no strip fits (a TMA box has at most 256)."""
    return next((width for width in (256, 128) if channels % width == 0), 0)


@cm.traced_once("silu")
def forward(x, kernel, bias, state, ids, *, silu):
    """Outputs [B, T, D] in x's dtype.

    Args: x [B, T, D] 16-bit; kernel [W, D] and bias [D] or None, float32; state [B, W - 1, D] in
      x's dtype or None; ids int32 [B, T] or None. T is a multiple of ``TOKENS``.
    """
    past = kernel.shape[0] - 1
    inputs = _Inputs(x, kernel, bias, state, ids)

    def body(*refs, x_s, before_s, full, edge, ids_s=None):
        given, (y_ref,) = inputs.named(refs)
        strip = _Strip(given, past)
        x_ref, taps, bias = given.x, *strip.filters(given)

        def fetch(n):
            slot, start = lax.rem(n, STAGES), strip.first + n * TOKENS
            strip.fetch_tile(x_ref, start, x_s.at[slot], full.at[slot])
            strip.fetch_ids(start, ids_s, slot, full.at[slot])

        def step(n, carry):
            slot = lax.rem(n, STAGES)
            plgpu.barrier_wait(full.at[slot])
            _refill(n, strip.tiles, STAGES, fetch)

            def convolve(marked, window, last):
                marks, last = strip.marks(ids_s, slot, last, marked)
                for r, mark in enumerate(marks):
                    met = _met(window, strip.load(x_s.at[slot, r]), mark)
                    z = _weighted(taps, met, bias)
                    y = _kept(z * cm.sigmoid(z) if silu else z, mark)
                    x_s.at[slot, r][...] = y.astype(x.dtype)
                    window = _slide(window, met[1:], mark)
                return tuple(window), last

            carry = strip.run(convolve, ids_s, slot, *carry)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(x_s.at[slot], strip.tile(y_ref, strip.first + n * TOKENS))
            return carry

        strip.fetch_before(strip.first, before_s, edge)
        _start(strip.tiles, STAGES, fetch)
        plgpu.barrier_wait(edge)
        lax.fori_loop(0, strip.tiles, step, strip.window(strip.first, before_s))
        plgpu.wait_smem_to_gmem(0)

    width = strip_width(x.shape[2])
    scratch = dict(
        x_s=plgpu.SMEM((STAGES, TOKENS, width), x.dtype),
        before_s=plgpu.SMEM((past, width), x.dtype),
        full=plgpu.Barrier(num_arrivals=1 + (ids is not None), num_barriers=STAGES),
        edge=plgpu.Barrier(num_arrivals=1 if ids is None else past),
    )
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _launch(body, "short_conv_forward", out, scratch, STAGES, inputs)


@cm.traced_once("silu")
def backward(x, dy, kernel, bias, state, ids, *, silu):
    """Gradients dx, partial sums of those of the filter, and of the initial state.

    Args: as of ``forward``, dy [B, T, D] in x's dtype.
    Returns: dx [B, T, D] in x's dtype; float32 [B, blocks, W + 1, D], the last one of the bias;
      with a state float32 [B, W - 1, D].
    Tiles run from the last to the first. Of the real tokens after a tile the cotangents of z are
    carried; those after the block are computed from the inputs there.
    """
    width = kernel.shape[0]
    past = width - 1
    inputs = _Inputs(x, kernel, bias, state, ids, dy)

    def body(*refs, ids_s=None, **scratch):
        x_s, dy_s, before_s, full = (scratch[name] for name in ("x_s", "dy_s", "before_s", "full"))
        x_e, dy_e, before_e, edge = (scratch[name] for name in ("x_e", "dy_e", "before_e", "edge"))
        given, (dx_ref, sums_ref, *dstate_ref) = inputs.named(refs)
        strip = _Strip(given, past)
        x_ref, dy_ref, taps, bias = given.x, given.dy, *strip.filters(given)

        def place(n):
            return lax.rem(n, BACKWARD_STAGES), strip.first + (strip.tiles - 1 - n) * TOKENS

        def fetch(n):
            slot, start = place(n)
            strip.fetch_tile(x_ref, start, x_s.at[slot], full.at[slot])
            strip.fetch_tile(dy_ref, start, dy_s.at[slot], full.at[slot])
            strip.fetch_before(start, before_s.at[slot], full.at[slot])
            strip.fetch_ids(start, ids_s, slot, full.at[slot])

        def cotangent(window, x, dy, mark):
            """The cotangent of z at a token, and the inputs that its taps met."""
            met = _met(window, _kept(x, mark), mark)
            if silu:
                z = _weighted(taps, met, bias)
                gate = cm.sigmoid(z)
                dy = dy * gate * (1.0 + z * (1.0 - gate))
            return _kept(dy, mark), met

        def cotangents_after(end):
            """Of the W - 1 real tokens of the document from ``end`` on, nearest first."""
            places = strip.fetch_after(end, (x_ref, dy_ref), (x_e, dy_e), edge)
            strip.fetch_before(end, before_e, edge)
            plgpu.barrier_wait(edge)
            window, last = strip.window(end, before_e)
            found = []
            for r, place in enumerate(places):
                mark, last = _mark(place, last)
                dz, met = cotangent(window, strip.load(x_e.at[r]), strip.load(dy_e.at[r]), mark)
                window = _slide(window, met[1:], mark)
                found.append((dz, mark))
            after = [strip.zeros()] * past
            for dz, mark in reversed(found):
                after = _slide_back(after, dz, mark)
            return tuple(after)

        def step(n, carry):
            slot, start = place(n)
            plgpu.barrier_wait(full.at[slot])
            _refill(n, strip.tiles, BACKWARD_STAGES, fetch)

            def pull_back(marked, window, last, after, sums):
                marks, _ = strip.marks(ids_s, slot, last, marked)
                found = []
                for r, mark in enumerate(marks):
                    x, dy = strip.load(x_s.at[slot, r]), strip.load(dy_s.at[slot, r])
                    dz, met = cotangent(window, x, dy, mark)
                    sums = [s + dz * m for s, m in zip(sums, met, strict=False)] + [sums[-1] + dz]
                    window = _slide(window, met[1:], mark)
                    found.append(dz)
                for r in reversed(range(TOKENS)):
                    dx = _kept(_weighted(taps[::-1], [found[r], *after]), marks[r])
                    dy_s.at[slot, r][...] = dx.astype(x_ref.dtype)
                    after = _slide_back(after, found[r], marks[r])
                return tuple(after), tuple(sums)

            before = strip.window(start, before_s.at[slot])
            carry = strip.run(pull_back, ids_s, slot, *before, *carry)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(dy_s.at[slot], strip.tile(dx_ref, start))
            return carry

        _start(strip.tiles, BACKWARD_STAGES, fetch)
        after = cotangents_after(strip.first + strip.tiles * TOKENS)
        sums = (strip.zeros(),) * (width + 1)
        after, sums = lax.fori_loop(0, strip.tiles, step, (after, sums))
        for i, total in enumerate(sums):
            sums_ref.at[strip.row, strip.span, i, strip.columns][...] = total

        @pl.when(strip.first == 0)
        def _():
            for ref in dstate_ref:
                for back in range(1, width):  # token -back of the state: nearer taps meet the state
                    dx = _weighted(taps[: width - back][::-1], after)
                    ref.at[strip.row, past - back, strip.columns][...] = dx

        plgpu.wait_smem_to_gmem(0)

    batch, length, channels = x.shape
    copies = 1 if ids is None else past
    tile = (BACKWARD_STAGES, TOKENS, strip_width(channels))
    edge = plgpu.SMEM((past, tile[2]), x.dtype)
    scratch = dict(
        x_s=plgpu.SMEM(tile, x.dtype),
        dy_s=plgpu.SMEM(tile, x.dtype),
        before_s=plgpu.SMEM((BACKWARD_STAGES, *edge.shape), x.dtype),
        x_e=edge,
        dy_e=edge,
        before_e=edge,
        full=plgpu.Barrier(
            num_arrivals=2 + copies + (ids is not None), num_barriers=BACKWARD_STAGES
        ),
        edge=plgpu.Barrier(num_arrivals=3 * copies),
    )
    out = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((batch, _spans(length), width + 1, channels), cm.F32),
    ]
    if state is not None:
        out.append(jax.ShapeDtypeStruct((batch, past, channels), cm.F32))
    return _launch(body, "short_conv_backward", tuple(out), scratch, BACKWARD_STAGES, inputs)


def _spans(length):
    return -(-length // SPAN)


class _Inputs(NamedTuple):
    """What a kernel reads, arrays or their references; None is not handed over."""

    x: Any
    kernel: Any
    bias: Any
    state: Any
    ids: Any
    dy: Any = None

    def named(self, refs) -> tuple["_Inputs", list]:
        """The references of these arrays, and the others."""
        refs = list(refs)
        return _Inputs(*(None if x is None else refs.pop(0) for x in self)), refs


def _launch(body, name, out, scratch, stages, inputs):
    batch, length, channels = inputs.x.shape
    if inputs.ids is not None:
        scratch = scratch | dict(ids_s=plgpu.SMEM((stages, ID_SLOT), jnp.int32))
    return cm.kernel(
        body,
        name=name,
        out_type=out,
        scratch=scratch,
        grid=(batch, _spans(length), channels // strip_width(channels)),
        grid_names=("b", "t", "d"),
    )(*(x for x in inputs if x is not None))


class _Mark(NamedTuple):
    """A token of a packed row, scalars; None stands for a token of a dense row."""

    real: Any
    start: Any  # first of a document that is not the row's first


class _Strip:
    """The place of a block: a row, ``tiles`` tiles from token ``first`` on, and its channels."""

    def __init__(self, given: _Inputs, past):
        self.x, self.state, self.ids, self.past = given.x, given.state, given.ids, past
        self.length, channels = self.x.shape[1:]
        width = strip_width(channels)
        self.row, self.span, column = (lax.axis_index(name) for name in "btd")
        self.first = self.span * SPAN
        self.tiles = jnp.minimum(lax.div(self.length - self.first + TOKENS - 1, TOKENS), TILES)
        self.columns = pl.ds(column * width, width)
        self.layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)
        self.width = width

    def load(self, ref):
        return plgpu.load(ref, layout=self.layout, optimized=False).astype(cm.F32)

    def zeros(self):
        return plgpu.layout_cast(jnp.zeros((self.width,), cm.F32), self.layout)

    def filters(self, given):
        """The taps and the bias (or None)."""
        taps = [self.load(given.kernel.at[i, self.columns]) for i in range(self.past + 1)]
        return taps, None if given.bias is None else self.load(given.bias.at[self.columns])

    def tile(self, ref, start):
        return ref.at[self.row, pl.ds(start, TOKENS), self.columns]

    def fetch_tile(self, ref, start, to, barrier):
        plgpu.copy_gmem_to_smem(self.tile(ref, start), to, barrier)

    def fetch_ids(self, start, ids_s, slot, barrier):
        if self.ids is not None:
            tokens = pl.ds(0, TOKENS)
            ids = self.ids.at[self.row, pl.ds(start, TOKENS)]
            plgpu.copy_gmem_to_smem(ids, ids_s.at[slot, tokens], barrier)

    def fetch_before(self, start, to, barrier):
        """The W - 1 real tokens before ``start``, oldest first."""
        if self.ids is None:
            self._fetch_rows(start - self.past, self.past, to, barrier)
            return
        for back, (place, _, _) in enumerate(self._search_before(start), 1):
            self._fetch_rows(place, 1, to.at[pl.ds(self.past - back, 1)], barrier)

    def _fetch_rows(self, place, count, to, barrier):
        """One copy: ``count`` tokens from ``place`` on; below 0 rows of the initial state, or of
        what ``window`` leaves out where there is none."""

        def fetch(ref, first):
            rows = pl.ds(jnp.maximum(first, 0), count)
            plgpu.copy_gmem_to_smem(ref.at[self.row, rows, self.columns], to, barrier)

        if self.state is None:
            fetch(self.x, place)
            return
        pl.when(place >= 0)(lambda: fetch(self.x, place))
        pl.when(place < 0)(lambda: fetch(self.state, place + self.past))

    def window(self, start, before_s):
        """The window before ``start``, oldest first, and the id of the last real token."""
        rows = [self.load(before_s.at[i]) for i in range(self.past)]
        if self.ids is None:
            last, valid = jnp.int32(0), [start > 0] * self.past
            if self.state is not None:
                return tuple(rows), last
        else:
            found = self._search_before(start)
            last = found[0][1]
            valid = [
                ok & ((place >= 0) | (self.state is not None)) for place, _, ok in reversed(found)
            ]
        rows = [_where(ok, row, jnp.zeros_like(row)) for ok, row in zip(valid, rows, strict=True)]
        return tuple(rows), last

    def fetch_after(self, end, sources, targets, barrier):
        """The W - 1 real tokens from ``end`` on; their places, the row's length where none is."""
        if self.ids is None:
            for ref, to in zip(sources, targets, strict=True):
                rows = ref.at[self.row, pl.ds(end, self.past), self.columns]
                plgpu.copy_gmem_to_smem(rows, to, barrier)
            return [None] * self.past
        places = []
        for r in range(self.past):
            place = self._next(places[-1][0] + 1 if places else end)
            places.append(place)
            row = pl.ds(jnp.minimum(place[0], self.length - 1), 1)
            for ref, to in zip(sources, targets, strict=True):
                source = ref.at[self.row, row, self.columns]
                plgpu.copy_gmem_to_smem(source, to.at[pl.ds(r, 1)], barrier)
        return places

    def run(self, tile, ids_s, slot, window, last, *carry):
        """``tile(marked, window, last, ...)``, unmarked where all tokens go on with one document.

        ``last`` is the id of the last real token before the tile, 0 if there is none.
        """
        if ids_s is None:
            return tile(False, window, last, *carry)
        name = ids_s[slot, 0]
        plain = (name != 0) & ((last == 0) | (name == last))
        for r in range(1, TOKENS):
            plain = plain & (ids_s[slot, r] == name)
        return lax.cond(plain, partial(tile, False), partial(tile, True), window, last, *carry)

    def marks(self, ids_s, slot, last, marked):
        """Marks of a tile's tokens and the id of the last real one."""
        if not marked:
            return [None] * TOKENS, last if ids_s is None else ids_s[slot, 0]
        marks = []
        for r in range(TOKENS):
            mark, last = _mark((None, ids_s[slot, r]), last)
            marks.append(mark)
        return marks, last

    def _search_before(self, start):
        """(place, id, whether of the last real token's document) going back from ``start``."""
        found, newer, same = [], jnp.int32(0), jnp.bool_(True)
        place = jnp.minimum(start, self.ids.shape[1])
        for _ in range(self.past):
            place, name = self._previous(place - 1)
            same = same & ((place < 0) | (newer == 0) | (name == newer))
            found.append((place, name, same))
            newer = name
        return found

    def _previous(self, place):
        """The last real token at or before ``place`` and its id; below 0: the state, id 0."""

        def read(place):
            name = self.ids[self.row, jnp.maximum(place, 0)]
            return place, jnp.where(place >= 0, name, 0)

        return lax.while_loop(
            lambda c: (c[0] >= 0) & (c[1] == 0), lambda c: read(c[0] - 1), read(place)
        )

    def _next(self, place):
        """The first real token at or after ``place`` and its id, 0 if there is none."""
        length = self.ids.shape[1]

        def read(place):
            name = self.ids[self.row, jnp.minimum(place, length - 1)]
            return place, jnp.where(place < length, name, 0)

        return lax.while_loop(
            lambda c: (c[0] < length) & (c[1] == 0), lambda c: read(c[0] + 1), read(place)
        )


def _mark(place, last):
    """Mark of the token at (index, id), after a token with the id ``last``; None in a dense row."""
    if place is None:
        return None, last
    _, name = place
    real = name != 0
    start = real & (last != 0) & (name != last)
    return _Mark(real, start), jnp.where(real, name, last)


def _start(tiles, stages, fetch):
    for n in range(stages):

        @pl.when(n < tiles)
        def _(n=n):
            fetch(jnp.int32(n))


def _refill(n, tiles, stages, fetch):
    """Once the results of tile n - 1 have left its slot, loads what is next there."""

    @pl.when((n > 0) & (n - 1 + stages < tiles))
    def _():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        fetch(n - 1 + stages)


def _where(condition, x, other):
    """``x`` or ``other``, vectors, by a scalar."""
    return jnp.where(jnp.broadcast_to(condition, x.shape), x, other)


def _kept(x, mark):
    """Zero at padding."""
    return x if mark is None else _where(mark.real, x, jnp.zeros_like(x))


def _met(window, x, mark):
    """What the W taps meet at a token: the window, void at a document's start, and the token."""
    if mark is not None:
        window = [_where(mark.start, jnp.zeros_like(row), row) for row in window]
    return [*window, x]


def _slide(window, moved, mark):
    """The window after a token, which is ``moved`` unless the token is padding."""
    if mark is None:
        return moved
    return [_where(mark.real, new, old) for new, old in zip(moved, window, strict=True)]


def _slide_back(after, dz, mark):
    """Cotangents of z that reach the tokens before this one, nearest first."""
    moved = [dz, *after[:-1]]
    if mark is None:
        return moved
    moved = [_where(mark.start, jnp.zeros_like(new), new) for new in moved]
    return [_where(mark.real, new, old) for new, old in zip(moved, after, strict=True)]


def _weighted(taps, rows, bias=None):
    products = [tap * row for tap, row in zip(taps, rows, strict=False)]
    return reduce(jnp.add, products if bias is None else [bias, *products])
