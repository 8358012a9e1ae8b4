"""Every mixer alone against flash-linear-attention's own numbers, from the same state dict."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, build
from safetensors.numpy import load_file

import golden
import jla.layers
from jla import convert
from jla.ops import segment_ids_from_cu_seqlens

CASES = golden.names("layer")
# FLA's prefill of the recorded caches and decoding.
PREFILL = 65


@pytest.fixture(params=CASES, scope="module")
def row(request):
    return golden.load_case("layer", request.param)


@functools.lru_cache(maxsize=2)
def load_mixer(folder, param_dtype=jnp.float32):
    spec = json.loads((folder / "config.json").read_text())
    make = functools.partial(getattr(jla.layers, spec["cls"]), **spec["kwargs"])
    mixer = build(lambda: make(param_dtype=param_dtype, rngs=nnx.Rngs(0)))
    convert.load_state_dict(mixer, load_file(folder / "model.safetensors"))
    return mixer, nnx.split(mixer)


def shared_of(case, shape=(2, 70)):
    """What FLA's run was given of earlier layers, ``[*shape, ...]`` each; None for most layers."""
    names = case.recorded.keys() & {"v_first"}
    return {name: case[name].reshape(*shape, -1) for name in names} or None


def apply(mixer, x, shared, **call):
    """The mixer's answer without what it shares."""
    if shared is None:
        return mixer(x, **call)
    *out, _ = mixer(x, shared=shared, **call)
    return tuple(out) if len(out) > 1 else out[0]


@functools.lru_cache(maxsize=2)
def prefilled(folder):
    """Output and cache after ``PREFILL`` tokens, then one step per token."""
    mixer, (graphdef, state) = load_mixer(folder)
    case = golden.load_case("layer", folder.name)

    @jax.jit
    def call(state, x, shared, cache):
        return apply(nnx.merge(graphdef, state), x, shared, cache=cache)

    def piece(start, stop):
        return jax.tree.map(lambda value: value[:, start:stop], (case["x"], shared_of(case)))

    out, after_prefill = call(state, *piece(0, PREFILL), mixer.new_cache(2, 70))
    cache, seen = after_prefill, [out[:, -1:]]
    for t in range(PREFILL, 70):
        out, cache = call(state, *piece(t, t + 1), cache)
        seen.append(out)
    return jnp.concatenate(seen, axis=1), after_prefill


def test_output_and_gradients(row):
    _, (graphdef, state) = load_mixer(row.folder)

    @jax.jit
    def run(state, x, shared, dy):
        mix = lambda state, x: apply(nnx.merge(graphdef, state), x, shared)  # noqa: E731
        out, pull = jax.vjp(mix, state, x)
        return out, pull(dy)

    out, (gradients, dx) = run(state, row["x"], shared_of(row), row["dy"])
    row.check("out", out)
    row.check_gradients(convert.to_state_dict(nnx.merge(graphdef, gradients)))
    expected, ours = row.recorded["dx"], row.part("dx", dx)
    assert np.linalg.norm(ours - expected) <= row.grad_tol * np.linalg.norm(expected)


def test_packed(row):
    if "packed_out" not in row.recorded:
        pytest.skip("FLA cannot: its documents leak, or it refuses")
    _, (graphdef, state) = load_mixer(row.folder)
    documents = segment_ids_from_cu_seqlens(row["cu_seqlens"], 140)

    @jax.jit
    def run(state, x, shared, documents):
        return apply(nnx.merge(graphdef, state), x, shared, segment_ids=documents)[..., :32]

    out = run(state, row["x"].reshape(1, 140, 64), shared_of(row, (1, 140)), documents)
    row.check("packed_out", out, run="packed")


def test_cached_decoding(row):
    out, _ = prefilled(row.folder)
    row.check("decode_out", out, run="decode")


def test_saves_the_tensors_it_loaded(row):
    ours = convert.to_state_dict(load_mixer(row.folder)[0])
    theirs = load_file(row.folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].tobytes()) == (tensor.dtype, tensor.tobytes()), name


@pytest.mark.parametrize("name", ["GatedDeltaNet", "GatedLinearAttention", "KimiDeltaAttention"])
def test_the_cache_is_fla_s_transposed(name):
    """S25: FLA keeps these states as [B, H, V, K], we as [B, H, K, V]; FLA's windows hold W inputs,
    of which the oldest is never read, ours the W - 1 others."""
    case = golden.load_case("layer", name)
    cache = prefilled(case.folder)[1]
    state = np.swapaxes(np.asarray(cache["recurrent_state"]), -1, -2)
    largest = np.max(np.abs(case.recorded["cache.recurrent_state"]))
    ours, theirs = case.part("cache.recurrent_state", state), case.recorded["cache.recurrent_state"]
    assert_close(ours, theirs, tol=2e-5)
    if theirs.shape[-1] == theirs.shape[-2]:  # the trimmed copy is cut square
        assert np.max(np.abs(theirs - np.swapaxes(theirs, -1, -2))) > 0.1 * largest
    for i, name in enumerate("qkv"):
        window = np.moveaxis(np.asarray(cache["conv_state"][name]), 1, 2)
        theirs = case.recorded[f"cache.conv_state.{i}"]
        # A column for the input that FLA alone keeps.
        whole = np.concatenate([np.zeros_like(window[..., :1]), window], axis=-1)
        ours = case.part(f"cache.conv_state.{i}", whole)
        assert_close(ours[..., 1:], theirs[..., 1:], tol=2e-5)


