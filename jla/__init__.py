"""Linear-time token mixers for Flax NNX, with flash-linear-attention's numbers and checkpoints.

``jla.layers`` holds the mixers, ``jla.models`` language models, ``jla.ops`` the recurrences as pure
functions, ``jla.convert`` checkpoints in FLA's format. Subpackages load when they are first used.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0.dev0"

__all__ = ["cache", "convert", "eval", "generation", "layers", "models", "nn", "ops", "train"]


def _refuse_mixed_installation() -> None:
    # The distribution jax-linear-attention installs a package of the same name over this one.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        other = distribution("jax-linear-attention")
    except PackageNotFoundError:
        return
    raise ImportError(
        f"jla-nnx and jax-linear-attention {other.version} both install a package called jla and "
        "overwrite each other's files: uninstall both, then install the one you want"
    )


_refuse_mixed_installation()


def __getattr__(name: str):
    if name in __all__:
        return importlib.import_module(f"jla.{name}")
    raise AttributeError(f"module 'jla' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
