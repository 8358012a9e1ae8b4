"""Mamba-3 (arXiv:2603.15569), FLA's ``Mamba3``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx

from jla.layers import carry
from jla.layers.mixer import Cache, TokenMixer
from jla.layers.state_space import count_heads
from jla.nn import GatedRMSNorm, RMSNorm, init
from jla.nn.param import float32_param
from jla.ops import Mamba3State, mamba3
from jla.ops.chunking import repeat_heads


class Mamba3(TokenMixer):
    """State space heads with trapezoidal steps and a turning state; several ranks with ``is_mimo``.

    ``in_proj`` makes everything: gates z, inputs x, B and C (normalised, with a bias per head),
    steps, rates, mixing of the trapezoid and turning rates. :func:`jla.ops.mamba3` runs per head;
    there is no convolution.

    FLA's layer needs a GPU and upstream's kernels, and takes one token at a time with a cache.

    Args:
        hidden_size: D.
        state_size: N, even.
        expand: inner width over D.
        head_dim: P.
        n_groups: heads of B and C, a divisor of the number of heads.
        rope_fraction: 0.5 or 1.0, the share of N that turns.
        dt_min, dt_max, dt_init_floor: step sizes start log-uniform in the range, above the floor.
        A_floor: decay rates are at least this.
        is_outproj_norm: normalise each head of the output.
        is_mimo: several ranks of B, C, values and gates share a state.
        mimo_rank: how many.
        chunk_size: FLA's, kept and without effect on the numbers.
        use_bias: give ``in_proj`` and ``out_proj`` biases.
        norm_eps: of all norms.
        layer_idx: FLA's argument, not needed here.
        device: FLA's argument; JAX places arrays, so only None is accepted.
        dtype: flax's compute dtype, not FLA's dtype of parameters, which is ``param_dtype``.
        param_dtype, precision: as in :class:`flax.nnx.Linear`; ``dt_bias``, ``D [H]``, ``B_bias``,
            ``C_bias [H, R, N]``, ``mimo_x``, ``mimo_z``, ``mimo_o [H, R, P]`` and the state are
            float32 always.
        kernel_init: initialiser of kernels; torch's defaults, as FLA's layer alone has, if None.
        out_init: initialiser of ``out_proj``'s kernel; ``kernel_init`` if None.
        impl: implementation of the recurrence, see :func:`jla.ops.mamba3`.
        rngs: ``params`` stream.

    Raises:
        ValueError: sizes that do not divide, or an impossible ``rope_fraction``, rank or device.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        state_size: int = 128,
        expand: float = 2,
        head_dim: int = 64,
        n_groups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        A_floor: float = 1e-4,
        is_outproj_norm: bool = False,
        is_mimo: bool = False,
        mimo_rank: int = 4,
        chunk_size: int = 64,
        use_bias: bool = False,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        *,
        device: None = None,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init: init.Initializer | None = None,
        out_init: init.Initializer | None = None,
        impl: str = "auto",
        rngs: nnx.Rngs,
    ):
        _check(state_size, rope_fraction, is_mimo, mimo_rank, device)
        inner, ranks = int(expand * hidden_size), mimo_rank if is_mimo else 1
        heads = self.num_heads = count_heads(inner, head_dim, n_groups)
        self.hidden_size, self.impl = hidden_size, impl
        self.dtype, self.param_dtype = dtype, param_dtype
        self.head_dim, self.state_size, self.n_groups = head_dim, state_size, n_groups
        self.mimo_rank, self.is_mimo, self.A_floor = ranks, is_mimo, A_floor
        self.num_rope_angles = int(state_size * rope_fraction) // 2
        bc = state_size * n_groups * ranks
        self.sizes = (inner, inner, bc, bc, heads, heads, heads, self.num_rope_angles)

        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        self.in_proj = linear(hidden_size, sum(self.sizes), use_bias=use_bias)
        self.dt_bias = float32_param(
            init.step_size_bias(rngs.params(), (heads,), dt_min, dt_max, dt_init_floor)
        )
        self.B_bias = float32_param(jnp.ones((heads, ranks, state_size)))
        self.C_bias = float32_param(jnp.ones((heads, ranks, state_size)))
        self.B_norm = RMSNorm(state_size, eps=norm_eps, param_dtype=param_dtype)
        self.C_norm = RMSNorm(state_size, eps=norm_eps, param_dtype=param_dtype)
        if is_mimo:
            shape = (heads, ranks, head_dim)
            self.mimo_x = float32_param(jnp.full(shape, 1 / ranks))
            self.mimo_z = float32_param(jnp.ones(shape))
            self.mimo_o = float32_param(jnp.full(shape, 1 / ranks))
        self.D = float32_param(jnp.ones((heads,)))
        norm: dict[str, Any] = dict(group_size=head_dim, eps=norm_eps, param_dtype=param_dtype)
        self.norm = GatedRMSNorm(inner, **norm) if is_outproj_norm else None
        out_init = out_init or kernel_init or init.torch_linear
        self.out_proj = linear(inner, hidden_size, use_bias=use_bias, kernel_init=out_init)

    def mix(self, x, *, segment_ids, positions, cache):
        """See :meth:`TokenMixer.mix`; the cache holds the four parts of :class:`Mamba3State`."""
        ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes) - 1)]
        z, x, B, C, dt, rate, trap, angles = jnp.split(self.in_proj(x), ends, axis=-1)
        z, x = (rearrange(each, "b t (h p) -> b t h p", p=self.head_dim) for each in (z, x))
        rate = jax.nn.softplus(rate.astype(jnp.float32))
        options: dict[str, Any] = {**carry.op_options(self, segment_ids, cache)}
        if cache is not None:
            options["initial_state"] = Mamba3State(**cache["recurrent_state"])
        y, *states = mamba3(
            x,
            jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...]),
            -jnp.maximum(rate, self.A_floor),
            self._keys(B, self.B_norm, self.B_bias[...]),
            self._keys(C, self.C_norm, self.C_bias[...]),
            trap,
            angles,
            self.D[...],
            self.mimo_x[...] if self.is_mimo else None,
            # Upstream's kernels of one rank turn neighbours, those of several turn halves.
            interleaved=not self.is_mimo,
            **options,
        )
        y = self.out_proj(self._read_out(y, z))
        return y, carry.cache_after([state and state._asdict() for state in states])

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """Zeros, float32: ``angle [B, H, S]``, ``ssm [B, H, N, P]``, ``k [B, H, R, N]``, ``v [B, H,
        P]``."""
        zeros = lambda *shape: jnp.zeros((batch_size, self.num_heads, *shape), jnp.float32)  # noqa: E731
        state = Mamba3State(
            angle=zeros(self.num_rope_angles),
            ssm=zeros(self.state_size, self.head_dim),
            k=zeros(self.mimo_rank, self.state_size),
            v=zeros(self.head_dim),
        )
        return {"recurrent_state": state._asdict()}

    def _keys(self, flat, norm: RMSNorm, bias):
        """B or C of every head, ``[B, T, H, R, N]``."""
        flat = rearrange(flat, "b t (r g n) -> b t g r n", g=self.n_groups, n=self.state_size)
        return repeat_heads(norm(flat), self.num_heads) + bias.astype(flat.dtype)

    def _read_out(self, y, z):
        """``y [B, T, H, R, P]`` gated, perhaps normalised, and its ranks summed: ``[B, T, D']``."""
        gate = z[:, :, :, None] * (self.mimo_z[...].astype(z.dtype) if self.is_mimo else 1)
        if self.norm is None:
            y = y * jax.nn.silu(gate)
        else:
            y, gate = (rearrange(each, "b t h r p -> b t r (h p)") for each in (y, gate))
            y = rearrange(self.norm(y, gate), "b t r (h p) -> b t h r p", p=self.head_dim)
        if self.is_mimo:
            y = y * self.mimo_o[...].astype(y.dtype)
        return rearrange(y.sum(axis=3), "b t h p -> b t (h p)")


def _check(state_size, rope_fraction, is_mimo, mimo_rank, device):
    if state_size % 2 or state_size < 2:
        raise ValueError(f"state_size must be even and positive, got {state_size}")
    if rope_fraction not in (0.5, 1.0):
        raise ValueError(f"rope_fraction must be 0.5 or 1.0, got {rope_fraction}")
    if int(state_size * rope_fraction) < 2:
        raise ValueError(f"{state_size=} times {rope_fraction=} leaves no pair to turn")
    if is_mimo and mimo_rank < 1:
        raise ValueError(f"mimo_rank must be at least 1, got {mimo_rank}")
    if device is not None:
        raise ValueError(f"device must be None: JAX places arrays, got {device!r}")
