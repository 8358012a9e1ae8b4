"""The command ``jla``: what each command takes; what it does is in a module of its own.

Those modules load when a command runs, so that help needs no JAX.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from jla.cli.errors import one_line

app = typer.Typer(
    help="Checkpoints of linear-time language models: look at, run, convert and measure them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

measures = typer.Typer(
    help="Measure a checkpoint.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(measures, name="eval")

Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(help="Dtype of the parameters; the file's, tensor by tensor, if not given."),
]
Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Folder with config.json and safetensors, or repository id of the hub.",
    ),
]
Bytes = Annotated[
    bool,
    typer.Option("--bytes", help="Tokens are raw bytes, id 0 in front; no tokenizer is used."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command()
def info(
    checkpoint: Checkpoint,
    as_json: Json = False,
    debug: Debug = False,
):
    """Tell what a checkpoint holds, and what its state costs. No weights are loaded."""
    with one_line(debug):
        from jla.cli import info

        info.run(checkpoint, as_json)


@app.command()
def generate(
    folder: Checkpoint,
    prompt: Annotated[str | None, typer.Option(help="The text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from this much probability.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    dtype: Dtype = None,
    as_bytes: Bytes = False,
    as_json: Json = False,
    debug: Debug = False,
):
    """Continue a prompt and write the new text as it is made, until the model ends it.

    The likeliest tokens are taken, unless a temperature, top-k or top-p asks for drawing.
    """
    with one_line(debug):
        from jla.cli import generate

        given = generate.read_prompt(prompt, prompt_file)
        sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p, key=seed)
        generate.run(folder, given, max_new_tokens, sampling, dtype, as_bytes, as_json)


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Folder, or repository id of the hub.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="Folder to make; it must not hold anything.")
    ],
    to: Annotated[
        Literal["fla", "orbax"],
        typer.Option(help="safetensors as flash-linear-attention has them, or Orbax."),
    ] = "fla",
    dtype: Dtype = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            help="Bytes, or like 500MB or 5GB; larger checkpoints are cut.", show_default="50GB"
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Print shape and dtypes of every tensor.")
    ] = False,
    debug: Debug = False,
):
    """Write a checkpoint again, in flash-linear-attention's format or Orbax's; whole or not at all.

    The source may have either format: a folder "params" beside its config.json is an Orbax
    checkpoint. Parameters that are float32 by meaning, such as A_log, stay float32 at any dtype.
    """
    with one_line(debug):
        from jla.cli import convert

        convert.run(source, target, to, dtype, max_shard_size, report)


@measures.command()
def ppl(
    folder: Checkpoint,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="Text files, each a document.")
    ],
    window: Annotated[
        int | None, typer.Option(min=1, help="Tokens read at once.", show_default="the config's")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens from window to window.", show_default="half a window"),
    ] = None,
    dtype: Dtype = None,
    as_bytes: Bytes = False,
    as_json: Json = False,
    debug: Debug = False,
):
    """Perplexity and bits per byte of text files, in windows that slide over each.

    Every token but a document's first is predicted once, in the first window that has it.
    """
    with one_line(debug):
        from jla.cli import ppl

        ppl.run(folder, files, window, stride, dtype, as_bytes, as_json)


@measures.command("lm-eval")
def lm_eval(
    folder: Checkpoint,
    tasks: Annotated[list[str], typer.Option(help="Names or patterns, with commas or one by one.")],
    include_path: Annotated[
        Path | None, typer.Option(help="Folder with task files of your own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First documents of a task.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples in the prompt; the task's if not given.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 8,
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens read at once.", show_default="the config's"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws of tasks that sample.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="File for all results and every request, as JSON.")
    ] = None,
    dtype: Dtype = None,
    as_bytes: Bytes = False,
    as_json: Json = False,
    debug: Debug = False,
):
    """Run tasks of lm-evaluation-harness; needs the extra "eval".

    The batch size changes the numbers by rounding at most.
    """
    with one_line(debug):
        from jla.cli import harness

        chosen = harness.Settings(
            tasks, include_path, limit, num_fewshot, batch_size, max_length, seed, output
        )
        harness.run(folder, chosen, dtype, as_bytes, as_json)


@app.command()
def bench(
    op: Annotated[list[str] | None, typer.Option(help="Op, like gdn; all if not given.")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Name of a shape, like A; all of the ops' if not given."),
    ] = None,
    impl: Annotated[
        str, typer.Option(help="reference, chunk or mosaic; what the op takes itself if not given.")
    ] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Of q, k, v and their like.")
    ] = "bfloat16",
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Shrink the shapes, to try the command on a CPU.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="Print the cases and stop.")] = False,
    as_json: Json = False,
    debug: Debug = False,
):
    """Time ops at named shapes: forward, and forward and backward with all gradients.

    --op and --shape may be given several times.
    """
    with one_line(debug):
        from jla.cli import bench

        if listed:
            bench.show(op or (), shape or (), as_json)
        else:
            bench.run(op or (), shape or (), impl, dtype, tiny, as_json)


@app.command()
def version():
    """Print the versions of jla and of what it computes with."""
    from importlib.metadata import version

    import jla

    others = ", ".join(f"{name} {version(name)}" for name in ("jax", "flax", "transformers"))
    print(f"jla {jla.__version__} ({others})")
