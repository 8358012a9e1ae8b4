"""Arguments that are one of a few values."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def check_choice(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raises ValueError, naming the argument, unless ``value`` is one of ``allowed``."""
    if value in allowed:
        return
    accepted = f"one of {sorted(allowed, key=str)}"
    if len(allowed) == 2:
        accepted = " or ".join(map(repr, allowed))
    raise ValueError(f"{name} must be {accepted}, got {value!r}")