def test_mamba2_cache_is_fla_s_transposed():
    """S25: FLA keeps the state as [B, H, P, N], we as [B, H, N, P]."""
    case = golden.load_case("layer", "Mamba2")
    cache = prefilled(case.folder)[1]
    state = np.swapaxes(np.asarray(cache["recurrent_state"]), -1, -2)
    check_cache(case, "cache.recurrent_state", state)
    window = np.moveaxis(np.asarray(cache["conv_state"]), 1, 2)
    whole = np.concatenate([np.zeros_like(window[..., :1]), window], axis=-1)
    theirs = case.recorded["cache.conv_state"]
    assert_close(case.part("cache.conv_state", whole)[..., 1:], theirs[..., 1:], tol=2e-5)


@pytest.mark.parametrize("name", ["Mamba3", "Mamba3__mimo"])
def test_mamba3_cache_is_fla_s_transposed(name):
    """S25: the angle (FLA's is within 0 and 2 pi), [B, H, P, N], [B, R, H, N] and [B, H, P]."""
    case = golden.load_case("layer", name)
    cache = jax.tree.map(np.asarray, prefilled(case.folder)[1]["recurrent_state"])
    angle, theirs = cache["angle"], case.recorded["cache.recurrent_state.0"]
    for turned in (np.cos, np.sin):
        assert_close(case.part("cache.recurrent_state.0", turned(angle)), turned(theirs), tol=2e-5)
    check_cache(case, "cache.recurrent_state.1", np.swapaxes(cache["ssm"], -1, -2))
    check_cache(case, "cache.recurrent_state.2", np.swapaxes(cache["k"], 1, 2))
    check_cache(case, "cache.recurrent_state.3", cache["v"])


def check_cache(case, name, ours):
    """Fails unless a state agrees, which must not look the same the other way round."""
    theirs = case.recorded[name]
    assert_close(case.part(name, ours), theirs, tol=2e-5, what=name)
    if theirs.shape[-1] == theirs.shape[-2]:
        flipped = np.abs(theirs - np.swapaxes(theirs, -1, -2))
        assert np.max(flipped) > 0.1 * np.max(np.abs(theirs))


@pytest.mark.parametrize("name", golden.names("layer", "RWKV7Attention*"))
def test_rwkv7_cache_and_first_values_are_fla_s(name):
    """S25: a state that is not symmetric tells [B, H, K, V] from [B, H, V, K]."""
    case = golden.load_case("layer", name)
    cache = prefilled(case.folder)[1]
    theirs = case.recorded["cache.recurrent_state"]
    state = np.asarray(cache["recurrent_state"])
    largest = np.max(np.abs(theirs))
    assert np.max(np.abs(theirs - np.swapaxes(theirs, -1, -2))) > 0.1 * largest
    assert_close(case.part("cache.recurrent_state", state), theirs, tol=1e-4)
    last = case.part("cache.conv_state", cache["conv_state"])
    assert_close(last, case.recorded["cache.conv_state"], tol=2e-5)
    mixer, _ = load_mixer(case.folder)
    _, shared = mixer(case["x"], shared=shared_of(case) or {})
    case.check("out1", shared["v_first"])


@pytest.mark.parametrize("name", golden.INEXACT["layer"])
def test_where_fla_is_inexact_float64_decides(name, x64):
    case = golden.load_case("layer", name)

    def run(dtype):
        mixer = load_mixer.__wrapped__(case.folder, dtype)[0]
        inputs = jax.tree.map(lambda value: value.astype(dtype), (case["x"], shared_of(case)))
        return apply(mixer, *inputs)

    golden.check_inexact(case, "out", run)


def test_attention_cache_holds_fla_s_last_keys_and_values():
    """Both keep rotated keys; ours is a ring of the window's size: slot ``position % window``."""
    case = golden.load_case("layer", "Attention")
    cache = prefilled(case.folder)[1]
    window = cache["k"].shape[1]
    order = [position % window for position in range(PREFILL - window, PREFILL)]
    for i, name in enumerate("kv"):
        ours = np.asarray(cache[name])[:, order].reshape(2, window, -1)
        recorded = f"cache.attn_state.{i}"
        assert_close(case.part(recorded, ours), case.recorded[recorded], tol=2e-5)
    np.testing.assert_array_equal(cache["length"], [PREFILL, PREFILL])
