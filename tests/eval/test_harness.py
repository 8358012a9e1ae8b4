"""lm-evaluation-harness on the shipped checkpoint and the task files in ``examples/tasks``.

Nothing is downloaded: the data lie beside the tasks.
"""

import json
import math
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from cli.call import ROOT, SHIPPED, assert_one_line, call, copy_with_tokenizer, output
from flax import nnx
from helpers import assert_close, count_compiles
from lm_eval.api.instance import Instance

from jla.cli.harness import Tasks
from jla.eval import ByteCodec, TokenizerCodec
from jla.eval.harness import HarnessLM, rounded
from jla.models import AutoModelForCausalLM, GatedDeltaNetConfig

DOCUMENTS = [
    json.loads(line) for line in (ROOT / "examples/tasks/statements.jsonl").read_text().splitlines()
]
BATCH_SIZES = (1, 3, 8)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Data files are found from the checkout; what `datasets` makes of them is forgotten."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=jnp.float32, scan_layers=True)


@pytest.fixture(scope="module")
def read():
    """Log-likelihoods ``[T, V]`` behind each id of a row, computed directly."""
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=jnp.float32)
    compiled = nnx.jit(lambda model, ids: nnx.log_softmax(model(ids).logits[0]))

    def read(ids: list[int]):
        padded = np.zeros((1, 128), np.int32)  # one shape; what lies behind is not seen
        padded[0, : len(ids)] = ids
        return np.asarray(compiled(model, padded), np.float64)[: len(ids)]

    return read


@pytest.fixture(scope="module")
def score(read):
    """Log-likelihoods of the last ids of a row, and whether each is the likeliest."""

    def score(ids: list[int], predicted: int):
        logits, targets = read(ids[:-1])[-predicted:], np.array(ids[-predicted:])
        return logits[np.arange(predicted), targets], logits.argmax(-1) == targets

    return score


@pytest.fixture(scope="module")
def continued(read):
    """What greedy decoding makes of a row, up to the id that ends a document."""

    def continued(ids: list[int], count: int) -> str:
        made: list[int] = []
        while len(made) < count and (token := int(read([*ids, *made])[-1].argmax())):
            made.append(token)
        return bytes(made).decode(errors="replace")

    return continued


@pytest.fixture(scope="module")
def likely(score):
    """Of each byte of a text after another."""
    return lambda context, text: score([0, *context.encode(), *text.encode()], len(text.encode()))


def requests(kind, *arguments):
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def evaluate(*args):
    options = ["--bytes", "--dtype", "float32", "--include-path", "examples/tasks", "--json"]
    return json.loads(output("eval", "lm-eval", SHIPPED, *options, *args))["results"]


def test_the_command_gives_what_a_direct_computation_gives(likely, continued):
    """Of tasks of all three kinds, at every batch size."""
    right = normed = nats = size = words = whole = 0
    for document in DOCUMENTS:
        start, choices = document["start"], document["choices"]
        sums = [likely(start, choice)[0].sum() for choice in choices]
        right += np.argmax(sums) == document["answer"]
        normed += np.argmax(np.divide(sums, [*map(len, choices)])) == document["answer"]
        text = start + choices[document["answer"]]
        nats, size = nats - likely("", text)[0].sum(), size + len(text)
        words += len(re.split(r"\s+", text))
        whole += re.split("[ \n]", continued([0, *start[:-3].encode()], 8))[0] == start[-3:]
    count = len(DOCUMENTS)
    assert 0 < right < count and 0 < whole < count, "a task that cannot fail tells nothing"
    for batch_size in BATCH_SIZES:
        found = evaluate("--tasks", "statements_*", "--batch-size", batch_size)
        assert found["statements_choose"]["acc,none"] == right / count
        assert found["statements_choose"]["acc_norm,none"] == normed / count
        assert found["statements_complete"]["exact_match,none"] == whole / count
        perplexity = found["statements_perplexity"]
        bits = nats / math.log(2) / size
        assert_close(perplexity["bits_per_byte,none"], bits, dtype="float32")
        assert_close(math.log(perplexity["byte_perplexity,none"]), nats / size, dtype="float32")
        assert_close(math.log(perplexity["word_perplexity,none"]), nats / words, dtype="float32")


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_loglikelihoods_of_ragged_rows(model, likely, batch_size):
    pairs = [(d["start"], choice) for d in DOCUMENTS for choice in d["choices"]]
    pairs += [("", "raise"), ("a" * 50, "b" * 50), ("x", "é→"), ("The import stat", "ement")]
    lm = HarnessLM(model, ByteCodec(), batch_size=batch_size)
    found = lm.loglikelihood(requests("loglikelihood", *pairs, ("raise ", "Exception")))
    # The space in front of a word belongs to it: that is the harness' rule.
    expected = [likely(*pair) for pair in (*pairs, ("raise", " Exception"))]
    assert_close([each for each, _ in found], [each.sum() for each, _ in expected], dtype="float32")
    assert [greedy for _, greedy in found] == [bool(greedy.all()) for _, greedy in expected]
    assert len({greedy for _, greedy in found}) == 2


