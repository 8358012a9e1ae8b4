"""``jla eval lm-eval``."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import datasets
import lm_eval.api.task
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table
from tqdm import tqdm

from jla.cli.checkpoint import look_at
from jla.eval.harness import HarnessLM

# Draws for the standard error of metrics that are no means. They take turns in this process,
# because forking one that runs JAX may hang; the harness' 100,000 would take hours.
BOOTSTRAP = 1000
PRINTED = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")


class Settings(NamedTuple):
    """What is evaluated, and how; see the command's help."""

    tasks: Sequence[str]
    include_path: Path | None
    limit: int | None
    num_fewshot: int | None
    batch_size: int
    max_length: int | None
    seed: int
    output: Path | None


class Tasks(TaskManager):
    """The harness' tasks and one's own; says of a broken one that it is."""

    def load(self, task_list: Any) -> Any:
        """Raises ValueError, whatever is wrong with a task's file or data."""
        try:
            return super().load(task_list)
        except Exception as error:
            cause = error.__cause__ or error
            raise ValueError(
                f"--tasks: {', '.join(map(str, task_list))} cannot be loaded: "
                f"{type(cause).__name__}: {cause}"
            ) from error


def run(folder: str, settings: Settings, dtype: str | None, as_bytes: bool, as_json: bool) -> None:
    """Prints the harness' table, or its numbers as JSON; writes all of it to ``output``."""
    checkpoint = look_at(folder)
    max_length = checkpoint.length(settings.max_length, "--max-length")
    codec = checkpoint.codec(as_bytes)
    output = settings.output
    if output is not None and not output.resolve().parent.is_dir():
        raise FileNotFoundError(f"--output: {output.resolve().parent} is no folder to write to")
    with quiet():
        names, manager = find(settings.tasks, settings.include_path)
        model = HarnessLM(
            # Several programs are compiled, and one layer compiles quicker than all of them.
            checkpoint.load(dtype, scan_layers=True),
            codec,
            batch_size=settings.batch_size,
            max_length=max_length,
            seed=settings.seed,
        )
        evaluate: Any = lm_eval.simple_evaluate  # decorated, which hides its signature
        results = evaluate(
            model,
            tasks=names,
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            bootstrap_iters=BOOTSTRAP,
            log_samples=output is not None,
            task_manager=manager,
        )
    if output is not None:
        output.write_text(encode(results), encoding="utf-8")
    facts = {name: results[name] for name in PRINTED if name in results}
    print(encode(facts) if as_json else make_table(results).rstrip())


def find(tasks: Sequence[str], folder: Path | None) -> tuple[list[str], Tasks]:
    """The names of all tasks that are meant, and what loads them.

    Args:
        tasks: names or patterns like ``arc_*``, several with commas between.
        folder: of further task files; the harness' own are only looked through, which takes some
            seconds, where a name is not among these.

    Raises:
        NotADirectoryError: no such folder.
        ValueError: a name that is no task.
    """
    if folder is not None and not folder.is_dir():
        raise NotADirectoryError(f"--include-path: {folder} is no folder")
    wanted = [name for part in tasks for name in part.split(",") if name]
    for defaults in (False, True):
        manager = Tasks(include_path=folder, include_defaults=defaults)
        found = {name: manager.match_tasks([name]) for name in wanted}
        if wanted and all(found.values()):
            return sorted(set().union(*found.values())), manager
    unknown = ", ".join(name for name in wanted if not found[name]) or "nothing"
    raise ValueError(
        f"--tasks: no task is called {unknown}; `lm-eval ls tasks` lists the harness' own, "
        "--include-path adds a folder of task files"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps the harness' lines out of stdout, and its bars to terminals."""
    terminal = functools.partial(tqdm, disable=None)
    with (
        contextlib.redirect_stdout(sys.stderr),
        mock.patch.object(lm_eval.api.task, "tqdm", terminal),
        mock.patch.dict(os.environ, DISABLE_MULTIPROC="1"),
    ):
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        yield


def encode(value: Any) -> str:
    """As JSON."""
    return json.dumps(value, indent=2, default=handle_non_serializable)
