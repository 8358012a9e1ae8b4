"""Settings every test runs under: four host devices, GPU tests skipped where there is no Hopper."""

import os

# Before anything imports JAX: its backends read the environment once.
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=4".strip()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

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


def pytest_collection_modifyitems(items):
    for item in items:
        # Tests of one table row share compiled functions: with `--dist loadgroup` one process
        # runs them all.
        row = getattr(item, "callspec", None) and item.callspec.params.get("row")
        group = f"{item.path.name}:{row}" if row else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
        if item.get_closest_marker("gpu") and _no_hopper():
            item.add_marker(pytest.mark.skip(reason=_no_hopper()))


@pytest.fixture
def x64():
    """Runs the test with 64-bit numbers on."""
    import jax

    with jax.enable_x64(True):
        yield