def test_long_documents_are_read_in_windows(model, likely, score):
    text = "".join(document["start"] for document in DOCUMENTS)
    lm = HarnessLM(model, ByteCodec(), batch_size=3, max_length=100)
    found = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (text,), ("ab",), ("",)))
    # A window after the first has 100 inputs too, and predicts what is left, at most 100 tokens.
    expected, done = likely("", text[:100])[0].sum(), 100
    while done < len(text):
        end = min(done + 100, len(text))
        expected += score([*text[end - 101 : end].encode()], end - done)[0].sum()
        done = end
    assert_close(found, [expected, likely("", "ab")[0].sum(), 0], dtype="float32")


@pytest.mark.parametrize("until", ["e", ["en", "the"], []], ids=["one token", "several", "none"])
def test_generation_stops_at_each_stop_string(model, continued, until):
    prompts = [document["start"] for document in DOCUMENTS[:4]]
    asked = [(prompt, dict(until=until, max_gen_toks=12)) for prompt in prompts]
    lm = HarnessLM(model, ByteCodec(), batch_size=3)
    found = lm.generate_until(requests("generate_until", *asked))
    for prompt, text in zip(prompts, found, strict=True):
        whole = continued([0, *prompt.encode()], 12)
        ends = [whole.find(stop) for stop in until if stop in whole]
        assert text == whole[: min(ends, default=None)]


def test_what_is_drawn_does_not_depend_on_the_batch(model):
    settings = dict(until=[], max_gen_toks=8, do_sample=True, temperature=2.0, top_k=20)
    asked = requests("generate_until", *3 * [("The import statement", settings)])
    found = [
        HarnessLM(model, ByteCodec(), batch_size=size, seed=seed).generate_until(asked)
        for size, seed in [(1, 0), (2, 0), (2, 1)]
    ]
    assert found[0] == found[1] != found[2]
    assert len({*found[0]}) == 3, "repeats draw anew"


def test_few_programs_are_compiled(model):
    lm = HarnessLM(model, ByteCodec(), batch_size=4)
    ask = lambda *lengths: lm.loglikelihood(  # noqa: E731
        requests("loglikelihood", *(("x" * length, "y" * 5) for length in lengths))
    )
    ask(20, 30, 40, 50)
    with count_compiles() as compiled:
        ask(11, 22, 33, 44, 55, 59, 18)
    assert not compiled
    assert len({rounded(length) for length in range(1, 4097)}) == 8 + 3 * 4
    assert all(
        length <= rounded(length) < length + max(64, length / 4) for length in range(1, 9999)
    )


def test_through_a_tokenizer(model, score, tmp_path):
    """Without BOS a text starts behind the EOS, and a context is the text alone."""
    codec = TokenizerCodec(copy_with_tokenizer(tmp_path / "with", eos_token="Ā"))
    ids = lambda text: codec.encode(text.encode(), "")  # noqa: E731
    assert codec.prefix == codec.tokenizer.convert_tokens_to_ids("Ā")
    lm = HarnessLM(model, codec)
    found = lm.loglikelihood(requests("loglikelihood", ("for é", "in"), ("", "in")))
    expected = [
        score([*ids("for é"), *ids("in")], 2)[0].sum(),
        score([codec.prefix, *ids("in")], 2)[0].sum(),
    ]
    assert_close([each for each, _ in found], expected, dtype="float32")


def test_a_context_that_is_too_long_loses_its_beginning(model, score, continued, caplog):
    lm = HarnessLM(model, ByteCodec(), max_length=20)
    (found,) = lm.loglikelihood(requests("loglikelihood", ("abc" * 9, "de")))
    assert "a context of 30 tokens was cut to its last 21" in caplog.text
    assert_close(found[0], score([*b"abc" * 9, *b"de"][-21:], 2)[0].sum(), dtype="float32")
    # As many new tokens as are asked for, behind as much of the prompt as there is room for.
    (text,) = lm.generate_until(
        requests("generate_until", ("abc" * 9, dict(until=[], max_gen_toks=8)))
    )
    assert text == continued([*b"abc" * 9][-12:], 8)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(num_beams=4), r"generation_kwargs \['num_beams'\] are not supported"),
        (dict(max_gen_toks=20), "max_gen_toks=20 must be above 0 and leave room for a prompt"),
        (dict(max_gen_toks=0), "max_gen_toks=0 must be above 0"),
    ],
)
def test_requests_that_cannot_be_met(model, kwargs, message):
    lm = HarnessLM(model, ByteCodec(), max_length=20)
    with pytest.raises(ValueError, match=message):
        lm.generate_until(requests("generate_until", ("a", dict(until=[]) | kwargs)))


