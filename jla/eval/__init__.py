"""Measures of language models: perplexity of text, and lm-evaluation-harness.

The harness' model class is in :mod:`jla.eval.harness`, which needs the extra ``eval``.
"""

from jla.eval.perplexity import Document, read_document, summary, total_nats
from jla.eval.tokens import ByteCodec, Codec, TokenizerCodec

__all__ = [
    "ByteCodec",
    "Codec",
    "Document",
    "TokenizerCodec",
    "read_document",
    "summary",
    "total_nats",
]
