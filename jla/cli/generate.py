"""``jla generate``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jla.cli.checkpoint import Checkpoint, look_at
from jla.eval import Codec


def read_prompt(prompt: str | None, prompt_file: Path | None) -> bytes:
    """The prompt, given in one of two ways.

    Raises:
        ValueError: in none or both of them, or empty.
    """
    if prompt is not None and prompt_file is None:
        text = os.fsencode(prompt)
    elif prompt_file is not None and prompt is None:
        text = prompt_file.read_bytes()
    else:
        raise ValueError("give --prompt or --prompt-file, one of the two")
    if not text:
        raise ValueError("the prompt is empty: there is nothing to continue")
    return text


def run(
    folder: str,
    prompt: bytes,
    max_new_tokens: int,
    sampling: dict[str, Any],
    dtype: str | None,
    as_bytes: bool,
    as_json: bool,
) -> None:
    """Continues the prompt on stdout, or prints tokens and text as one JSON object."""
    checkpoint = look_at(folder)
    coder = checkpoint.codec(as_bytes)
    ids = coder.encode(prompt, "the prompt")
    check_length(checkpoint, len(ids), max_new_tokens)
    writer = Writer(coder, stops(checkpoint.config.eos_token_id), quiet=as_json)
    model = checkpoint.load(dtype)
    model.generate(
        jnp.array([ids], jnp.int32), max_new_tokens=max_new_tokens, stream=writer, **sampling
    )
    writer.close()
    if as_json:
        facts = {
            "prompt_tokens": len(ids),
            "tokens": writer.ids,
            "text": coder.decode(writer.ids).decode(errors="replace"),
            "finished": writer.finished,
        }
        print(json.dumps(facts))


def check_length(checkpoint: Checkpoint, prompt: int, new: int) -> None:
    """Raises ValueError where a prompt has no token or the context would outgrow the model's."""
    if not prompt:
        raise ValueError("the prompt is empty: the tokenizer makes no token of it")
    limit = checkpoint.limit()
    if limit is not None and prompt + new > limit:
        raise ValueError(
            f"the prompt's {prompt} tokens and {new} new ones exceed the model's limit of {limit}"
        )


def stops(eos: int | list[int] | None) -> tuple[int, ...]:
    """The ids that end a text."""
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


class Writer:
    """Writes the text of tokens to stdout as they come; whole characters, no token twice.

    Attributes:
        ids: the tokens so far, without the one that ended the text.
        finished: whether one ended it.
    """

    def __init__(self, coder: Codec, stops: tuple[int, ...], *, quiet: bool):
        self.coder, self.stops, self.quiet = coder, stops, quiet
        self.ids: list[int] = []
        self.finished = False
        self.problem: OSError | None = None
        # Decoding starts at a token before the first unwritten one: some tokenizers put a space
        # between two tokens, but none in front of the first.
        self._start = self._written = 0

    def __call__(self, tokens: np.ndarray) -> None:
        """Takes the next token, int32 ``[1]``."""
        token = int(np.asarray(tokens)[0])
        self.finished = self.finished or token in self.stops
        if self.finished:
            return
        self.ids.append(token)
        self._write(last=False)

    def close(self) -> None:
        """Writes what was held back and ends a terminal's line; raises what writing met with."""
        self._write(last=True)
        if not self.quiet and sys.stdout.isatty():
            print()
        if self.problem is not None:
            raise self.problem

    def _write(self, last: bool) -> None:
        text = self.coder.decode(self.ids[self._start :])
        if self.quiet or self.problem is not None or not last and self.coder.is_incomplete(text):
            return
        before = self.coder.decode(self.ids[self._start : self._written])
        self._start, self._written = self._written, len(self.ids)
        try:
            sys.stdout.buffer.write(text[len(before) :])
            sys.stdout.flush()
        except OSError as error:
            self.problem = error  # kept: JAX would report it as an error of its own
