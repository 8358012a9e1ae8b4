"""Configs: FLA's fields and defaults, what they refuse, and their way through JSON."""

import inspect
import json

import golden
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jla.layers
from jla.models import (
    MODELS,
    AutoModelForCausalLM,
    DeltaNetConfig,
    GatedDeltaNetConfig,
    GatedDeltaProductConfig,
    GSAConfig,
    HGRN2Config,
    KDAConfig,
    Mamba2Config,
    Mamba3Config,
    MambaConfig,
    SambaConfig,
    TransformerConfig,
)

FAMILIES = list(MODELS)
HYBRIDS = [name for name, cls in MODELS.items() if hasattr(cls.model_class.config_class, "attn")]
LAYERS = [name for name in golden.fla_api("layer") if hasattr(jla.layers, name)]


def config_class(family):
    return MODELS[family].model_class.config_class


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_and_defaults_are_fla_s(family):
    """The default config is saved with FLA's keys and values."""
    fla = golden.fla_api("config")[family]
    assert config_class(family).__name__ == fla["cls"]
    assert config_class(family).model_type == family
    ours = json.loads(config_class(family)().to_json_string(use_diff=True))
    assert ours.pop("transformers_version")
    expected = {k: v for k, v in fla["json"].items() if k != "transformers_version"}
    assert ours == expected
    assert {k: type(v) for k, v in ours.items()} == {k: type(v) for k, v in expected.items()}


@pytest.mark.parametrize("name", LAYERS)
def test_arguments_of_mixers_are_fla_s(name):
    """Names, order and defaults; JAX's own arguments are keyword-only behind them."""
    parameters = inspect.signature(getattr(jla.layers, name).__init__).parameters.values()
    ours = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    del ours["self"]
    ours = {k: list(v) if isinstance(v, tuple) else v for k, v in ours.items()}
    fla = {k: v for k, v in golden.fla_api("layer")[name]["init"].items() if k[0] != "*"}
    # Where FLA's names are flax's too, flax's meaning stands.
    fla = {k: v for k, v in fla.items() if k not in ("device", "dtype")}
    assert list(ours) == list(fla)
    assert ours == fla
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)


@pytest.mark.parametrize("name", golden.names("model"))
def test_a_golden_config_survives(name, tmp_path):
    """Read, saved, read again: the same keys and values as FLA wrote."""
    case = golden.load_case("model", name)
    text = json.loads((case.folder / "config.json").read_text())
    config = config_class(text["model_type"]).from_pretrained(case.folder)
    config.save_pretrained(tmp_path)
    back = json.loads((tmp_path / "config.json").read_text())
    assert back.pop("transformers_version") and text.pop("transformers_version")
    assert back == text
    again = config_class(text["model_type"]).from_pretrained(tmp_path)
    again.transformers_version = config.transformers_version
    assert again == config and hash(again) == hash(config)


WRONG = {
    "hidden_size": (["64", 64.0, None, True, 0, -1], "hidden_size must be"),
    "vocab_size": ([0, "many"], "vocab_size must be"),
    "intermediate_size": ([0, 1.5], "intermediate_size must be"),
    "num_hidden_layers": ([-1, 2.0, None], "num_hidden_layers must"),
    "norm_eps": (["small", None], "norm_eps must be float"),
    "tie_word_embeddings": ([1, None, "no"], "tie_word_embeddings must be bool"),
    "eos_token_id": ([1.5, [1, "2"]], "eos_token_id must be int"),
    "attnres_block_size": ([0, 3, -2, 2.0], "attnres_block_size must be"),
    "num_heads": ([2.0, "2", None], "num_heads must be int"),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("field", list(WRONG))
def test_impossible_values_name_field_value_and_what_is_accepted(family, field):
    values, message = WRONG[field]
    if not hasattr(config_class(family), field):
        pytest.skip(f"{family} has no {field}")
    # A field whose default is None may be None.
    optional = getattr(config_class(family), field) is None
    for value in (v for v in values if not (optional and v is None)):
        with pytest.raises(ValueError, match=message) as error:
            config_class(family)(**{field: value})
        assert repr(value) in str(error.value)
        assert config_class(family).__name__ in str(error.value)


def test_all_problems_come_at_once():
    with pytest.raises(ValueError) as error:
        GatedDeltaNetConfig(hidden_size=0, vocab_size=-1, output_gate_activation="relu")
    for name in ("hidden_size", "vocab_size", "output_gate_activation"):
        assert name in str(error.value)
    assert "['sigmoid', 'silu', 'swish']" in str(error.value)


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (DeltaNetConfig, dict(qk_norm="l1"), r"qk_norm must be one of \['l2', 'sum'\], got 'l1'"),
        (DeltaNetConfig, dict(qk_activation="gelu"), "qk_activation must be one of .* got 'gelu'"),
        (KDAConfig, dict(safe_gate=True), "safe_gate=True needs a lower_bound .* got None"),
        (KDAConfig, dict(lower_bound=0.5), "lower_bound must be below 0 .* got 0.5"),
        (GatedDeltaProductConfig, dict(num_householder=0), "num_householder must be .* got 0"),
    ],
)
def test_impossible_values_of_a_family(cls, fields, message):
    with pytest.raises(ValueError, match=message):
        cls(**fields)


