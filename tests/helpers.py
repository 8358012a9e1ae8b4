"""What tests share: the one comparison with its tolerances, random arrays, host meshes."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

# Largest error allowed, as a share of the largest entry of the expected array. Float32: sums of
# some hundred products in another order cost a few 1e-6, recurrences feed that back, and gradients
# pass twice; every bug this suite was tried on is off by 1e-3 and more. Narrow dtypes: a few units
# in the last place (2^-8, 2^-11). Float64: its room above float32 is what oracles need.
TOLERANCE = {"float64": 1e-9, "float32": 3e-5, "bfloat16": 3e-2, "float16": 4e-3}
# An expected array of (almost) only zeros is compared as if its largest entry were this: what is
# zero by cancellation (the gradient of a softmax over one key) is off by rounding of its parts.
FLOOR = 0.1


def _wide(x) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.float64) if x.dtype.kind in "fiub" or x.dtype == ml_dtypes.bfloat16 else x


def _narrower(a, b) -> str:
    """The coarser float dtype of two arrays, which sets the tolerance; float32 without any."""
    names = [str(np.asarray(x).dtype) for x in (a, b)]
    known = [name for name in names if name in TOLERANCE]
    return max(known, key=TOLERANCE.__getitem__, default="float32")


def assert_close(actual, expected, *, dtype=None, times: float = 1.0, tol=None, what: str = ""):
    """Fails unless ``actual`` equals ``expected`` within the table's tolerance.

    Args:
        actual, expected: arrays of the same shape, finite (equal infinities are equal).
        dtype: row of :data:`TOLERANCE`; the coarser of the two arrays' if None.
        times: factor on the table's tolerance, for a reason written beside the call.
        tol: an own tolerance instead of the table's (share of the largest expected entry).
        what: named in the message.

    The message prints the largest absolute error, the largest error relative to its own entry, and
    where both are.
    """
    a, b = _wide(actual), _wide(expected)
    assert a.shape == b.shape, f"{what}: shape {a.shape}, expected {b.shape}"
    if a.size == 0:
        return
    if tol is None:
        tol = TOLERANCE[str(jnp.dtype(dtype)) if dtype is not None else _narrower(actual, expected)]
    limit = tol * times * max(FLOOR, np.max(np.abs(b), initial=0, where=np.isfinite(b)))
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where(a == b, 0.0, np.abs(a - b))
        relative = np.where(error == 0, 0.0, error / np.abs(b))
    error = np.where(np.isnan(error), np.inf, error)
    if np.max(error) <= limit:
        return
    at = tuple(int(i) for i in np.unravel_index(np.argmax(error), error.shape))
    finite = np.where(np.isfinite(relative), relative, -1)
    rel_at = tuple(int(i) for i in np.unravel_index(np.argmax(finite), finite.shape))
    raise AssertionError(
        f"{what or 'arrays'}: max abs error {error[at]:.3e} > {limit:.3e} at {at} "
        f"(got {a[at]:.8g}, expected {b[at]:.8g}); "
        f"max rel error {finite[rel_at]:.3e} at {rel_at} "
        f"(got {a[rel_at]:.8g}, expected {b[rel_at]:.8g}); "
        f"{int(np.sum(error > limit))} of {error.size} entries differ"
    )


def assert_trees_close(actual, expected, *, what: str = "", **options):
    """:func:`assert_close` for every leaf of two trees of the same structure, named by path."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected), (
        f"{what}: {jax.tree.structure(actual)}, expected {jax.tree.structure(expected)}"
    )
    paths = jax.tree_util.tree_leaves_with_path(actual)
    for (path, a), b in zip(paths, jax.tree.leaves(expected), strict=True):
        assert_close(a, b, what=f"{what}{jax.tree_util.keystr(path)}", **options)


def assert_trees_equal(actual, expected, *, what: str = ""):
    """Bit for bit, dtypes included."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected), what
    paths = jax.tree_util.tree_leaves_with_path(actual)
    for (path, a), b in zip(paths, jax.tree.leaves(expected), strict=True):
        name = f"{what}{jax.tree_util.keystr(path)}"
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype, f"{name}: dtype {a.dtype}, expected {b.dtype}"
        assert a.shape == b.shape, f"{name}: shape {a.shape}, expected {b.shape}"
        assert a.tobytes() == b.tobytes(), f"{name}: differs"


def random(seed: int, shape, dtype=np.float32, scale: float = 1.0) -> np.ndarray:
    """Standard normal numbers times ``scale``, the same on every machine."""
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def build(make):
    """The module that ``make()`` gives with random parameters, none at its initial 0 or 1.

    Only the shapes are taken from its initialisers: they run operation by operation, and to compile
    these takes longer than a test. Decays last for one token to some hundred, as initial ones do.
    """
    graphdef, state = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(1)

    def value(path, leaf):
        if path[-1] == "A_log":
            drawn = np.log(rng.uniform(0.5, 16, leaf.shape))
        elif path[-1] == "dt_bias":
            drawn = np.log(np.expm1(np.exp(rng.uniform(np.log(3e-3), np.log(0.1), leaf.shape))))
        elif path[-1] == "bias" and "w_lora" in path:
            drawn = rng.uniform(-6, 1, leaf.shape)
        else:
            drawn = 0.2 * rng.standard_normal(leaf.shape) + (path[-1] in ("scale", "D"))
        return leaf.replace(jnp.asarray(drawn.astype(leaf.dtype)))

    flat = [(path, value(path, leaf)) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def host_mesh(axes: dict[str, int], *, explicit: bool) -> jax.sharding.Mesh:
    """A mesh over forced host devices; Explicit axes are what ``jax.make_mesh`` makes."""
    sizes, names = tuple(axes.values()), tuple(axes)
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    devices = jax.devices("cpu")[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names), devices=devices)


@contextlib.contextmanager
def count_compiles():
    """Yields a list that grows by one entry with every program XLA compiles inside."""
    compiled: list[str] = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def collectives(compiled) -> set[str]:
    """Names of the collective operations in a compiled function's HLO."""
    text = compiled.as_text()
    names = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    return {name for name in names if f"{name}(" in text or f"{name}-start(" in text}


def drop_programs(item, nextitem, made):
    """Forgets what was compiled for a row of a table if the next test is not of that row.

    Args:
        item, nextitem: pytest's tests.
        made: a cached function of the row, whose results hold compiled functions.

    Every program takes some dozen memory mappings, of which Linux gives a process 65530
    (``vm.max_map_count``); where they run out, the process dies.
    """

    def place(each):
        params = each.callspec.params if hasattr(each, "callspec") else {}
        return each.path, params.get("row")

    if nextitem is None or place(nextitem) != place(item):
        made.cache_clear()
        jax.clear_caches()
