"""Every model family against flash-linear-attention's own numbers, from the same checkpoint.

All of it is float32 and within each case's tolerance; see the README of the golden files.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import golden
from jla import convert
from jla.models import AutoModelForCausalLM
from jla.ops import segment_ids_from_cu_seqlens

# The variants of a family wait for the whole table: one stands for all in the fast slice, and
# every variant of the two families that the skeleton was made for.
CASES = golden.names("model")
IN_FULL = ("gated_deltanet__", "transformer__")
ROWS = [
    pytest.param(
        name,
        marks=[] if name.endswith("__base") or name.startswith(IN_FULL) else pytest.mark.slow,
    )
    for name in CASES
]
# Scanning is the skeleton's business, not the family's: two stand for all in the fast slice.
# Attention residuals never scan.
FAST_SCANNED = ("gated_deltanet__hybrid", "transformer__base")
SCANNED = [
    pytest.param(name, marks=[] if name in FAST_SCANNED else pytest.mark.slow)
    for name in CASES
    if not name.endswith("__attnres")
]


@pytest.fixture(params=ROWS, scope="module")
def row(request):
    return golden.load_case("model", request.param)


@functools.lru_cache(maxsize=2)
def load_model(folder, scan_layers=False):
    model = AutoModelForCausalLM.from_pretrained(folder, scan_layers=scan_layers)
    return model, nnx.split(model)


def ran(case, name):
    """Whether FLA recorded a run; a family whose FLA code cannot do it has none."""
    return case.meta["runs"].get(name, {"ok": False})["ok"]


def check_training(case, scan_layers=False):
    model, (graphdef, state) = load_model(case.folder, scan_layers)

    @jax.jit
    def step(state, ids, labels):
        def loss(state):
            out = nnx.merge(graphdef, state)(ids, labels=labels)
            return out.loss, out.logits

        return jax.value_and_grad(loss, has_aux=True)(state)

    ids, labels = (jnp.asarray(case[name], jnp.int32) for name in ("input_ids", "labels"))
    (loss, logits), gradients = step(state, ids, labels)
    case.check("logits", logits)
    case.check("loss", loss[None])
    case.check_gradients(convert.to_state_dict(nnx.merge(graphdef, gradients)))


def check_decoding(case, scan_layers=False):
    model, (graphdef, state) = load_model(case.folder, scan_layers)

    @jax.jit
    def call(state, ids, cache):
        out = nnx.merge(graphdef, state)(ids, cache=cache, logits_to_keep=1)
        return out.logits, out.cache

    ids = jnp.asarray(case["input_ids"], jnp.int32)
    logits, cache = call(state, ids[:, :65], model.new_cache(2, 70))
    seen = [logits]
    for t in range(65, 70):
        logits, cache = call(state, ids[:, t : t + 1], cache)
        seen.append(logits)
    case.check("decode_logits", jnp.concatenate(seen, axis=1), run="decode")


def test_logits_loss_and_gradients(row):
    check_training(row)


def test_cached_decoding(row):
    check_decoding(row)


def test_packed_and_padded(row):
    _, (graphdef, state) = load_model(row.folder)

    @jax.jit
    def logits(state, ids, segment_ids):
        return nnx.merge(graphdef, state)(ids, segment_ids=segment_ids).logits[..., :32]

    ids = jnp.asarray(row["input_ids"], jnp.int32)
    if ran(row, "packed"):
        documents = segment_ids_from_cu_seqlens(row["cu_seqlens"], 140)
        packed = logits(state, ids.reshape(1, 140), documents)
        row.check("packed_logits", packed, run="packed")
    mask = jnp.asarray(row["attention_mask"], jnp.int32)
    padded = logits(state, ids, mask)
    real = np.asarray(mask)[..., None] != 0
    row.check("padded_logits", padded, run="padded", where=real)


def test_generated_tokens(row):
    model, _ = load_model(row.folder)
    prompt = jnp.asarray(row["input_ids"][:, :10], jnp.int32)
    # FLA was made to run on past the EOS id.
    tokens = model.generate(prompt, max_new_tokens=8, eos_token_id=())
    np.testing.assert_array_equal(tokens, row["generated"])


def test_saves_the_tensors_it_loaded(row, tmp_path):
    model, _ = load_model(row.folder)
    model.save_pretrained(tmp_path)
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path, row.folder))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].shape == tensor.shape, name
        assert ours[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize("name", SCANNED)
def test_scanned_layers(name):
    case = golden.load_case("model", name)
    check_training(case, scan_layers=True)
    check_decoding(case, scan_layers=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", golden.INEXACT["model"])
def test_where_fla_is_inexact_float64_decides(name, x64):
    case = golden.load_case("model", name)
    ids = jnp.asarray(case["input_ids"], jnp.int32)

    def run(dtype):
        model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=dtype)
        graphdef, state = nnx.split(model)
        return jax.jit(lambda state, ids: nnx.merge(graphdef, state)(ids).logits)(state, ids)

    golden.check_inexact(case, "logits", run)
