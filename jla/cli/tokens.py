"""Between text and token ids: a checkpoint's own tokenizer, or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from jla.cli.checkpoint import Checkpoint

# What tokenizers of Transformers are saved in.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_ENOUGH = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


class Codec(Protocol):
    """Text as it stands in files, bytes, to ids and back."""

    def encode(self, text: bytes, source: str) -> list[int]:
        """Ids of a text; errors name its ``source``."""
        ...

    def decode(self, ids: Sequence[int]) -> bytes:
        """The text of ids, without special ones."""
        ...

    def is_incomplete(self, text: bytes) -> bool:
        """Whether the text's last character waits for more ids."""
        ...


class ByteCodec:
    """An id is a byte's value; 0, which no text holds, opens a document."""

    BOUNDARY = 0

    def encode(self, text: bytes, source: str) -> list[int]:
        """See :class:`Codec`."""
        return [self.BOUNDARY, *text]

    def decode(self, ids: Sequence[int]) -> bytes:
        """See :class:`Codec`."""
        return bytes(i for i in ids if i != self.BOUNDARY)

    def is_incomplete(self, text: bytes) -> bool:
        """See :class:`Codec`; bytes are written as they come."""
        return False


class TokenizerCodec:
    """The tokenizer in a checkpoint's folder."""

    def __init__(self, folder: Path):
        from transformers import AutoTokenizer

        if not any((folder / name).is_file() for name in _ENOUGH):
            raise FileNotFoundError(
                f"{folder} has no tokenizer; --bytes reads and writes raw bytes"
            )
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # tokenizers raises Exception itself
            raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error

    def encode(self, text: bytes, source: str) -> list[int]:
        """See :class:`Codec`.

        Raises:
            ValueError: text that is not UTF-8.
        """
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{source} is not UTF-8 text: {error}") from None
        return list(self.tokenizer(decoded, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> bytes:
        """See :class:`Codec`."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True).encode()

    def is_incomplete(self, text: bytes) -> bool:
        """See :class:`Codec`."""
        return text.endswith("\N{REPLACEMENT CHARACTER}".encode())


def codec(checkpoint: Checkpoint, as_bytes: bool) -> Codec:
    """What turns text into this checkpoint's ids.

    Raises:
        FileNotFoundError: the folder has no tokenizer.
        ValueError: the tokenizer cannot be read, or a vocabulary is not one of bytes.
    """
    if not as_bytes:
        return TokenizerCodec(checkpoint.folder)
    if checkpoint.config.vocab_size != 256:
        raise ValueError(
            f"--bytes needs a vocabulary of 256, this model's is {checkpoint.config.vocab_size}"
        )
    return ByteCodec()
