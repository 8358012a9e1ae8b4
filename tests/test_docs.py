"""Examples in docstrings run."""

import doctest
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jla

# Their Pallas parts load on GPU machines; they have no examples.
SKIPPED = ("jla.kernels",)


def modules():
    for info in pkgutil.walk_packages(jla.__path__, "jla."):
        if not info.name.startswith(SKIPPED):
            yield importlib.import_module(info.name)


def examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in modules():
        for test in finder.find(module, module.__name__):
            if test.examples:
                yield pytest.param(test, id=test.name)


EXAMPLES = list(examples())


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example):
    # What every reader has imported.
    example.globs |= {"jax": jax, "jnp": jnp, "nnx": nnx, "jla": jla}
    written = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    failed = runner.run(example, out=written.append, clear_globs=False).failed
    assert not failed, "".join(written)


def test_there_are_examples():
    """A finder that finds nothing would pass everything."""
    assert len(EXAMPLES) >= 3
