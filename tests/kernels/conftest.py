"""What tests of kernels run under."""

import pytest

from jla.kernels import sharding


@pytest.fixture(autouse=True)
def alone(request, monkeypatch):
    """Kernels run as on a machine with one GPU, although several host devices are visible."""
    if request.path.stem != "test_sharding":
        monkeypatch.setattr(sharding, "alone", lambda: True)
