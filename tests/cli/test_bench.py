"""``jla bench``, on shapes that a CPU can time."""

import json

import jax
import pytest

from cli.call import assert_one_line, call, output
from jla.bench import cases

FAST = ("bench", "--op", "hgrn", "--op", "conv", "--shape", "E1", "--tiny")


def test_facts():
    facts = json.loads(output(*FAST, "--dtype", "float32", "--impl", "reference", "--json"))
    assert facts["platform"] == jax.default_backend() and facts["device"]
    assert [row["case"] for row in facts["cases"]] == ["hgrn/E1", "conv/E1"]
    for row in facts["cases"]:
        assert row["shape"] == cases.shrink(cases.CASES[row["case"]].shape)
        assert (row["impl"], row["dtype"]) == ("reference", "float32")
        assert row["fwd_ms"] > 0 and row["fwd_bwd_ms"] > 0


def test_a_cpu_is_told_from_a_gpu(monkeypatch):
    monkeypatch.setattr("jla.cli.bench.times", lambda *args: (1.0, 2.5))
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr("jax.default_backend", lambda backend=backend: backend)
        printed = output(*FAST)
        assert ("This times a CPU" in printed) == (backend == "cpu")
        assert printed.splitlines()[-1].split()[2:6] == ["1.000", "ms", "2.500", "ms"]


def test_list():
    assert output("bench", "--op", "gdn", "--shape", "P", "--list").split()[:2] == ["gdn/P", "B1"]
    listed = json.loads(output("bench", "--list", "--json"))
    assert listed == {name: case.shape for name, case in cases.CASES.items()}


@pytest.mark.parametrize(
    "args, message",
    [
        (["--op", "gnd"], r"--op must be one of \[.*'gdn'.*\], got 'gnd'"),
        (
            ["--op", "hgrn", "--shape", "A"],
            r"--shape must be one of \['E1'\] for these",
        ),
        (["--op", "gdn", "--impl", "fast"], "must be 'auto' or one of .*, got 'fast'"),
        (["--op", "kda", "--impl", "mosaic"], "kda/A: .*impl.*mosaic"),
    ],
)
def test_bad_calls(args, message):
    assert_one_line(call("bench", *args), message)
