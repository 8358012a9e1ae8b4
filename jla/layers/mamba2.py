"""Mamba-2 (arXiv:2405.21060), FLA's ``Mamba2``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jla.layers import carry
from jla.layers.mixer import Cache, TokenMixer
from jla.layers.state_space import check_switches, count_heads
from jla.nn import GatedRMSNorm, ShortConvolution, init
from jla.nn.channels import project
from jla.nn.param import float32_param
from jla.ops import ssd


class Mamba2(TokenMixer):
    """Heads that are state space models with one decay rate each, read and written through C and B.

    ``in_proj`` makes gates, inputs, B, C and step sizes; all but gates and steps are filtered over
    time, :func:`jla.ops.ssd` runs per head, and the gated and normalised output is projected back.

    FLA's layer neither takes packed rows nor more than one token with a cache; this one does both.
    Its kernels for one token ignore ``dt_limit``, and without ``rmsnorm`` its torch code gates by
    ``hidden_act`` where its kernels always take SiLU.

    Args:
        num_heads: ``expand * hidden_size / head_dim``, what it is anyway if None or 0.
        head_dim: P.
        hidden_size: D.
        state_size: N.
        expand: inner width over D.
        n_groups: heads of B and C, and groups of the norm; a divisor of ``num_heads``.
        conv_kernel: taps of the convolution.
        conv_init: its kernel starts uniform within this; ``kernel_init`` if None.
        use_conv_bias: give it a bias.
        hidden_act: ``"silu"`` or ``"swish"`` (the same), of the convolution and the gate.
        A_init_range: decay rates start uniform in this range.
        D_has_hdim: a skip per channel, not per head.
        rmsnorm: normalise the gated output.
        norm_before_gate: normalise first, gate then.
        dt_min, dt_max, dt_init_floor: step sizes start log-uniform in the range, above the floor.
        dt_limit: step sizes are clipped to this range.
        use_bias: give ``in_proj`` and ``out_proj`` biases.
        norm_eps: of the norm.
        chunk_size, backend: FLA's, kept and without effect on the numbers.
        layer_idx: FLA's argument, not needed here.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`; ``A_log [H]``,
            ``dt_bias [H]``, ``D`` and the state ``[B, H, N, P]`` are float32 always.
        kernel_init: initialiser of kernels; torch's defaults, as FLA's layer alone has, if None.
        out_init: initialiser of ``out_proj``'s kernel; ``kernel_init`` if None.
        impl: implementation of the recurrence, see :func:`jla.ops.ssd`.
        rngs: ``params`` stream.

    Raises:
        ValueError: sizes that do not divide, an unknown activation or backend.
    """

    def __init__(
        self,
        num_heads: int | None = None,
        head_dim: int = 64,
        hidden_size: int = 2048,
        state_size: int = 128,
        expand: float = 2,
        n_groups: int = 1,
        conv_kernel: int = 4,
        conv_init: float | None = None,
        use_conv_bias: bool = True,
        hidden_act: str = "silu",
        A_init_range: Sequence[float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: Sequence[float] = (0.0, math.inf),
        use_bias: bool = False,
        norm_eps: float = 1e-5,
        chunk_size: int = 256,
        layer_idx: int | None = None,
        backend: str = "cuda",
        *,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init: init.Initializer | None = None,
        out_init: init.Initializer | None = None,
        impl: str = "auto",
        rngs: nnx.Rngs,
    ):
        check_switches(hidden_act, backend)
        inner = int(expand * hidden_size)
        self.num_heads = count_heads(inner, head_dim, n_groups, num_heads)
        self.hidden_size, self.impl = hidden_size, impl
        self.dtype, self.param_dtype = dtype, param_dtype
        self.intermediate_size, self.head_dim, self.state_size = inner, head_dim, state_size
        self.n_groups, self.dt_limit = n_groups, tuple(dt_limit)

        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        conv_size = inner + 2 * n_groups * state_size
        self.in_proj = linear(hidden_size, inner + conv_size + self.num_heads, use_bias=use_bias)
        self.conv1d = ShortConvolution(
            conv_size,
            conv_kernel,
            bias=use_conv_bias,
            kernel_init=kernel_init if conv_init is None else init.uniform(conv_init),
            bias_init=init.uniform(conv_kernel**-0.5) if kernel_init is None else None,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        heads = (self.num_heads,)
        self.dt_bias = float32_param(
            init.step_size_bias(rngs.params(), heads, dt_min, dt_max, dt_init_floor)
        )
        self.A_log = float32_param(init.decay_rate(rngs.params(), heads, *A_init_range))
        self.D = float32_param(jnp.ones((inner,) if D_has_hdim else heads))
        norm: dict[str, Any] = dict(group_size=inner // n_groups, norm_before_gate=norm_before_gate)
        norm |= dict(eps=norm_eps, param_dtype=param_dtype)
        self.norm = GatedRMSNorm(inner, **norm) if rmsnorm else None
        out_init = out_init or kernel_init or init.torch_linear
        self.out_proj = linear(inner, hidden_size, use_bias=use_bias, kernel_init=out_init)

    def mix(self, x, *, segment_ids, positions, cache):
        """See :meth:`TokenMixer.mix`; the cache holds the window and the state."""
        inner, groups = self.intermediate_size, self.n_groups * self.state_size
        gate, x, rest = project(self.in_proj, x, (inner, inner, 2 * groups + self.num_heads))
        B_C, dt = jnp.split(rest, [2 * groups], axis=-1)
        (x, B_C), window = carry.filtered(self.conv1d, [x, B_C], segment_ids, cache)
        B, C = jnp.split(B_C, 2, axis=-1)
        y, *states = ssd(
            x.reshape(*x.shape[:2], -1, self.head_dim),
            dt,
            -jnp.exp(self.A_log[...]),
            B.reshape(*x.shape[:2], -1, self.state_size),
            C.reshape(*x.shape[:2], -1, self.state_size),
            self._skip(),
            dt_bias=self.dt_bias[...],
            dt_softplus=True,
            dt_limit=self.dt_limit,
            **carry.op_options(self, segment_ids, cache),
        )
        y = y.reshape(gate.shape)
        y = y * jax.nn.silu(gate) if self.norm is None else self.norm(y, gate)
        y = self.out_proj(y)
        return y, carry.cache_after(states, window)

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """State ``[B, H, N, P]`` float32 and window ``[B, W-1, D' + 2 G N]``."""
        shape = (batch_size, self.num_heads, self.state_size, self.head_dim)
        return {
            "recurrent_state": jnp.zeros(shape, jnp.float32),
            "conv_state": self.conv1d.new_window(batch_size, dtype),
        }

    def _skip(self):
        skip = self.D[...]
        return skip if skip.size == self.num_heads else skip.reshape(self.num_heads, -1)
