"""Trains a tiny model; run as a script it resumes from a checkpoint in a fresh process (S27).

python resume.py FOLDER    prints the losses of the next steps, exactly
"""

import sys

import jax
import optax
import orbax.checkpoint as ocp
from flax import nnx

from jla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

CONFIG = GatedDeltaNetConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_heads=2,
    head_dim=4,
    vocab_size=31,
    attn={"layers": [1], "num_heads": 2},
)
RNG_STREAM = "order"


def fresh():
    """Model, optimizer and the random stream that orders the data."""
    model = GatedDeltaNetForCausalLM(CONFIG, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer, "rngs": nnx.Rngs(**{RNG_STREAM: 3})}


def train(run, steps: int) -> list[str]:
    """Losses as exact hexadecimal numbers."""

    @nnx.jit
    def step(run):
        ids = jax.random.randint(run["rngs"][RNG_STREAM](), (2, 9), 0, CONFIG.vocab_size)
        loss, gradients = nnx.value_and_grad(lambda m: m(ids, labels=ids).loss)(run["model"])
        run["optimizer"].update(run["model"], gradients)
        return loss

    return [float(step(run)).hex() for _ in range(steps)]


def save(run, folder) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, nnx.to_pure_dict(nnx.state(as_pytree(run))))


def restore(folder):
    abstract = nnx.eval_shape(lambda: as_pytree(fresh()))
    graphdef, state = nnx.split(abstract)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), nnx.to_pure_dict(state)
    )
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.replace_by_pure_dict(state, checkpointer.restore(folder, wanted))
    return nnx.merge(graphdef, state)


def as_pytree(run):
    return nnx.Dict(run)


if __name__ == "__main__":
    print(" ".join(train(restore(sys.argv[1]), 3)))
