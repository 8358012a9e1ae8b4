"""State dicts into modules and back: complete or refused, whatever their age."""

import weakref
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models.cases import build

from convert.checkpoints import DELTA, SOFTMAX, TIED, assert_same, state, tensors_of
from jla import convert
from jla.layers import GatedDeltaNet

Q = "model.layers.1.attn.q_proj.weight"
CONV = "model.layers.0.attn.q_conv1d.weight"
HEAD, EMBEDDINGS = "lm_head.weight", "model.embeddings.weight"


def load(config, tensors, **options):
    model = build(config)
    convert.load_state_dict(model, tensors, **options)
    return state(model)


@pytest.mark.parametrize("config", [DELTA, SOFTMAX, TIED])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_there_and_back(config, scan_layers):
    tensors = {name: tensor * 2 for name, tensor in tensors_of(config).items()}
    model = build(config, scan_layers=scan_layers)
    convert.load_state_dict(model, tensors)
    assert_same(state(model), tensors)
    assert all(tensor.flags["C_CONTIGUOUS"] for tensor in state(model).values())


def test_arrays_of_any_kind():
    tensors = tensors_of(SOFTMAX)
    assert_same(load(SOFTMAX, {k: jnp.asarray(v) for k, v in tensors.items()}), tensors)
    assert_same(load(SOFTMAX, {k: np.asfortranarray(v) for k, v in tensors.items()}), tensors)


def test_every_problem_in_one_error_and_nothing_changed():
    tensors, model = tensors_of(DELTA), build(DELTA)
    before = state(model)
    del tensors["model.norm.weight"], tensors["model.layers.0.attn.A_log"]
    tensors["model.layers.7.attn.A_log"] = tensors["extra"] = np.zeros(3, np.float32)
    tensors[Q] = tensors[Q].T
    tensors[CONV] = tensors[CONV][..., :3]
    with pytest.raises(convert.CheckpointError) as error:
        convert.load_state_dict(model, {name: tensor + 1 for name, tensor in tensors.items()})
    message = str(error.value)
    assert "missing tensors: model.layers.0.attn.A_log, model.norm.weight" in message
    assert "surplus tensors: extra, model.layers.7.attn.A_log" in message
    assert f"{Q} has shape (12, 8), the model needs (8, 12)" in message
    assert f"{CONV} has shape (8, 1, 3), the model needs (8, 1, 4)" in message
    assert_same(state(model), before)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("shape", [(), (8,), (8, 12, 1), (1, 8, 12)])
def test_ranks_a_matrix_cannot_have(shape):
    tensors = tensors_of(DELTA)
    tensors[Q] = np.zeros(shape, np.float32)
    with pytest.raises(convert.CheckpointError, match=Q):
        load(DELTA, tensors)


def test_convolution_weights_of_rank_two_and_three():
    tensors = tensors_of(DELTA)
    squeezed = {k: v[:, 0] if "conv1d" in k else v for k, v in tensors.items()}
    assert squeezed[CONV].shape == (8, 4)
    assert_same(load(DELTA, squeezed), tensors)
    for wrong in (tensors[CONV].swapaxes(0, 1), tensors[CONV][:, 0].T, tensors[CONV][0, 0]):
        with pytest.raises(convert.CheckpointError, match=CONV):
            load(DELTA, {**tensors, CONV: wrong})


@pytest.mark.parametrize("scan_layers", [False, True])
def test_s21_old_spellings(scan_layers):
    """attn.norm became attn.o_norm; attn.D was never used. The numbers are the same."""
    tensors = tensors_of(DELTA)
    old = {k.replace("attn.o_norm", "attn.norm"): v for k, v in tensors.items()}
    assert old.keys() != tensors.keys()
    old |= {f"model.layers.{i}.attn.D": np.ones(4, np.float32) for i in range(2)}
    model = build(DELTA, scan_layers=scan_layers)
    convert.load_state_dict(model, {name: tensor * 3 for name, tensor in old.items()})
    assert_same(state(model), {name: tensor * 3 for name, tensor in tensors.items()})


def test_s21_both_spellings_at_once_are_refused():
    tensors = tensors_of(DELTA)
    tensors["model.layers.0.attn.norm.weight"] = tensors["model.layers.0.attn.o_norm.weight"]
    with pytest.raises(convert.CheckpointError, match="surplus.*layers.0.attn.norm.weight"):
        load(DELTA, tensors)


