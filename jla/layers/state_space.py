"""What the Mamba layers check alike."""

from __future__ import annotations

from jla.nn.check import check_choice


def check_switches(hidden_act: str, backend: str) -> None:
    """Raises ValueError for an activation, or a backend of FLA's, that does not exist here."""
    check_choice("hidden_act", hidden_act, ("silu", "swish"))
    check_choice("backend", backend, ("cuda", "triton"))


def count_heads(inner: int, head_dim: int, n_groups: int, num_heads: int | None = None) -> int:
    """Heads of ``inner`` channels, which ``num_heads`` may repeat; a multiple of ``n_groups``."""
    if inner % head_dim:
        raise ValueError(f"head_dim={head_dim} must divide expand * hidden_size = {inner}")
    heads = inner // head_dim
    if num_heads and num_heads != heads:
        raise ValueError(
            f"num_heads={num_heads} must be expand * hidden_size / head_dim = {heads}, or None"
        )
    if n_groups < 1 or heads % n_groups:
        raise ValueError(f"n_groups={n_groups} must divide the {heads} heads")
    return heads
