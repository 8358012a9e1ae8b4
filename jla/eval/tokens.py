"""Between text and token ids: a checkpoint's own tokenizer, or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

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

    @property
    def prefix(self) -> int | None:
        """The id that stands before a document's first, None if there is no such id."""
        ...

    def encode(self, text: bytes, source: str, *, special: bool = True) -> list[int]:
        """Ids of a text, by default with those that open a document; errors name its ``source``."""
        ...

    def decode(self, ids: Sequence[int]) -> bytes:
        """The text of ids, without special ones."""
        ...

    def is_incomplete(self, text: bytes) -> bool:
        """Whether the text's last character waits for more ids."""
        ...


class ByteCodec:
    """An id is a byte's value; 0, which no text holds, opens a document."""

    prefix = 0

    def encode(self, text: bytes, source: str, *, special: bool = True) -> list[int]:
        """See :class:`Codec`."""
        return [self.prefix, *text] if special else list(text)

    def decode(self, ids: Sequence[int]) -> bytes:
        """See :class:`Codec`."""
        return bytes(i for i in ids if i != self.prefix)

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

    @property
    def prefix(self) -> int | None:
        """See :class:`Codec`: the tokenizer's BOS, else its EOS."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return eos if bos is None else bos

    def encode(self, text: bytes, source: str, *, special: bool = True) -> list[int]:
        """See :class:`Codec`.

        Raises:
            ValueError: text that is not UTF-8.
        """
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{source} is not UTF-8 text: {error}") from None
        options = dict(add_special_tokens=special, verbose=False)
        return list(self.tokenizer(decoded, **options)["input_ids"])

    def decode(self, ids: Sequence[int]) -> bytes:
        """See :class:`Codec`."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True).encode()

    def is_incomplete(self, text: bytes) -> bool:
        """See :class:`Codec`."""
        return text.endswith("\N{REPLACEMENT CHARACTER}".encode())
