"""Settings every test runs under: four host devices, GPU tests skipped where there is no Hopper."""

import glob
import os

_FLAGS = {"--xla_force_host_platform_device_count": "4"}
if not glob.glob("/dev/nvidia[0-9]*"):
    # Compiling is most of this suite's time; LLVM's optimiser is half of that and changes no
    # operation. An XLA_FLAGS that names a flag wins, so the suite can run fully optimised.
    _FLAGS["--xla_backend_optimization_level"] = "0"
    _FLAGS["--xla_llvm_disable_expensive_passes"] = "true"


def _set_environment():
    given = os.environ.get("XLA_FLAGS", "")
    added = [f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPU
    # Pallas' interpreter gives every warpgroup a host thread that blocks one of XLA's: with as many
    # as a small machine has cores it waits for ever.
    os.environ.setdefault("NPROC", "16")


# Before anything imports JAX: its backends read the environment once.
_set_environment()

import functools  # noqa: E402

import pytest  # noqa: E402

HOPPER = "9.0"


@functools.cache
def _no_hopper() -> str | None:
    """Why no GPU test can run here, or None. Starts JAX, so it is asked for GPU tests only."""
    import jax

    if jax.default_backend() != "gpu":
        return f"needs a Hopper GPU, the default backend is {jax.default_backend()!r}"
    capability = jax.devices()[0].compute_capability
    return None if capability == HOPPER else f"needs compute capability {HOPPER}, got {capability}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items):
    # First: pytest-xdist reads the groups when its own hook runs.
    groups = {}
    for item in items:
        # Tests of one table row share compiled functions: with `--dist loadgroup` one process
        # runs them all.
        row = getattr(item, "callspec", None) and item.callspec.params.get("row")
        group = f"{item.path.name}:{row}" if row else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
        groups[id(item)] = group  # pytest-xdist renames items, which changes their hash
        if item.get_closest_marker("gpu") and _no_hopper():
            item.add_marker(pytest.mark.skip(reason=_no_hopper()))
    yield
    # Last, behind pytest's own order: one process alone goes through a row at a time, too.
    first = {group: i for i, group in reversed(list(enumerate(groups.values())))}
    items.sort(key=lambda item: first[groups[id(item)]])


@pytest.fixture
def x64():
    """Runs the test with 64-bit numbers on."""
    import jax

    with jax.enable_x64(True):
        yield
