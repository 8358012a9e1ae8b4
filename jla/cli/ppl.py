"""``jla eval ppl``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jla.cli.checkpoint import Checkpoint, look_at
from jla.eval import read_document, summary, total_nats


def run(
    folder: str,
    files: Sequence[Path],
    window: int | None,
    stride: int | None,
    dtype: str | None,
    as_bytes: bool,
    as_json: bool,
) -> None:
    """Prints the measures of every file and of all together."""
    checkpoint = look_at(folder)
    window, stride = sizes(checkpoint, window, stride)
    coder = checkpoint.codec(as_bytes)
    documents = [read_document(file, coder) for file in files]
    nats = total_nats(checkpoint.load(dtype), documents, window, stride)
    facts = {
        "window": window,
        "stride": stride,
        "files": [
            {"file": each.file, **summary(loss, [each])}
            for each, loss in zip(documents, nats, strict=True)
        ],
        **summary(sum(nats), documents),
    }
    print(json.dumps(facts, indent=2) if as_json else text(facts))


def sizes(checkpoint: Checkpoint, window: int | None, stride: int | None) -> tuple[int, int]:
    """Window and stride with defaults: the config's length, and half a window.

    Raises:
        ValueError: a window beyond the model's limit, or a stride that would skip tokens.
    """
    window = checkpoint.length(window, "--window")
    stride = stride or max(1, window // 2)
    if stride > window:
        raise ValueError(f"--stride {stride} exceeds --window {window}: tokens would be skipped")
    return window, stride


def text(facts: dict[str, Any]) -> str:
    """A line per file, and one for all if there are several."""
    rows = [*facts["files"], *([{"file": "all", **facts}] if len(facts["files"]) > 1 else [])]
    return "\n".join(
        f"{row['file']}: perplexity {row['perplexity']:.4f}, "
        f"{row['bits_per_byte']:.4f} bits per byte, {row['tokens']:,} tokens"
        for row in rows
    )
