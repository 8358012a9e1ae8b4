"""Training states through orbax (S27)."""

import fresh
import jax
import pytest
from flax import nnx

from models import resume


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_s27_training_resumes_bit_for_bit(tmp_path):
    """Saved after two steps; the next three losses are the same in this process and in a fresh one,
    which restores to an abstract state."""
    run = resume.as_pytree(resume.fresh())
    resume.train(run, 2)
    folder = tmp_path / "state"
    resume.save(run, folder)
    leaves = jax.tree.leaves(nnx.state(run))
    back = jax.tree.leaves(nnx.state(resume.restore(folder)))
    assert len(leaves) == len(back)
    expected = resume.train(run, 3)
    assert len(set(expected)) == 3
    assert fresh.python(resume.__file__, str(folder)).split() == expected
