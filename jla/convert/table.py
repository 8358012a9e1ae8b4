"""The one table between NNX parameters and FLA's tensors, read in both directions.

Submodules keep FLA's attribute names, or say in ``checkpoint_names`` how a family spells them, so
paths agree and only leaves differ. Everything else that checkpoints of any age need (tied heads,
old spellings) is a row here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from flax import nnx

from jla.layers import GatedDeltaNet, LinearAttention, RWKV7Attention
from jla.layers.rwkv7 import STREAMS
from jla.models import Mamba2Model, Mamba3Model, MambaModel
from jla.nn import GatedRMSNorm, GroupNorm, LayerNorm, RMSNorm, ShortConvolution


@dataclass(frozen=True)
class Leaf:
    """How one kind of parameter is spelled and laid out in a torch checkpoint.

    Attributes:
        name: torch's name of the leaf.
        write: our array (numpy, any leading shape fixed by the kind) to torch's.
        read: torch's array to ours; raises ValueError for a rank it cannot be.
    """

    name: str
    write: Callable[[np.ndarray], np.ndarray]
    read: Callable[[np.ndarray], np.ndarray]


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _transposed(x: np.ndarray) -> np.ndarray:
    if x.ndim != 2:
        raise ValueError(f"expected a matrix, got shape {x.shape}")
    return x.T


def _read_taps(x: np.ndarray) -> np.ndarray:
    # torch has [D, 1, W]; some exporters drop the axis of size one.
    if x.ndim == 3 and x.shape[1] == 1:
        x = x[:, 0]
    return _transposed(x)


def _with_axes(x: np.ndarray) -> np.ndarray:
    return x[None, None]


def _without_axes(x: np.ndarray) -> np.ndarray:
    # torch has [1, 1, D]; a row of the old matrix of all streams has [D].
    return x.reshape(x.shape[-1:]) if x.size and x.size == x.shape[-1] else x


LEAVES: dict[type[nnx.Module], dict[str, Leaf]] = {
    nnx.Linear: {
        "kernel": Leaf("weight", _transposed, _transposed),
        "bias": Leaf("bias", _same, _same),
    },
    nnx.Embed: {"embedding": Leaf("weight", _same, _same)},
    RMSNorm: {"scale": Leaf("weight", _same, _same)},
    GatedRMSNorm: {"scale": Leaf("weight", _same, _same)},
    GroupNorm: {"scale": Leaf("weight", _same, _same)},
    LayerNorm: {"scale": Leaf("weight", _same, _same)},
    RWKV7Attention: {f"x_{name}": Leaf(f"x_{name}", _with_axes, _without_axes) for name in STREAMS},
    ShortConvolution: {
        "kernel": Leaf("weight", lambda x: x.T[:, None, :], _read_taps),
        "bias": Leaf("bias", _same, _same),
    },
}

# Leaves that a module without a row of its own may not have: they would need a layout.
RESERVED = frozenset({"kernel", "scale", "embedding"})

# Spellings of older FLA checkpoints below a module: today's name, the names that its rows have
# today, or None for a tensor that was never used (FLA issues 136 and 226).
Today = str | tuple[str, ...] | None
LEGACY: dict[type[nnx.Module], dict[str, Today]] = {
    GatedDeltaNet: {"norm.weight": "o_norm.weight", "D": None},
    # The originators' own checkpoints.
    MambaModel: {"embedding.weight": "embeddings.weight"},
    Mamba2Model: {"embedding.weight": "embeddings.weight"},
    Mamba3Model: {"embedding.weight": "embeddings.weight"},
    RWKV7Attention: {"x_x": tuple(f"x_{name}" for name in STREAMS)},
    # A tied feature map stands in torch's state dicts under both names.
    LinearAttention: {
        f"feature_map_k.{layer}.{leaf}": None
        for layer in ("layer", "layer1", "layer2")
        for leaf in ("weight", "bias")
    },
}


@dataclass(frozen=True)
class Slot:
    """One parameter and the tensors that fill it.

    Attributes:
        variable: the parameter; with several names its leading axis counts them.
        names: torch names, one, or one per stacked layer.
        leaf: the layout.
    """

    variable: nnx.Variable
    names: tuple[str, ...]
    leaf: Leaf

    @property
    def stacked(self) -> bool:
        """Whether the parameter holds the tensors of several scanned layers."""
        return len(self.names) > 1


def slots(module: nnx.Module) -> Iterator[Slot]:
    """Every parameter of ``module`` with its torch names.

    Raises:
        TypeError: a leaf called kernel, scale or embedding on a module type without a row in
            ``LEAVES``.
    """
    for prefixes, owner in _modules(module):
        for name, variable in vars(owner).items():
            if isinstance(variable, nnx.Param):
                leaf = _leaf(owner, name)
                yield Slot(variable, tuple(prefix + leaf.name for prefix in prefixes), leaf)


def legacy_names(module: nnx.Module) -> dict[str, Today]:
    """Old spelling -> today's, as in ``LEGACY``, for every tensor of ``module`` that had one."""

    def below(prefix, new):
        if isinstance(new, tuple):
            return tuple(prefix + name for name in new)
        return None if new is None else prefix + new

    return {
        prefix + old: below(prefix, new)
        for prefixes, owner in _modules(module)
        for old, new in LEGACY.get(type(owner), {}).items()
        for prefix in prefixes
    }


def _leaf(owner: nnx.Module, name: str) -> Leaf:
    row = LEAVES.get(type(owner), {})
    if name not in row and name in RESERVED:
        raise TypeError(f"{type(owner).__name__}.{name} has no row in jla.convert.table.LEAVES")
    return row.get(name, Leaf(name, _same, _same))


def _modules(root: nnx.Module) -> Iterator[tuple[tuple[str, ...], nnx.Module]]:
    """Every submodule with its torch prefixes: one, or one per layer that its arrays stack."""
    by_path = dict(nnx.iter_modules(root))
    for path, module in by_path.items():
        prefixes = ("",)
        for depth, key in enumerate(path):
            key = getattr(by_path.get(path[:depth]), "checkpoint_names", {}).get(key, key)
            # An entry of a list of blocks stands for the layers it holds, in a model's numbering.
            layers = getattr(by_path.get(path[: depth + 1]), "layer_ids", (key,))
            prefixes = tuple(f"{prefix}{layer}." for prefix in prefixes for layer in layers)
        yield prefixes, module