def test_a_field_that_fla_s_config_lacks_is_written_only_where_given():
    assert "fuse_linear_cross_entropy" not in KDAConfig().to_json_string(use_diff=False)
    given = KDAConfig(fuse_linear_cross_entropy=True, fuse_cross_entropy=False)
    assert json.loads(given.to_json_string())["fuse_linear_cross_entropy"] is True


def test_values_that_exclude_each_other():
    with pytest.raises(ValueError, match="fuse_cross_entropy and fuse_linear_cross_entropy"):
        TransformerConfig(fuse_cross_entropy=True, fuse_linear_cross_entropy=True)
    TransformerConfig(fuse_cross_entropy=False, fuse_linear_cross_entropy=True)


ATTENTION = {"layers": [0, 2], "num_heads": 4}


def test_attention_of_hybrids_is_filled_in_as_fla_does():
    given = {**ATTENTION, "layers": (0, 2), "note": "kept"}
    config = GatedDeltaNetConfig(num_hidden_layers=3, attn=given)
    filled = {
        "layers": [0, 2],
        "num_heads": 4,
        "num_kv_heads": 4,
        "qkv_bias": False,
        "window_size": None,
        "rope_theta": 10000.0,
        "note": "kept",
    }
    assert config.attn == filled
    assert given == {**ATTENTION, "layers": (0, 2), "note": "kept"}, "the input was changed"
    assert config.attention_at(1) is None and config.attention_at(2) == filled
    listed = GatedDeltaNetConfig(num_hidden_layers=3, attn=[given])
    assert listed.attn == [filled] and listed.attention_at(0) == filled
    assert GatedDeltaNetConfig(attn=[]).attn == []
    config.attn = None  # assignments are checked too
    assert config.attention_at(0) is None
    with pytest.raises(ValueError, match="layer 3"):
        config.attn = {**ATTENTION, "layers": [3]}


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize(
    ("attn", "message"),
    [
        ({"num_heads": 4}, "layers"),
        ({"layers": [0]}, "num_heads"),
        ({**ATTENTION, "layers": 0}, "layers"),
        ({**ATTENTION, "layers": [0.0]}, "layers"),
        ({**ATTENTION, "layers": [True]}, "layers"),
        ({**ATTENTION, "layers": [0, 3]}, "layer 3"),
        ({**ATTENTION, "layers": [-1]}, "layer -1"),
        ({**ATTENTION, "layers": [1, 1]}, "layer 1 twice"),
        ([ATTENTION, {"layers": [2], "num_heads": 2}], "layer 2 twice"),
        ({**ATTENTION, "num_heads": 0}, "num_heads"),
        ({**ATTENTION, "num_heads": "4"}, "num_heads"),
        ({**ATTENTION, "num_kv_heads": True}, "num_kv_heads"),
        ({**ATTENTION, "qkv_bias": 1}, "qkv_bias"),
        ({**ATTENTION, "window_size": 0}, "window_size"),
        ({**ATTENTION, "window_size": 2.0}, "window_size"),
        ({**ATTENTION, "rope_theta": 0}, "rope_theta"),
        ({**ATTENTION, "rope_theta": float("inf")}, "rope_theta"),
        ({**ATTENTION, "rope_theta": 10**400}, "rope_theta"),
        ({**ATTENTION, "rope_theta": None}, "rope_theta"),
        ("all", "attn must be"),
        ([3], "attn must be"),
        (2, "attn must be"),
    ],
)
def test_attention_of_hybrids_is_checked(family, attn, message):
    with pytest.raises(ValueError, match=message):
        config_class(family)(num_hidden_layers=3, attn=attn)


def test_old_key_names_are_read():
    """S21: FLA once called use_gate use_output_gate."""
    config = GatedDeltaNetConfig.from_dict({"use_output_gate": False})
    assert config.use_gate is False
    assert "use_output_gate" not in config.to_dict()