def test_a_continuation_that_is_too_long(model):
    lm = HarnessLM(model, ByteCodec(), max_length=20)
    with pytest.raises(ValueError, match="a continuation of 21 tokens exceeds max_length=20"):
        lm.loglikelihood(requests("loglikelihood", ("a", "b" * 21)))
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        HarnessLM(model, ByteCodec(), batch_size=0)


def test_numbers_that_are_not_finite_are_an_error():
    config = GatedDeltaNetConfig(hidden_size=8, num_hidden_layers=1, num_heads=1, vocab_size=256)
    model = AutoModelForCausalLM.from_config(config, rngs=nnx.Rngs(0))
    model.model.norm.scale[...] = jnp.nan
    with pytest.raises(ValueError, match="log-likelihoods are not finite"):
        HarnessLM(model, ByteCodec()).loglikelihood(requests("loglikelihood", ("a", "b")))


def test_the_output_file_holds_every_request(tmp_path):
    file = tmp_path / "all.json"
    found = evaluate("--tasks", "statements_choose", "--limit", 2, "--output", file)
    whole = json.loads(file.read_text())
    assert whole["results"] == found
    assert [each["doc"] for each in whole["samples"]["statements_choose"]] == DOCUMENTS[:2]


def test_bad_calls(tmp_path, monkeypatch):
    def fail(*args, message):
        assert_one_line(call("eval", "lm-eval", SHIPPED, *args), message)

    # The harness' own tasks take long to look through, and change nothing here.
    monkeypatch.setattr("jla.cli.harness.Tasks", without_defaults)
    known = ["--tasks", "statements_choose", "--include-path", "examples/tasks"]
    fail(*known, message="has no tokenizer")
    fail("--bytes", "--tasks", "nope,statements_*", message="no task is called nope, statements_")
    fail("--bytes", "--tasks", "", message="no task is called nothing")
    fail("--bytes", *known[:2], "--include-path", "no", message="--include-path: no is no folder")
    fail("--bytes", *known, "--output", tmp_path / "no" / "file", message="no is no folder to")
    monkeypatch.chdir(tmp_path)
    known[-1] = ROOT / "examples" / "tasks"
    fail("--bytes", *known, message="statements_choose cannot be loaded: .*Unable to find")
    copy_with_tokenizer(tmp_path / "copy")
    done = call("eval", "lm-eval", tmp_path / "copy", *known)
    assert_one_line(done, "the tokenizer has neither BOS nor EOS")


def without_defaults(include_path, include_defaults):
    return Tasks(include_path=include_path, include_defaults=False)


TASK = """
task: broken
dataset_path: json
dataset_kwargs: {data_files: {test: data.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{start}}"
doc_to_choice: [a, b]
doc_to_target: 0
"""


@pytest.mark.parametrize(
    "task, data, message",
    [
        (TASK, b'{"begin": "x"}', "UndefinedError: 'start' is undefined"),
        (TASK, b'{"start": ', "JSON parse error"),
        (TASK, b"", "StopIteration"),
        (TASK, '{"start": "naïve"}'.encode("latin-1"), "can't decode byte 0xef"),
        (TASK.replace("test_split: test", "test_split: tset"), b'{"start": "x"}', "'tset'"),
        (TASK.replace("multiple_choice", "choice"), b'{"start": "x"}', "Got invalid output_type"),
        (TASK.replace("path: json", "path: some/thing"), b"", "on the Hub"),
    ],
    ids=["field", "json", "empty", "utf-8", "split", "type", "offline"],
)
def test_broken_tasks(tmp_path, monkeypatch, task, data, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text(task)
    (tmp_path / "data.jsonl").write_bytes(data)
    args = ["--bytes", "--tasks", "broken", "--include-path", tmp_path, "--debug"]
    done = call("eval", "lm-eval", SHIPPED, *args)
    assert isinstance(done.exception, ValueError)
    assert re.search(f"--tasks: broken cannot be loaded: .*{message}", str(done.exception))
    assert call("eval", "lm-eval", SHIPPED, *args[:-1]).exit_code == 2


def test_without_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "jla.cli.harness", raising=False)
    monkeypatch.delattr("jla.cli.harness", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    done = call("eval", "lm-eval", SHIPPED, "--bytes", "--tasks", "any")
    assert_one_line(done, r"needs the extra 'eval': pip install 'jla-nnx\[eval\]'")
