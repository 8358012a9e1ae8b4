"""Where a case's time on the GPU goes, kernel by kernel, by the profiler.

    python -m benchmarks.kernels --ops gdn/A,Mamba2/B8 [--peer FOLDER]

Cases, layers and ``FOLDER`` are those of ``benchmarks.compare``. For the forward alone and for
forward and backward: every kernel of a call with how often it runs and its ms, and their sum.
"""

from __future__ import annotations

import argparse


def table(title: str, rows: dict[str, tuple[float, float]]) -> str:
    """For a person to read."""
    total = sum(ms for _, ms in rows.values())
    lines = [f"  {ms:8.4f} ms  {count:5.1f} x  {name[:100]}" for name, (count, ms) in rows.items()]
    return "\n".join([f"{title}  {total:.4f} ms", *lines])


def show(lib: str, name: str) -> None:
    """Prints both tables of a library's case."""
    from benchmarks.compare import programs
    from jla.bench.timing import kernels_ms

    _, forward, both = programs(lib, name)
    print(table(f"{name} {lib}, forward", kernels_ms(forward)))
    print(table(f"{name} {lib}, forward and backward", kernels_ms(both)), flush=True)


def main() -> None:
    from benchmarks.compare import names, start

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ops", required=True, help="comma-separated ops, layers and ids")
    parser.add_argument("--peer", help="folder of jax-linear-attention; ours alone if not given")
    options = parser.parse_args()
    for name in names(options.ops):
        for lib in ("ours", "peer") if options.peer else ("ours",):
            process = start(lib, f"kernels.show{(lib, name)!r}", options.peer)
            print(process.communicate()[0])
            if process.returncode:
                raise SystemExit(f"{name} {lib} failed")


if __name__ == "__main__":
    main()
