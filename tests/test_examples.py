"""The examples and benchmarks run: their parts in small, and all of the demo in the slow tests."""

import json
import re
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close

import corpus
import grain_packing
import train_tiny
from benchmarks import compare, cpu, run
from flax_block import TinyGPT, gated_deltanet, softmax_attention
from jla.bench import cases
from jla.models import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def shipped():
    return AutoModelForCausalLM.from_pretrained(train_tiny.CHECKPOINT, dtype=jnp.float32)


def test_held_out_topics_are_not_quoted_by_the_training_text():
    width = 50

    def stretches(documents):
        texts = (" ".join(corpus.decode(each).split()) for each in documents)
        return {text[i : i + width] for text in texts for i in range(len(text) - width)}

    held_out = stretches(corpus.held_out_documents())
    shared = held_out & stretches(corpus.training_documents())
    assert len(shared) < 0.02 * len(held_out)


def test_packing_keeps_every_token_in_order():
    documents = [np.arange(1, n + 1, dtype=np.int32) for n in (3, 9, 1, 4)]
    ids, segment_ids = corpus.pack(documents, 5)
    assert ids.shape == segment_ids.shape == (4, 5)
    np.testing.assert_array_equal(ids[segment_ids > 0], np.concatenate(documents))
    assert segment_ids.tolist() == [
        [1, 1, 1, 2, 2],
        [1, 1, 1, 1, 1],
        [1, 1, 2, 3, 3],
        [1, 1, 0, 0, 0],
    ]


def test_grain_packs_every_document_whole():
    random = np.random.default_rng(0)
    documents = [
        random.integers(1, 256, size).astype(np.int32) for size in random.integers(1, 40, 50)
    ]
    found = []
    for batch in grain_packing.packed_batches(documents, 32, 4):
        assert batch["ids"].shape == batch["segment_ids"].shape
        for ids, segment_ids in zip(batch["ids"], batch["segment_ids"], strict=True):
            assert np.all(ids[segment_ids == 0] == 0)
            found += [tuple(ids[segment_ids == i]) for i in range(1, segment_ids.max() + 1)]
    pieces = [piece for each in documents for piece in (each[:32], each[32:]) if len(piece)]
    assert sorted(found) == sorted(map(tuple, pieces))


@pytest.mark.slow
def test_grain_packing_trains(capsys):
    grain_packing.main()
    losses = re.findall(r"([\d.]+) bits/byte", capsys.readouterr().out)
    assert len(losses) == grain_packing.STEPS and all(0 < float(loss) < 3 for loss in losses)


def test_shipped_checkpoint_is_small_and_predicts_held_out_text(shipped):
    assert sum(path.stat().st_size for path in train_tiny.CHECKPOINT.iterdir()) <= 2_000_000
    document = corpus.held_out_documents()[corpus.HELD_OUT.index("global")]
    unigram = corpus.unigram_bits_per_byte(corpus.training_documents(), [document])
    assert train_tiny.bits_per_byte(shipped, [document]) < 2.3 < unigram


def test_bits_per_byte_of_packed_documents_is_that_of_each_alone(shipped):
    documents = [
        corpus.encode(text) for text in ("for x in y:", "while True:", "import this, then")
    ]
    sizes = [len(each) - 2 for each in documents]
    alone = [train_tiny.bits_per_byte(shipped, [each]) for each in documents]
    together = train_tiny.bits_per_byte(shipped, documents)
    assert_close(together, np.average(alone, weights=sizes), dtype="float32")


def test_training_is_reproducible_and_lowers_the_loss(monkeypatch, tmp_path):
    monkeypatch.setattr(train_tiny, "LENGTH", 64)
    config = train_tiny.tiny_config()
    config.hidden_size, config.num_hidden_layers, config.intermediate_size = 32, 1, 48
    losses = []
    for _ in range(2):
        model = train_tiny.GatedDeltaNetForCausalLM(config, rngs=nnx.Rngs(0))
        optimizer = train_tiny.make_optimizer(model, 12, 4e-3)
        losses.append(train_tiny.train(model, optimizer, corpus.training_documents(), 12))
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    train_tiny.save(model, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.model.embeddings.embedding.dtype == jnp.bfloat16
    assert again.model.layers[0].attn.A_log.dtype == jnp.float32


@pytest.mark.parametrize("make", [softmax_attention, gated_deltanet])
def test_flax_model_runs_with_either_attention(make):
    model = TinyGPT(make, vocabulary=32, length=16, blocks=1, rngs=nnx.Rngs(0))
    logits = nnx.jit(model)(jnp.arange(32).reshape(2, 16))
    assert logits.shape == (2, 16, 32)
    assert bool(jnp.isfinite(logits).all())


@pytest.mark.parametrize("op", cases.OPS)
def test_benchmark_writes_its_line(op):
    case = next(case for case in cases.CASES.values() if case.op == op)
    record = json.loads(json.dumps(run.measure(case, "auto", "float32", tiny=True)))
    assert record["ok"], record
    assert {"id", "op", "tag", "p", "impl", "fwd", "fb", "floor_fwd", "floor_fb"} <= set(record)
    assert record["ran"] in run.summary(record)


def test_floors_are_those_of_the_recorded_peers():
    # From the tables that the peers were measured for.
    known = {"gdn/A": (0.031, 0.107), "gdn/S": (0.032, 0.088), "attn/GQA": (1.392, 4.871)}
    for name, expected in known.items():
        case = cases.CASES[name]
        assert_close(cases.floors(case.op, case.shape), expected, tol=0.02)


def test_unknown_benchmark_is_named():
    with pytest.raises(ValueError, match="gdn/Z"):
        cases.select("gdn/A,gdn/Z")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="__main__")
    assert "logits are equal" in capsys.readouterr().out


def test_the_table_of_a_comparison_holds_what_both_have_measured():
    times = dict(ok=True, fwd=1.0, fb=4.0, floor_fwd=0.5, floor_fb=2.0, temp_mib=3.0)
    times |= dict(fwd_device=0.8, fb_device=3.0)
    records = [
        dict(times, id="gdn/A", impl="ours"),
        dict(times, id="gdn/A", impl="peer", fwd=2.0, fb=6.0, temp_mib=5.0, fwd_device=1.6),
        dict(times, id="gdn/B", impl="ours"),
        dict(id="gdn/B", impl="peer", ok=False, error="refused"),
    ]
    *_, row = compare.table(records).splitlines()
    called = "0.500 / 2.000 | 1.000 / 4.000 | 2.000 / 6.000 | 2.00 / 1.50"
    device = "0.800 / 3.000 | 1.600 / 3.000 | 2.00 / 1.00"
    assert f"| gdn/A | {called} | {device} | 3, 5 |" == row
    assert compare.KINDS.keys() <= cases.OPS.keys()


@pytest.mark.parametrize("op", [op for op in cases.OPS if op not in cpu.NO_RECURRENCE])
def test_the_cpu_benchmark_has_a_shape_for_every_recurrence(op):
    p = cpu.shape(op, 8, T=32)
    inputs = cases.make_inputs(op, p, jnp.float32)
    for impl in cpu.IMPLS:
        forward, _ = cases.functions(op, p, impl)
        o = jax.eval_shape(forward, inputs)
        assert o.dtype == jnp.float32 and o.shape[:2] == (1, 32)
