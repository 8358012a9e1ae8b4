"""Mamba (arXiv:2312.00752), FLA's ``Mamba``."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jla.layers import carry
from jla.layers.mixer import Cache, TokenMixer
from jla.layers.state_space import check_switches
from jla.nn import ShortConvolution, init
from jla.nn.channels import project
from jla.nn.check import check_choice
from jla.nn.param import float32_param
from jla.ops import selective_scan


class Mamba(TokenMixer):
    """Channels that are small systems of their own, whose steps and in- and outputs x chooses.

    ``in_proj`` makes inputs and gates; the inputs are filtered over time, step sizes, B and C are
    read off them, and :func:`jla.ops.selective_scan` runs per channel.

    FLA's layer neither takes packed rows nor more than one token with a cache; this one does both.

    Args:
        hidden_size: D.
        state_size: N per channel.
        conv_kernel: taps of the convolution.
        use_conv_bias: give it a bias.
        intermediate_size: channels.
        dt_rank: width of the bottleneck in front of the step sizes; ``ceil(D / 16)`` if ``"auto"``.
        dt_min, dt_max, dt_init_floor: step sizes start log-uniform in the range, above the floor.
        dt_init: ``"random"`` or ``"constant"`` start of ``dt_proj``.
        dt_scale: factor of that start.
        use_bias: give ``in_proj`` and ``out_proj`` biases.
        hidden_act: ``"silu"`` or ``"swish"`` (the same), of the convolution and the gate.
        layer_idx: FLA's argument, not needed here.
        backend: FLA's ``"cuda"`` or ``"triton"``, kept and without effect on the numbers.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`; ``A_log [D', N]``,
            ``D [D']``, the bias of ``dt_proj`` and the state ``[B, D', N]`` are float32 always.
        kernel_init: initialiser of kernels; torch's defaults, as FLA's layer alone has, if None.
        out_init: initialiser of ``out_proj``'s kernel; ``kernel_init`` if None.
        impl: implementation of the recurrence, see :func:`jla.ops.selective_scan`.
        rngs: ``params`` stream.

    Raises:
        ValueError: an unknown activation, ``dt_init`` or backend.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        state_size: int = 16,
        conv_kernel: int = 4,
        use_conv_bias: bool = True,
        intermediate_size: int = 2048,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        use_bias: bool = False,
        hidden_act: str = "silu",
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
        check_choice("dt_init", dt_init, ("random", "constant"))
        self.hidden_size, self.impl = hidden_size, impl
        self.dtype, self.param_dtype, self.precision = dtype, param_dtype, precision
        self.intermediate_size, self.state_size = intermediate_size, state_size
        self.dt_rank = math.ceil(hidden_size / 16) if isinstance(dt_rank, str) else dt_rank

        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        self.in_proj = linear(hidden_size, 2 * intermediate_size, use_bias=use_bias)
        # FLA's models leave this at torch's default too, the bias included.
        self.conv1d = ShortConvolution(
            intermediate_size,
            conv_kernel,
            bias=use_conv_bias,
            bias_init=init.uniform(conv_kernel**-0.5),
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.x_proj = linear(intermediate_size, self.dt_rank + 2 * state_size)
        bound = self.dt_rank**-0.5 * dt_scale
        constant = nnx.initializers.constant(bound)
        dt_kernel = init.uniform(bound) if dt_init == "random" else constant
        self.dt_proj = linear(self.dt_rank, intermediate_size, use_bias=True, kernel_init=dt_kernel)
        self.dt_proj.bias = float32_param(
            init.step_size_bias(rngs.params(), (intermediate_size,), dt_min, dt_max, dt_init_floor)
        )
        rates = jnp.arange(1, state_size + 1, dtype=jnp.float32)
        self.A_log = float32_param(jnp.log(jnp.tile(rates, (intermediate_size, 1))))
        self.D = float32_param(jnp.ones((intermediate_size,)))
        out_init = out_init or kernel_init or init.torch_linear
        self.out_proj = linear(
            intermediate_size, hidden_size, use_bias=use_bias, kernel_init=out_init
        )

    def mix(self, x, *, segment_ids, positions, cache):
        """See :meth:`TokenMixer.mix`; the cache holds the window and the state."""
        x, gate = project(self.in_proj, x, (self.intermediate_size,) * 2)
        (x,), window = carry.filtered(self.conv1d, [x], segment_ids, cache)
        ends = (self.dt_rank, self.dt_rank + self.state_size)
        low, B, C = jnp.split(self.x_proj(x), ends, axis=-1)
        steps, dt_bias = self._steps(low)
        y, *states = selective_scan(
            x,
            steps,
            -jnp.exp(self.A_log[...]),
            B,
            C,
            self.D[...],
            dt_bias=dt_bias,
            dt_softplus=True,
            **carry.op_options(self, segment_ids, cache),
        )
        y = self.out_proj(y * jax.nn.silu(gate))
        return y, carry.cache_after(states, window)

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """State ``[B, D', N]`` float32 and window ``[B, W-1, D']``."""
        shape = (batch_size, self.intermediate_size, self.state_size)
        return {
            "recurrent_state": jnp.zeros(shape, jnp.float32),
            "conv_state": self.conv1d.new_window(batch_size, dtype),
        }

    def _steps(self, low):
        """``dt_proj`` of ``low``, and its bias apart, which is added in float32."""
        kernel, bias = self.dt_proj.kernel[...], self.dt_proj.bias
        assert bias is not None
        dtype = self.dtype or jnp.promote_types(low.dtype, kernel.dtype)
        steps = jnp.dot(
            low.astype(dtype),
            kernel.astype(dtype),
            precision=self.precision,
            preferred_element_type=jnp.promote_types(dtype, jnp.float32),
        )
        return steps, bias[...]
