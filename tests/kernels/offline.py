"""Compile kernels to sm_90a without a GPU (needs the CUDA plugin wheels) and read the report."""

import dataclasses
import importlib.util
import math
import os
import pathlib
import re
import tempfile

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800
  clock_rate_ghz: 1.98  device_memory_size: 141000000000
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
# wgmma serialised (C7510, 7511, 7514, 7515) or an accumulator used before its wait (C7517).
BAD_NOTES = ("C7510", "C7511", "C7514", "C7515", "C7517")


@dataclasses.dataclass(frozen=True)
class Report:
    """One kernel: bytes of shared memory and spills, registers a thread at launch."""

    name: str
    smem: int
    registers: int
    spills: int
    bad_notes: tuple[str, ...]
    early_uses: int  # accumulator registers touched between a wgmma and its wait


def available():
    return importlib.util.find_spec("jax_cuda13_plugin") is not None


def mesh(**axes):
    """A mesh of H200s that need not be there, with Auto axes of these names and sizes."""
    sizes = tuple(axes.values())
    name = f"1x1x{math.prod(sizes)}"
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=name, topology=name, target_config=_H200
    )
    return Mesh(np.array(topology.devices).reshape(sizes), tuple(axes))


def compile_kernels(fn, *specs):
    """Compiles ``fn(*specs)`` (ShapeDtypeStructs) for an H200; one Report a Mosaic kernel."""
    sharding = NamedSharding(mesh(d=1), PartitionSpec())
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), specs)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder  # being set is what counts
        try:
            jax.jit(fn, out_shardings=sharding).trace(*specs).lower().compile()
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
        return [_report(path) for path in sorted(pathlib.Path(folder).glob("*.ptxas"))]


def _report(path):
    log = path.read_text()
    resources = path.with_name(path.stem + ".resources.txt").read_text()

    def number(pattern, text):
        found = re.search(pattern, text)
        return int(found[1]) if found else 0

    return Report(
        name=re.sub(r"_\d+$", "", path.stem),
        smem=number(r"smem_scratch_bytes=(\d+)", resources),
        registers=number(r"Used (\d+) registers", log),
        spills=number(r"(\d+) bytes spill stores", log),
        bad_notes=tuple(sorted(note for note in BAD_NOTES if note in log)),
        early_uses=_early_uses(path.with_suffix(".ptx").read_text()),
    )


def _early_uses(ptx):
    """Linear scan: branches are approximated, a partial wait keeps everything pending."""
    pending, uses = set(), 0
    for line in ptx.splitlines():
        line = line.split("//")[0].strip()
        if "wgmma.mma_async" in line:
            operands = re.search(r"\{([^{}]*)\}", line[line.index("wgmma.mma_async") :])
            pending |= set(re.findall(r"%\w+", operands[1]))
        elif re.search(r"wgmma\.wait_group\S* 0;", line):
            pending.clear()
        elif pending and not line.startswith("wgmma"):
            uses += any(register in pending for register in re.findall(r"%\w+", line))
    return uses
