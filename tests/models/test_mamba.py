"""What only the Mamba models have: where they start, what stays float32, names in checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close

from jla import convert
from jla.layers import Mamba, Mamba2, Mamba3
from jla.models import AutoModelForCausalLM, Mamba2Config, MambaConfig, SambaConfig

SMALL = dict(hidden_size=32, num_hidden_layers=2, vocab_size=11, state_size=4)
CONFIGS = {
    "mamba": MambaConfig(**SMALL),
    "mamba2": Mamba2Config(**SMALL, head_dim=16),
    "samba": SambaConfig(**SMALL, attn={"layers": [1], "num_heads": 2}),
}


def make(config, **options):
    return AutoModelForCausalLM.from_config(config, rngs=nnx.Rngs(0), **options)


def test_mamba_starts_as_its_authors_chose():
    mixer = Mamba(64, state_size=5, intermediate_size=96, dt_min=0.01, dt_max=0.2, rngs=nnx.Rngs(0))
    assert_close(jnp.exp(mixer.A_log[...]), np.tile(np.arange(1, 6, dtype="f"), (96, 1)))
    steps = np.asarray(jax.nn.softplus(mixer.dt_proj.bias[...]))
    assert 0.01 <= steps.min() < 0.02 and 0.1 < steps.max() <= 0.2001
    bound = 4**-0.5  # of the rank, 64 / 16
    assert 0.8 * bound < np.abs(mixer.dt_proj.kernel[...]).max() <= bound
    assert np.all(mixer.D[...] == 1) and np.any(mixer.conv1d.bias[...])
    constant = Mamba(64, dt_init="constant", dt_scale=2.0, rngs=nnx.Rngs(0))
    assert np.all(constant.dt_proj.kernel[...] == 2 * bound)


def test_mamba2_starts_as_its_authors_chose():
    options = dict(hidden_size=256, head_dim=2, A_init_range=(2, 3), conv_init=0.01)
    mixer = Mamba2(**options, rngs=nnx.Rngs(0))
    rates = np.exp(np.asarray(mixer.A_log[...]))
    assert 2 <= rates.min() < 2.1 and 2.9 < rates.max() <= 3.0001
    steps = np.asarray(jax.nn.softplus(mixer.dt_bias[...]))
    assert 1e-3 * 0.99 <= steps.min() < 2e-3 and 0.05 < steps.max() <= 0.1001
    assert 0.009 < np.abs(mixer.conv1d.kernel[...]).max() <= 0.01


def test_mamba3_starts_as_its_authors_chose():
    mixer = Mamba3(32, head_dim=8, state_size=8, is_mimo=True, mimo_rank=4, rngs=nnx.Rngs(0))
    for name, value in dict(B_bias=1, C_bias=1, mimo_x=0.25, mimo_z=1, mimo_o=0.25, D=1).items():
        assert np.all(getattr(mixer, name)[...] == value), name


@pytest.mark.parametrize("rescaled", [False, True])
def test_what_is_added_to_the_residual_starts_small(rescaled):
    """GPT-2's scheme: torch's default over the root of the depth, else the models' normal."""
    config = Mamba2Config(
        **(SMALL | dict(hidden_size=128, initializer_range=0.3)), rescale_prenorm_residual=rescaled
    )
    kernel = np.asarray(make(config).model.layers[0].attn.out_proj.kernel[...])
    bound = (256 * 2) ** -0.5
    if rescaled:
        assert 0.99 * bound < np.abs(kernel).max() <= bound
    else:
        assert_close(kernel.std(), 0.3, tol=0.02)


def test_s12_decay_rates_stay_float32(tmp_path):
    """A_log of 15.7 comes back as -15.7, not as bfloat16's -15.6426; steps and skips alike."""
    model = make(CONFIGS["mamba2"], param_dtype=jnp.bfloat16)
    mixer = model.model.layers[1].attn
    mixer.A_log[...] = jnp.full_like(mixer.A_log[...], np.log(15.7))
    assert mixer.in_proj.kernel.dtype == jnp.bfloat16
    model.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=jnp.bfloat16)
    assert_close(-jnp.exp(back.model.layers[1].attn.A_log[...]), np.full(4, -15.7), tol=1e-6)
    tensors = convert.to_state_dict(back)
    kept = {n.rsplit(".", 1)[1] for n, tensor in tensors.items() if tensor.dtype == np.float32}
    assert kept == {"A_log", "D", "dt_bias"}
    cache = back.new_cache(1)
    assert cache[0]["attn"]["recurrent_state"].dtype == jnp.float32
    assert cache[0]["attn"]["conv_state"].dtype == jnp.bfloat16


@pytest.mark.parametrize("wide", [False, True])
def test_a_residual_may_stay_float32(wide):
    config = Mamba2Config(**SMALL, head_dim=16, residual_in_fp32=wide)
    model = make(config, dtype=jnp.bfloat16)
    out = model(np.ones((1, 3), np.int32), output_hidden_states=True)
    assert {h.dtype for h in out.hidden_states} == {jnp.dtype("float32" if wide else "bfloat16")}


@pytest.mark.parametrize("family", CONFIGS)
def test_names_in_checkpoints(family):
    model = make(CONFIGS[family])
    names = convert.to_state_dict(model).keys()
    norm = "mixer_norm" if family == "samba" else "norm"
    for name in ("embeddings", f"layers.0.{norm}", "layers.1.mixer.out_proj", "norm_f"):
        if family != "samba" or "mixer.out" not in name:
            assert f"backbone.{name}.weight" in names
    assert ("backbone.layers.1.mlp.down_proj.weight" in names) == (family == "samba")
    assert not [name for name in names if name.startswith("model.") or "attn" in name]


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_s21_the_originators_name_of_the_embeddings(family):
    model = make(CONFIGS[family])
    tensors = convert.to_state_dict(model)
    value = tensors.pop("backbone.embeddings.weight")
    convert.load_state_dict(model, tensors | {"backbone.embedding.weight": value + 1})
    assert np.array_equal(model.model.embeddings.embedding[...], value + 1)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda **k: Mamba2(num_heads=3, hidden_size=32, **k), "num_heads=3"),
        (lambda **k: Mamba2(hidden_size=32, head_dim=24, **k), "head_dim=24"),
        (lambda **k: Mamba2(hidden_size=32, head_dim=16, n_groups=3, **k), "n_groups=3"),
        (lambda **k: Mamba2(hidden_size=32, hidden_act="relu", **k), "hidden_act"),
        (lambda **k: Mamba(32, backend="tpu", **k), "backend"),
        (lambda **k: Mamba(32, dt_init="zero", **k), "dt_init"),
        (lambda **k: Mamba3(32, rope_fraction=0.3, **k), "rope_fraction"),
        (lambda **k: Mamba3(32, head_dim=8, state_size=7, **k), "state_size"),
        (lambda **k: Mamba3(32, head_dim=8, is_mimo=True, mimo_rank=0, **k), "mimo_rank"),
        (lambda **k: Mamba3(32, head_dim=8, device="cuda", **k), "device"),
    ],
)
def test_a_bad_constructor_is_named(build, named):
    with pytest.raises(ValueError, match=named):
        build(rngs=nnx.Rngs(0))
