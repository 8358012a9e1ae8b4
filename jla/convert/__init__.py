"""FLA checkpoints in and out, through one two-way table."""

from jla.convert.pretrained import from_pretrained, save_pretrained
from jla.convert.state_dict import CheckpointError, load_state_dict, to_state_dict

__all__ = [
    "CheckpointError",
    "from_pretrained",
    "load_state_dict",
    "save_pretrained",
    "to_state_dict",
]
