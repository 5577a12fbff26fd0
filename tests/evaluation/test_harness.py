"""Compare the adapter with the harness's own model for transformers: equal numbers for equal requests."""

import json
import subprocess
import sys
from importlib import import_module, util

import pytest
import transformers

from clearhead.api import Model
from clearhead.checkpoint.huggingface import save_folder
from clearhead.errors import ClearheadError
from clearhead.tokenization.characters import byte_tokenizer
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import toy, translator

PAIRS = [
    ("The sea is", " wide"),
    ("The sea is", " deep and cold"),
    ("The sea is ", "blue"),
    ("", "A beginning"),
    ("word " * 30, "that is too long a context"),
]
TEXTS = ["A short one.", "A longer one, " * 12]


def test_importing_without_lm_eval_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "clearhead.evaluation.harness", raising=False)
    with pytest.raises(ClearheadError, match="pip install lm_eval"):
        import_module("clearhead.evaluation.harness")


@pytest.fixture(scope="module")
def model():
    tokenizer = byte_tokenizer()
    return Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer)


@pytest.fixture(scope="module")
def both(model, tmp_path_factory):
    """Return our model and the harness's."""
    if util.find_spec("lm_eval") is None:
        pytest.skip("lm_eval is not installed")
    from lm_eval.models.huggingface import HFLM

    from clearhead.evaluation.harness import ClearheadLM

    folder = tmp_path_factory.mktemp("harness") / "tiny"
    save_folder(model.network, folder)
    model.tokenizer.save(folder)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return ClearheadLM(model), HFLM(pretrained=network, tokenizer=tokenizer, batch_size=2, device="cpu")


def instances(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=number) for number, one in enumerate(arguments)]


def test_loglikelihood_equals_that_of_the_harness(both):
    ours, expected = (one.loglikelihood(instances("loglikelihood", *PAIRS)) for one in both)
    assert [one[0] for one in ours] == pytest.approx([one[0] for one in expected], rel=1e-4)
    assert [one[1] for one in ours] == [one[1] for one in expected]


def test_loglikelihood_rolling_equals_that_of_the_harness(both):
    arguments = [(text,) for text in TEXTS]
    ours, expected = (one.loglikelihood_rolling(instances("loglikelihood_rolling", *arguments)) for one in both)
    assert ours == pytest.approx(expected, rel=1e-4)


def test_a_deterministic_adapter_gives_the_bits_of_the_engine(both):
    engine = type(both[0])(both[0].model, deterministic=True)
    pairs = instances("loglikelihood", *PAIRS[:4])
    found = engine.loglikelihood(pairs)
    assert [one[0] for one in found] == pytest.approx([one[0] for one in both[0].loglikelihood(pairs)], rel=1e-4)
    assert [engine.loglikelihood([each])[0] for each in pairs] == found
    long = instances("loglikelihood", PAIRS[4]) + instances("loglikelihood_rolling", (TEXTS[1],))
    assert engine.loglikelihood(long[:1])[0][0] < 0  # as long as the context
    assert engine.loglikelihood_rolling(long[1:])[0] < 0


def test_generate_until_equals_that_of_the_harness(both):
    greedy = {"do_sample": False, "max_gen_toks": 12}
    first = both[0].model.generate("The sea is", max_new_tokens=12).text
    arguments = [("The sea is", {**greedy, "until": [first[4:6]]}), ("A cat", {**greedy, "until": ["\n\n"]})]
    ours, expected = (one.generate_until(instances("generate_until", *arguments)) for one in both)
    assert ours == expected
    assert ours[0] == first[: first.index(first[4:6])]


def test_a_whole_task_gives_equal_metrics(both, tmp_path):
    """The harness itself runs the task and normalizes the scores."""
    import lm_eval
    from lm_eval.api.task import ConfigurableTask

    rows = [{"q": f"Number {number} is", "choices": ["odd", "even or so"], "label": number % 2} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path)}
    config = {
        "task": "parity",
        "dataset_path": "json",
        "dataset_kwargs": files,
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        "metadata": {"version": 0},
    }
    metrics = []
    for one in both:
        results = lm_eval.evaluate(one, {"parity": ConfigurableTask(config=config)}, bootstrap_iters=0)
        metrics.append([results["results"]["parity"][name] for name in ("acc,none", "acc_norm,none")])
    assert metrics[0] == metrics[1]


def test_unsupported_options_raise(both):
    arguments = instances("generate_until", ("a", {"num_beams": 4}), ("b", {"max_gen_toks": 64}))
    with pytest.raises(ClearheadError, match="num_beams, which Clearhead does not support"):
        both[0].generate_until(arguments[:1])
    with pytest.raises(ClearheadError, match="requests 64 new tokens, but the context of this model is 64"):
        both[0].generate_until(arguments[1:])


def test_an_encoder_decoder_raises(both):
    with pytest.raises(ClearheadError, match="needs a decoder-only model"):
        type(both[0])(Model(toy(translator())))


@pytest.fixture
def task_folder(tmp_path):
    """Return a folder with a task for --include_path."""
    rows = [{"q": f"Number {number} is", "choices": ["odd", "even or so"], "label": number % 2} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": "odd_or_even", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path)}}
    task |= {"doc_to_text": "{{q}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}"}
    (tmp_path / "odd_or_even.yaml").write_text(json.dumps(task))  # JSON is YAML
    return tmp_path


def test_the_harness_finds_the_adapter_by_name(both, model, task_folder):
    import lm_eval
    from lm_eval.tasks import TaskManager

    model.save(task_folder / "model")
    found = lm_eval.simple_evaluate(
        model="clearhead",
        model_args=f"model={task_folder / 'model'},dtype=float64",
        tasks=["odd_or_even"],
        task_manager=TaskManager(include_path=str(task_folder), include_defaults=False),
        batch_size=3,
        bootstrap_iters=0,
    )
    assert 0 <= found["results"]["odd_or_even"]["acc,none"] <= 1
    with pytest.raises(ClearheadError, match="apply only to a model given by name"):
        type(both[0])(model, dtype="float64")


@pytest.mark.slow
def test_the_command_of_the_harness_finds_the_adapter_by_name(both, model, task_folder):
    model.save(task_folder / "model")
    command = [sys.executable, "-m", "clearhead.evaluation.harness", "--model", "clearhead"]
    command += [
        "--model_args",
        f"model={task_folder / 'model'}",
        "--tasks",
        "odd_or_even",
        "--include_path",
        task_folder,
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "odd_or_even" in done.stdout
