"""Rules that Pallas' GPU interpreter lacks in JAX 0.11.2, for tests only.

Added: wgmma with a register left operand, stores to an accumulator, ``pl.run_state`` over
``plgpu.ACC.init``, ``plgpu.mma`` and predicated TMA copies. The patch reaches into private
modules, so it is tied to one JAX version. ``interpreted`` runs a function under the
interpreter and fails on data races.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
from jax._src import callback
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as entry
from jax._src.state import discharge
from jax._src.state import types as state_types
from jax.experimental.pallas import mosaic_gpu as plgpu

VERSION = (0, 11, 2)
_TAG = "_rerouted"


def supported():
    return jax.__version_info__[:3] == VERSION


@contextlib.contextmanager
def interpreted(races=True):
    """Every Mosaic GPU kernel traced inside runs in the interpreter on the CPU."""
    install()
    jax.clear_caches()  # of what was traced outside
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=races)):
            yield
    except BaseException:
        entry.reset_gpu_interpret_mode_state()  # else the next kernel of the process fails too
        raise
    finally:
        jax.clear_caches()


@functools.cache
def install():
    if not supported():
        raise RuntimeError(f"the interpreter patch is written for JAX {VERSION}")
    _patch_equations()
    _patch_arithmetic()
    _patch_copies()


def _is_ref(var):
    return isinstance(var.aval, state_types.AbstractRef)


def _reroute(eqn):
    """Sends equations without a rule to the wgmma rule, which is patched to tell them apart."""
    tags = {primitives.wgmma_accumulator_store_p: "store", discharge.run_state_p: "run_state"}
    if eqn.primitive not in tags:
        return eqn
    params = {**eqn.params, _TAG: tags[eqn.primitive]}
    return eqn.replace(primitive=primitives.wgmma_ref_p, params=params)


@gpu_callbacks.fail_on_exception
def _store(*, token, mesh_location, thread, key, val):
    memory = gpu_callbacks._get_shared_memory()
    key = gpu_callbacks.HostAllocationKey.from_array(key)
    where = shared_memory.GPULoggingInfo(mesh_location, thread, None)
    memory.store_buffer_content(key, memory.access(key, ()), val, thread, logging_info=where)
    return token


class _Registers:
    """Accumulators as interpreter buffers of one thread."""

    def __init__(self, interpreter, eqn):
        self.where = dict(mesh_location=interpreter.mesh_location, thread=interpreter.thread)
        self.source = eqn.source_info

    def allocate(self, token, value):
        space = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)
        token, request = gpu_callbacks.call_make_allocation_request_array(
            token=token,
            compute_unit=self.where["thread"],
            memory_space_id=space,
            initial_ref_count=1,
        )
        return gpu_callbacks.call_allocate_buffer(
            token=token,
            allocation_request_as_array=request,
            value=value,
            source_info=self.source,
            **self.where,
        )

    def read(self, token, key, aval):
        return callback.io_callback(
            functools.partial(gpu_callbacks.wgmma_accumulator_deref, wait_n=None),
            (gpu_callbacks.TOKEN_SHAPE_DTYPE, aval),
            token=token,
            acc_allocation_key_as_array=key,
            **self.where,
        )

    def write(self, token, key, value):
        result = gpu_callbacks.TOKEN_SHAPE_DTYPE
        return callback.io_callback(_store, result, token=token, key=key, val=value, **self.where)

    def free(self, token, key):
        return gpu_callbacks.call_deallocate_buffer(
            token=token, allocation_key_as_array=key, source_info=self.source, **self.where
        )


def _run_state(interpreter, eqn, token, values):
    registers, inner = _Registers(interpreter, eqn), eqn.params["jaxpr"]
    args, owned = [], []
    # Accumulators and closed-over arrays come as values and are refs inside.
    for place, (var, value) in enumerate(zip(inner.invars, values, strict=True)):
        if _is_ref(var) and not _is_ref(eqn.invars[place]):
            token, value = registers.allocate(token, value)
            owned.append((place, value, var.aval.inner_aval))
        args.append(value)
    token, _ = interpreter.interpret(inner, token, *inner.consts, *args)
    out = list(values)
    for place, key, aval in owned:
        token, out[place] = registers.read(token, key, aval)
        token = registers.free(token, key)
    return token, out


def _patch_equations():
    cls = jaxpr_interpret.JaxprInterpreter
    interpret, wgmma = cls.interpret, cls._interpret_wgmma_ref_p

    def patched_interpret(self, jaxpr, token, *args):
        eqns = [_reroute(eqn) for eqn in jaxpr.eqns]
        if any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
            jaxpr = jaxpr.replace(eqns=eqns)
        return interpret(self, jaxpr, token, *args)

    def patched_wgmma(self, eqn, token, get_values):
        tag = eqn.params.get(_TAG)
        if tag == "run_state":
            return _run_state(self, eqn, token, get_values())
        registers = _Registers(self, eqn)
        if tag == "store":
            key, value = get_values()
            return registers.write(token, key, value), [value]
        if _is_ref(eqn.invars[1]):
            return wgmma(self, eqn, token, get_values)
        acc, lhs, *rest = get_values()
        token, key = registers.allocate(token, lhs)
        token, out = wgmma(self, eqn, token, lambda: [acc, key, *rest])
        return registers.free(token, key), out

    cls.interpret, cls._interpret_wgmma_ref_p = patched_interpret, patched_wgmma


def _patch_arithmetic():
    cls = jaxpr_interpret.JaxprInterpreter
    base = cls._interpret_arithmetic_primitive

    def patched(self, eqn, get_values):
        if eqn.primitive is not primitives.mma_p:
            return base(self, eqn, get_values)
        acc, a, b = get_values()
        return acc + jnp.dot(a, b, preferred_element_type=acc.dtype)

    cls._interpret_arithmetic_primitive = patched


def _patch_copies():
    cls = jaxpr_interpret.JaxprInterpreter
    load, store = cls._interpret_copy_gmem_to_smem_p, gpu_callbacks.copy_smem_to_gmem

    def patched_load(self, eqn, token, get_values):
        if not eqn.params["has_user_predicate"]:
            return load(self, eqn, token, get_values)
        *values, predicate = get_values()
        eqn = eqn.replace(params={**eqn.params, "has_user_predicate": False})
        copy = lambda token: load(self, eqn, token, lambda: values)[0]  # noqa: E731
        return jax.lax.cond(predicate, copy, lambda token: token, token), []

    def patched_store(**kwargs):
        predicate = kwargs.pop("predicate")
        if predicate is not None and not bool(predicate):
            return kwargs["token"]
        return store(predicate=None, **kwargs)

    cls._interpret_copy_gmem_to_smem_p = patched_load
    gpu_callbacks.copy_smem_to_gmem = patched_store
