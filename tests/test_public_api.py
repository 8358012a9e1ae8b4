"""What the package shows: every name exists, is documented, and is where it says."""

import importlib
import inspect
import pkgutil

import pytest
from flax import nnx

import jla

PARTS = ["layers", "nn", "ops", "models", "convert", "generation", "train", "eval"]
ABSENT = [name for name in PARTS if importlib.util.find_spec(f"jla.{name}") is None]


def public(part):
    module = importlib.import_module(f"jla.{part}")
    return {name: getattr(module, name) for name in module.__all__}


def test_the_package_names_its_parts():
    assert {*PARTS, "cache"} - set(ABSENT) <= set(jla.__all__) <= set(dir(jla))
    for name in jla.__all__:
        assert inspect.ismodule(getattr(jla, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jla.nothing
    assert jla.__version__


@pytest.mark.parametrize("part", [name for name in PARTS if name not in ABSENT])
def test_names_are_documented(part):
    names = importlib.import_module(f"jla.{part}").__all__
    assert len(set(names)) == len(names)
    for name, value in public(part).items():
        if callable(value):
            assert inspect.getdoc(value), f"jla.{part}.{name} has no docstring"
            assert value.__module__.startswith("jla."), name
            own = [n for n, v in vars(value).items() if inspect.isfunction(v) and n[0] != "_"]
            for method in own if inspect.isclass(value) else []:
                # An overriding method may leave its docstring to the method it overrides.
                assert inspect.getdoc(getattr(value, method)), f"{name}.{method}"


def test_every_module_says_what_it_is_for():
    for info in pkgutil.walk_packages(jla.__path__, "jla."):
        if info.name.startswith("jla.kernels"):
            continue  # loads Pallas's GPU parts
        assert importlib.import_module(info.name).__doc__, info.name


@pytest.mark.parametrize("part", ["layers", "ops", "convert"])
def test_arguments_of_jax_are_keyword_only(part):
    """FLA's arguments may be positional, ours behind them are not."""
    ours = {"rngs", "dtype", "param_dtype", "precision", "impl", "kernel_init", "place", "revision"}
    for name, value in public(part).items():
        module = inspect.isclass(value) and issubclass(value, nnx.Module)
        if not (module or inspect.isfunction(value)):
            continue
        for parameter in inspect.signature(value).parameters.values():
            if parameter.name in ours:
                assert parameter.kind is not parameter.POSITIONAL_OR_KEYWORD, (
                    f"{name}: {parameter.name}"
                )


def test_models_come_in_threes():
    """Config, model and language model of a family, named alike."""
    models = public("models")
    for model_type, language_model in models["MODELS"].items():
        stem = language_model.__name__.removesuffix("ForCausalLM")
        assert models[f"{stem}ForCausalLM"] is language_model
        assert models[f"{stem}Model"] is language_model.model_class
        assert models[f"{stem}Config"] is language_model.model_class.config_class
        assert models[f"{stem}Config"].model_type == model_type
