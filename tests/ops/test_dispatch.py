"""Which implementation runs, why the others don't, and who may say so."""

import jax
import jax.numpy as jnp
import pytest

from jla import ops
from jla.ops import ImplUnavailable, explain, gated_delta_rule, linear_attention, use_impl
from jla.ops.dispatch import Choice, select

OFFERS = {"reference": None, "chunk": None, "mosaic": "no such device"}
ORDER = ("mosaic", "chunk", "reference")


def shapes(length=8, dtype=jnp.float32):
    qkv = [jax.ShapeDtypeStruct((1, length, 2, 4), dtype)] * 3
    return (*qkv, *[jax.ShapeDtypeStruct((1, length, 2), jnp.float32)] * 2)


def arrays(length=8):
    return [jnp.ones(s.shape, s.dtype) * 0.1 for s in shapes(length)]


def test_auto_takes_the_first_that_can_run():
    choice = select("op", "auto", OFFERS, ORDER)
    assert choice.impl == "chunk"
    assert choice.refused == {"mosaic": "no such device"}
    assert select("op", "auto", OFFERS | {"mosaic": None}, ORDER).impl == "mosaic"


def test_a_named_impl_runs_or_tells_why_not():
    assert select("op", "reference", OFFERS, ORDER).why == "named by the caller"
    with pytest.raises(ImplUnavailable, match="op: impl='mosaic' cannot run.*no such device"):
        select("op", "mosaic", OFFERS, ORDER)
    assert issubclass(ImplUnavailable, NotImplementedError)


def test_an_unknown_impl_is_told_the_known_ones():
    with pytest.raises(ValueError, match=r"impl of op must be 'auto' or one of \['chunk'.*'fast'"):
        select("op", "fast", OFFERS, ORDER)


def test_pins_nest_end_and_are_weaker_than_a_name():
    pick = lambda op="op", impl="auto": select(op, impl, OFFERS, ORDER).impl  # noqa: E731
    with use_impl("reference"):
        assert pick() == "reference" and pick(impl="chunk") == "chunk"
        with use_impl(op="chunk"):
            assert pick() == "chunk" and pick("other") == "reference"
        assert pick() == "reference"
    assert pick() == "chunk"
    with pytest.raises(ZeroDivisionError), use_impl("reference"):
        1 / 0  # noqa: B018
    assert pick() == "chunk"
    with use_impl("mosaic"), pytest.raises(ImplUnavailable, match="no such device"):
        pick()
    with use_impl("cudnn"):
        assert pick() == "chunk", "a pin for all ops leaves those alone that do not know it"
    with pytest.raises(ValueError, match="impl must be one of"), use_impl("fast"):
        pass
    with pytest.raises(TypeError, match="use_impl needs an implementation"), use_impl():
        pass


@pytest.mark.parametrize("kind", ["gated_delta_rule", "delta_rule", "attention"])
def test_explain_computes_nothing(kind):
    choice = explain(kind, *shapes()[:3])
    # The ungated form runs the gated op, and is pinned under that name.
    op = {"delta_rule": "gated_delta_rule"}.get(kind, kind)
    assert isinstance(choice, Choice) and choice.op == op
    assert choice.impl in ("chunk", "reference")
    assert "mosaic" in choice.refused
    assert f"{op}: {choice.impl}" in str(choice) and "not mosaic: " in str(choice)


def test_one_token_is_one_step():
    assert explain("gated_delta_rule", *shapes(1)).impl == "reference"
    assert explain("gated_delta_rule", *shapes(2)).impl == "chunk"


@pytest.mark.parametrize("kind", ["hgrn", "selective_scan"])
def test_recurrences_of_channels_go_token_by_token_on_cpus(kind, monkeypatch):
    x = jax.ShapeDtypeStruct((1, 64, 8), jnp.float32)
    for backend, impl in (("cpu", "reference"), ("gpu", "chunk"), ("tpu", "chunk")):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        choice = explain(kind, x)
        assert choice.impl == impl
        assert ("faster on CPUs" in choice.why) == (backend == "cpu")
        pinned = explain(kind, x, impl="chunk")
        assert (pinned.impl, pinned.why) == ("chunk", "named by the caller")


def test_explain_follows_pins_and_names():
    with use_impl(gated_delta_rule="reference"):
        assert explain("gated_delta_rule", *shapes()).why == "pinned by use_impl"
        assert explain("gated_delta_rule", *shapes()).impl == "reference"
    assert explain("gated_delta_rule", *shapes(), impl="reference").impl == "reference"
    with pytest.raises(ImplUnavailable, match="mosaic"):
        explain("gated_delta_rule", *shapes(), impl="mosaic")


def test_what_is_explained_is_what_runs():
    """A scan over tokens has T steps, a scan over chunks fewer."""

    def steps(**options):
        text = str(jax.make_jaxpr(lambda *args: gated_delta_rule(*args, **options))(*arrays(33)))
        return "length=33" in text

    assert steps(impl="reference") and not steps(impl="chunk") and not steps()
    with use_impl("reference"):
        assert steps()


@pytest.mark.parametrize("kind", ["gated_delta_rule", "attention"])
def test_kernels_refuse_with_a_reason(kind):
    args = arrays() if kind == "gated_delta_rule" else arrays()[:3]
    with pytest.raises(ImplUnavailable, match=f"{kind}: impl='mosaic' cannot run this call: "):
        linear_attention(kind, *args, impl="mosaic")


def test_cudnn_refuses_with_a_reason():
    if jax.default_backend() == "gpu":
        pytest.skip("here it may run")
    with pytest.raises(ImplUnavailable, match="needs an NVIDIA GPU"):
        ops.attention(*arrays()[:3], impl="cudnn")


def test_unknown_kinds_and_impls():
    with pytest.raises(ValueError, match=r"kind must be one of \['attention'.*got 'rwkv'"):
        linear_attention("rwkv", *arrays())
    with pytest.raises(ValueError, match=r"kind must be one of .*got 'rwkv'"):
        explain("rwkv", *shapes())
    with pytest.raises(ValueError, match="impl of gated_delta_rule must be 'auto' or one of"):
        gated_delta_rule(*arrays(), impl="fast")


def test_one_door_to_every_op():
    args = arrays()

    def same(kind, op, args):
        both = jax.jit(lambda *args: (linear_attention(kind, *args)[0], op(*args)[0]))(*args)
        return (both[0] == both[1]).all()

    assert same("gated_delta_rule", gated_delta_rule, args)
    assert same("delta_rule", ops.delta_rule, [*args[:3], args[4]])
    assert same("attention", ops.attention, args[:3])
