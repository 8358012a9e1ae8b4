"""The base of all model configs: Transformers' ``PreTrainedConfig`` with values checked."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

with contextlib.ExitStack() as _quiet:
    # Transformers prints advice about a missing torch, which has no place here, when imported.
    _key = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    if _key not in os.environ:
        os.environ[_key] = "1"
        _quiet.callback(os.environ.pop, _key)
    from transformers import PreTrainedConfig

AttentionPlan = dict[str, Any] | list[dict[str, Any]] | None


class Config(PreTrainedConfig):
    """Fields that FLA's configs share. A family adds its own as annotated class attributes.

    Unknown keys of a ``config.json`` are kept and written back, but for multipliers other than 1,
    which would be missing from the numbers. ``deprecated`` maps old key names to today's.
    ``lacking`` names the fields of this class that FLA's config of the family does not have: they
    are written only where they were given. FLA's implementation switches are checked and kept,
    without effect here.

    Raises:
        ValueError: a field of the wrong type or an impossible value, or a multiplier that is not
            known, all of them in one message.
    """

    model_type: ClassVar[str] = ""
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    deprecated: ClassVar[dict[str, str]] = {}
    lacking: ClassVar[frozenset[str]] = frozenset()

    hidden_size: int = 2048
    num_hidden_layers: int = 24
    hidden_ratio: int | float | None = 4
    intermediate_size: int | None = None
    hidden_act: str = "swish"
    max_position_embeddings: int | None = 2048
    initializer_range: float = 0.02
    norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    fuse_norm: bool = True
    fuse_swiglu: bool = True
    fuse_cross_entropy: bool = True
    fuse_linear_cross_entropy: bool = False
    use_l2warp: bool = False
    vocab_size: int = 32000
    attnres_block_size: int | None = None

    def __init_subclass__(cls, *args, **kwargs):
        super().__init_subclass__(*args, **kwargs)
        # A config is a static attribute of its model, so it must hash; equal ones hash alike.
        setattr(cls, "__hash__", Config._hash)  # noqa: B010, dataclass had set it to None

    def __post_init__(self, **kwargs):
        for old, new in type(self).deprecated.items():
            if old in kwargs:
                setattr(self, new, kwargs.pop(old))
        super().__post_init__(**kwargs)
        problems = self._type_problems() or self.problems() + _unknown_multipliers(kwargs)
        if problems:
            raise ValueError(f"{type(self).__name__}: " + "; ".join(problems))

    def to_dict(self) -> dict[str, Any]:
        """What is written to ``config.json``."""
        absent = {name for name in self.lacking if getattr(self, name) == getattr(Config, name)}
        return {name: value for name, value in super().to_dict().items() if name not in absent}

    def problems(self) -> list[str]:
        """What is wrong with the values, one phrase each. A family extends this list."""
        found = []
        for name in ("hidden_size", "vocab_size", "intermediate_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"{name} must be at least 1, got {value}")
        if self.num_hidden_layers < 0:
            found.append(f"num_hidden_layers must not be negative, got {self.num_hidden_layers}")
        if self.fuse_cross_entropy and self.fuse_linear_cross_entropy:
            found.append("fuse_cross_entropy and fuse_linear_cross_entropy exclude each other")
        block = self.attnres_block_size
        if block is not None and block != 1 and (block < 2 or block % 2):
            found.append(f"attnres_block_size must be None, 1 or even, got {block}")
        return found

    def _type_problems(self) -> list[str]:
        found = []
        for base in type(self).__mro__:
            if not issubclass(base, Config):
                break
            for name, hint in inspect.get_annotations(base, eval_str=True).items():
                if typing.get_origin(hint) is ClassVar or _fits(getattr(self, name), hint):
                    continue
                found.append(f"{name} must be {_spell(hint)}, got {getattr(self, name)!r}")
        return found

    def _hash(self):
        return hash((type(self), self.hidden_size, self.num_hidden_layers, self.vocab_size))


def _unknown_multipliers(unknown: Mapping[str, Any]) -> list[str]:
    """Keys that no field has are kept and mean nothing; what scales a model (Falcon-H1's
    ``ssm_multipliers``, say) would be lost that way."""
    scales = {k: v for k, v in unknown.items() if k.endswith(("_multiplier", "_multipliers"))}
    return [
        f"{name}={value!r} is not known to this family, whose numbers it would change"
        for name, value in scales.items()
        if value is not None and np.any(np.asarray(value) != 1)
    ]


def _fits(value, hint) -> bool:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(_fits(value, option) for option in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    if kind is Any:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, bool):
        return kind is bool
    if kind is list:
        (item,) = typing.get_args(hint) or (Any,)
        return isinstance(value, list | tuple) and all(_fits(each, item) for each in value)
    return isinstance(value, kind)


def _spell(hint) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("NoneType", "None")


def choice_problems(config: Config, choices: Mapping[str, Iterable[str]]) -> list[str]:
    """A phrase for every field of ``choices`` whose value is not among those accepted."""
    return [
        f"{name} must be one of {sorted(accepted)}, got {getattr(config, name)!r}"
        for name, accepted in choices.items()
        if getattr(config, name) not in accepted
    ]


def normalise_attention(attn: AttentionPlan, num_hidden_layers: int) -> AttentionPlan:
    """FLA's ``attn`` specification with its defaults filled in, in the form it was given.

    One dict, or a list of dicts, each with ``layers`` (indices) and ``num_heads``, optionally
    ``num_kv_heads``, ``qkv_bias``, ``window_size``, ``rope_theta``. Unknown keys are kept.

    Raises:
        ValueError: a field is missing, has an impossible value, or two specifications (or one,
            twice) claim a layer.
    """
    if attn is None:
        return None
    claimed: set[int] = set()
    filled = [
        _normalise_one(spec, num_hidden_layers, claimed)
        for spec in ([attn] if isinstance(attn, dict) else attn)
    ]
    return filled[0] if isinstance(attn, dict) else filled


def _normalise_one(spec: dict[str, Any], depth: int, claimed: set[int]) -> dict[str, Any]:
    missing = [name for name in ("layers", "num_heads") if name not in spec]
    if missing:
        raise ValueError(f"attn needs the field(s) {', '.join(missing)}, got {sorted(spec)}")
    spec = dict(spec)
    if not _fits(spec["layers"], list[int]):
        raise ValueError(f"attn field 'layers' must be a list of indices, got {spec['layers']!r}")
    spec["layers"] = list(spec["layers"])
    for layer in spec["layers"]:
        if not 0 <= layer < depth:
            raise ValueError(f"attn names layer {layer}, the model has layers 0 to {depth - 1}")
        if layer in claimed:
            raise ValueError(f"attn claims layer {layer} twice")
        claimed.add(layer)
    if spec.get("num_kv_heads") is None:
        spec["num_kv_heads"] = spec["num_heads"]
    spec.setdefault("qkv_bias", False)
    spec.setdefault("window_size", None)
    spec.setdefault("rope_theta", 10000.0)
    for name, optional in {"num_heads": False, "num_kv_heads": False, "window_size": True}.items():
        value = spec[name]
        if not (optional and value is None) and not (_fits(value, int) and value > 0):
            raise ValueError(f"attn field {name!r} must be a positive integer, got {value!r}")
    if not isinstance(spec["qkv_bias"], bool):
        raise ValueError(f"attn field 'qkv_bias' must be a bool, got {spec['qkv_bias']!r}")
    theta = spec["rope_theta"]
    if not _fits(theta, float) or not 0 < theta <= sys.float_info.max:
        raise ValueError(f"attn field 'rope_theta' must be positive and finite, got {theta!r}")
    return spec


class HybridConfig(Config):
    """A config whose ``attn`` puts softmax attention at chosen layers (see FLA's hybrids)."""

    attn: AttentionPlan = None

    def __setattr__(self, name, value):
        if name == "attn" and _fits(value, AttentionPlan):
            value = normalise_attention(value, self.num_hidden_layers)
        super().__setattr__(name, value)

    def attention_at(self, layer_idx: int) -> dict[str, Any] | None:
        """The attention specification of a layer, None where the family's own mixer stands."""
        specs = self.attn or []
        for spec in [specs] if isinstance(specs, dict) else specs:
            if layer_idx in spec["layers"]:
                return spec
        return None