def test_mamba_s_derived_fields_and_limits():
    config = Mamba2Config(hidden_size=96, head_dim=32)
    assert config.num_heads == 6
    assert MambaConfig(hidden_size=40, expand=3).intermediate_size == 120
    assert MambaConfig(hidden_size=40).dt_rank == 3
    assert SambaConfig(hidden_size=40).time_step_rank == 3
    for wrong in (
        dict(dt_min=0.2),
        dict(dt_init_floor=0.0),
        dict(A_init_range=(0, 1)),
        dict(dt_limit=(0.5, 0.1)),
        dict(dt_limit=(0.5,)),
        dict(attnres_block_size=2),
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Mamba2Config(**wrong)
    with pytest.raises(ValueError, match="dt_rank must be int or 'auto'"):
        MambaConfig(dt_rank="all")
    with pytest.raises(ValueError, match="mimo_rank"):
        Mamba3Config(is_mimo=True, mimo_rank=0)


def test_samba_attends_in_every_other_layer():
    assert SambaConfig(num_hidden_layers=4).attn["layers"] == [1, 3]
    assert SambaConfig(num_hidden_layers=4, attn=None).attn is None
    # FLA once saved the plan of 18 layers with any depth.
    saved = SambaConfig().to_dict() | {"num_hidden_layers": 6}
    assert SambaConfig.from_dict(saved).attn["layers"] == [1, 3, 5]


def test_sizes_that_follow_from_each_other():
    """HGRN2: heads from the key size or the reverse; both are written."""
    assert HGRN2Config(hidden_size=24, num_heads=3, expand_ratio=None).expand_ratio == 8
    assert HGRN2Config(hidden_size=24, expand_ratio=6).num_heads == 4
    with pytest.raises(ValueError, match="num_heads or expand_ratio must be given"):
        HGRN2Config(expand_ratio=None)


def test_fla_s_misspelt_arguments_are_read():
    config = GSAConfig(exapnd_k=2, exapnd_v=0.5)
    assert (config.expand_k, config.expand_v) == (2, 0.5)
    assert GSAConfig(expand_k=2).expand_k == 2 and "exapnd_k" not in config.to_dict()


def test_unknown_keys_survive(tmp_path):
    config = TransformerConfig(num_heads=2, our_note={"a": [1, 2]})
    config.save_pretrained(tmp_path)
    back = TransformerConfig.from_pretrained(tmp_path)
    assert back.our_note == {"a": [1, 2]} and back.num_heads == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_equality_and_hash(family):
    cls = config_class(family)
    assert cls(hidden_size=32) == cls(hidden_size=32) != cls(hidden_size=64)
    assert hash(cls(hidden_size=32)) == hash(cls(hidden_size=32))
    assert len({cls(norm_eps=eps) for eps in (1e-5, 1e-6, 1e-5)}) == 2


def test_a_changed_field_compiles_another_program():
    """A config is static: models that differ in one number must not share a compiled function."""
    models = [
        nnx.eval_shape(
            lambda eps=eps: AutoModelForCausalLM.from_config(
                TransformerConfig(
                    hidden_size=8, num_heads=1, num_hidden_layers=1, vocab_size=5, norm_eps=eps
                ),
                rngs=nnx.Rngs(0),
            )
        )
        for eps in (1e-5, 1e-2, 1e-5)
    ]
    graphdefs = [nnx.split(model)[0] for model in models]
    assert graphdefs[0] == graphdefs[2] != graphdefs[1]


def test_a_family_is_found_by_its_config():
    config = TransformerConfig(hidden_size=8, num_heads=1, num_hidden_layers=1, vocab_size=5)
    model = nnx.eval_shape(
        lambda: AutoModelForCausalLM.from_config(
            config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16, scan_layers=True
        )
    )
    assert type(model) is MODELS["transformer"]
    assert model.lm_head.kernel.dtype == jnp.bfloat16
    config.model_type = "retnet_of_tomorrow"
    with pytest.raises(ValueError, match="gated_deltanet.*got 'retnet_of_tomorrow'"):
        AutoModelForCausalLM.from_config(config, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="from_pretrained"):
        AutoModelForCausalLM()


@pytest.mark.parametrize("value", [2.0, [1.0, 0.5]])
def test_s26_multipliers_that_a_family_lacks_are_refused(value):
    """Dropped, they would change the numbers of a checkpoint in silence; those of 1 change none."""
    with pytest.raises(ValueError, match="ssm_multipliers=.* is not known to this family"):
        Mamba2Config(ssm_multipliers=value)
    ones = np.ones_like(value).tolist()
    assert Mamba2Config(ssm_multipliers=ones).to_dict()["ssm_multipliers"] == ones