def test_s21_old_spellings_belong_to_their_mixer():
    """A transformer never had attn.D: there it is an error."""
    tensors = tensors_of(SOFTMAX) | {"model.layers.0.attn.D": np.ones(2, np.float32)}
    with pytest.raises(convert.CheckpointError, match="surplus tensors: model.layers.0.attn.D"):
        load(SOFTMAX, tensors)


def test_a_tied_head_may_stand_in_the_file_twice():
    tensors = tensors_of(TIED)
    assert HEAD not in tensors
    assert_same(load(TIED, tensors | {HEAD: tensors[EMBEDDINGS]}), tensors)


def test_a_tied_flag_that_contradicts_the_file():
    tensors = tensors_of(TIED)
    with pytest.raises(convert.CheckpointError, match=f"{HEAD} differs from {EMBEDDINGS}.*ties"):
        load(TIED, tensors | {HEAD: tensors[EMBEDDINGS] + 1})
    with pytest.raises(convert.CheckpointError, match=f"{HEAD}.*tie_word_embeddings"):
        load(SOFTMAX, tensors)


class OneAtATime(Mapping):
    """Tensors made when looked up; remembers how many are alive at once."""

    def __init__(self, tensors):
        self._tensors, self._alive, self.most, self.read = tensors, [], 0, []

    def __getitem__(self, name):
        tensor = self._tensors[name].copy()
        self._alive = [ref for ref in self._alive if ref() is not None] + [weakref.ref(tensor)]
        self.most, self.read = max(self.most, len(self._alive)), [*self.read, name]
        return tensor

    def __iter__(self):
        return iter(self._tensors)

    def __len__(self):
        return len(self._tensors)


def test_tensors_are_read_one_at_a_time():
    tensors = OneAtATime(tensors_of(DELTA))
    assert_same(load(DELTA, tensors), dict(tensors._tensors))
    assert sorted(tensors.read) == sorted(tensors), "each once"
    assert tensors.most == 1, "a tensor outlives its turn"


def test_place_puts_every_tensor():
    """Names are FLA's, arrays in our layout; what it returns is what the module holds."""
    seen = {}

    def place(name, host):
        seen[name] = host.shape
        return jax.device_put(host, jax.devices()[2])

    tensors, model = tensors_of(DELTA), build(DELTA)
    convert.load_state_dict(model, tensors, place=place)
    assert seen.keys() == tensors.keys()
    assert seen[Q] == (12, 8) and seen[CONV] == (4, 8)
    for leaf in jax.tree.leaves(nnx.state(model)):
        assert leaf.devices() == {jax.devices()[2]}


def test_dtypes_in_memory():
    """A module's own, or with keep_dtype the tensor's; decay rates stay float32 in both (S12)."""
    tensors = tensors_of(DELTA)
    narrow = {name: tensor.astype(jnp.bfloat16) for name, tensor in tensors.items()}
    narrow[Q] = narrow[Q].astype(np.float16)
    for name, tensor in load(DELTA, narrow).items():
        assert tensor.dtype == np.float32, name
        np.testing.assert_array_equal(tensor, narrow[name].astype(np.float32))
    kept = load(DELTA, narrow, keep_dtype=True)
    for name, tensor in kept.items():
        fixed = name.endswith(("A_log", "dt_bias"))
        assert tensor.dtype == (np.float32 if fixed else narrow[name].dtype), name
    halved = build(DELTA, param_dtype=jnp.bfloat16)
    convert.load_state_dict(halved, tensors)
    for name, tensor in state(halved).items():
        fixed = name.endswith(("A_log", "dt_bias"))
        assert tensor.dtype == (np.float32 if fixed else jnp.bfloat16), name


def test_a_mixer_alone():
    mixer = GatedDeltaNet(12, num_heads=2, head_dim=4, conv_bias=True, rngs=nnx.Rngs(0))
    tensors = {k: v + 1 for k, v in convert.to_state_dict(mixer).items()}
    assert {"A_log", "q_proj.weight", "q_conv1d.bias", "o_norm.weight"} <= tensors.keys()
    convert.load_state_dict(mixer, tensors)
    assert_same(convert.to_state_dict(mixer), tensors)
    convert.load_state_dict(mixer, {"D": np.ones(2), **tensors})
    with pytest.raises(convert.CheckpointError, match="missing tensors: A_log"):
        convert.load_state_dict(mixer, {k: v for k, v in tensors.items() if k != "A_log"})


def test_a_layout_that_no_row_describes_is_refused():
    class Odd(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.zeros((2, 3)))

    with pytest.raises(TypeError, match="Odd.kernel has no row"):
        convert.to_state_dict(Odd())
