"""The report: numbers that are known from elsewhere, the command line, and errors of one sentence."""

import json
import math
import pydoc
import re
from io import StringIO

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import clearhead
from clearhead.cli.app import app
from clearhead.costs.calibration.devices import DEVICES
from clearhead.costs.estimate import cost
from clearhead.costs.report import print_report, report_to_dict
from clearhead.costs.tables import legend
from clearhead.costs.units import format_amount, format_seconds
from clearhead.errors import ClearheadError
from clearhead.families import preset
from tests.costs.cases import CASES
from tests.forked_command import run_forked as run_command

# --- known numbers


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("llama-3.1-8b", "--phase", "decode", "--context", 128), ("8,030,261,248 parameters", "131,072 bytes")),
        (("deepseek-v3", "--phase", "decode", "--context", 2), ("70,272 bytes per token", " peak: weights ")),
        (("gpt3-175b", "--device", "h100"), ("no: h100 has 80 GB; no batch or context does; use more GPUs with tp",)),
        (
            ("llama-3.1-8b", "--context", 10**7, "--device", "h100"),
            ("(beyond the model's own context of 131,072)", "no: h100 has 80 GB; at most context "),
        ),
        (
            ("gpt2", "--training-tokens", "1e9", "--context", 64),
            ("PaLM: 6·P + 12·L·N·H·T", "1,000,000,000 tokens: 746.6 PFLOP"),
        ),
    ],
)
def test_the_command_prints_known_numbers(arguments, expected):
    done = run_command("cost", *arguments)
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in expected)
    assert "…" not in done.stdout


def test_training_gpt3_took_314_zettaflop():
    """Brown et al. 2020, table D.1: 3.14e23 for 300 billion tokens."""
    data = json.loads(run_command("cost", "gpt3-175b", "--training-tokens", "300e9", "--context", 8, "--json").stdout)
    assert data["training_flops"] == pytest.approx(314e21, rel=2e-3)


def test_json_contains_the_whole_report():
    options = ("--phase", "decode", "--context", 64, "--device", "h200", "--weights", "q4_0", "--json")
    data = json.loads(run_command("cost", "gpt2", *options).stdout)
    assert data["total_parameters"] == 124_439_808
    assert data["flops"] == sum(operation["flops"] for operation in data["operations"])
    assert data["workload"]["config"]["width"] == 768
    assert data["bound"]["limited_by"] == ["memory"] * len(data["operations"])
    assert data["bound"]["predicted_seconds"] is None


def test_decoding_llama_on_an_h200_is_memory_bound():
    """15.01 GB of weights and 131,072 bytes per token at 4.8 TB/s: 3.13 ms at a short context (book F5)."""
    report = cost(preset("llama-3.1-8b"), phase="decode", context=128, device="h200")
    assert report.bound is not None
    assert report.bound.seconds == pytest.approx(3.13e-3, rel=5e-3)
    assert set(report.bound.limited_by) == {"memory"}
    assert report.bound.largest_batch > 5000
    assert report.intensity == pytest.approx(1.0, rel=0.01)


def test_prefill_on_an_h200_is_compute_bound():
    report = cost(preset("gpt2"), phase="prefill", batch=64, context=1024, device="h200")
    assert report.bound is not None
    names = [operation.name for operation in report.operations]
    limited_by = dict(zip(names, report.bound.limited_by, strict=True))
    assert limited_by["feed-forward"] == "compute"
    assert limited_by["head"] == "memory"  # only the last tokens of 64 sequences


def test_published_peaks_name_their_source():
    assert all(device.source and device.peak("bfloat16") > device.peak("float32") for device in DEVICES)


def test_repr_shows_the_main_numbers():
    report = cost(preset("gpt2"), phase="decode", context=64)
    expected = (
        "Report(decode, batch 1, context 64, bfloat16: 124,439,808 parameters, "
        "249.4 MFLOP, 249.9 MB moved, peak memory 252 MB"
    )
    assert repr(report) == f"{expected})"
    on_device = cost(preset("gpt2"), phase="decode", context=64, device="h200")
    assert repr(on_device).startswith(f"{expected}, at least ")
    assert repr(on_device).endswith("s on h200)")


def test_a_notebook_shows_the_tables():
    html = cost(preset("gpt2"), phase="decode", context=64)._repr_html_()
    assert html.startswith("<pre")
    assert "124,439,808 parameters" in html


# --- several GPUs


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "tp"])
def test_gpus_divide_the_flops(parallel):
    alone = cost(CASES["gpt2"], phase="train", batch=4, context=16)
    divided = cost(CASES["gpt2"], phase="train", batch=4, context=16, gpus=4, parallel=parallel)
    replicated = alone.operations[-1].flops if parallel == "tp" else 0  # the head
    assert (divided.flops - replicated) * 4 == pytest.approx(alone.flops - replicated, rel=1e-3)
    assert divided.communication is not None
    assert divided.communication.bytes_each_way > 0
    assert alone.communication is None


def test_gpus_send_only_what_they_compute():
    """A prefill of an encoder-decoder runs the encoder only; ddp sends nothing at inference."""
    config = CASES["bart-base"]
    prefill = cost(config, phase="prefill", context=16, source=8, gpus=2, parallel="tp").communication
    assert prefill is not None
    sums = 2 * len(config.encoder.layers) * 8 * config.width * 2  # attention and feed-forward, in two bytes
    assert prefill.bytes_each_way == 2 * sums // 2
    assert cost(CASES["gpt2"], phase="prefill", batch=2, context=16, gpus=2).communication is None
    stored, recomputed = (
        cost(CASES["gpt2"], phase="train", context=16, gpus=2, parallel="tp", recompute=recompute).communication
        for recompute in (False, True)
    )
    assert recomputed.bytes_each_way * 2 == stored.bytes_each_way * 3


def test_a_ring_of_gpus_sends_all_but_one_part():
    """Ddp sums 2 bytes per gradient: each of 4 GPUs sends 2 · 3/4 of them, at 450 GB/s."""
    report = cost(CASES["gpt2"], phase="train", batch=4, context=16, gpus=4, device="h200")
    assert report.communication is not None
    assert report.bound is not None
    assert report.communication.bytes_each_way == round(2 * 0.75 * 2 * report.total_parameters)
    assert report.bound.communication_seconds == report.communication.bytes_each_way / 450e9
    assert report.bound.seconds >= report.bound.communication_seconds


# --- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "h2000"}, "unknown device 'h2000'; did you mean 'h200'"),
        ({"phase": "trian"}, "unknown phase 'trian'; did you mean 'train'"),
        ({"weights": "q4_2"}, "unknown weights 'q4_2'; did you mean 'q4_"),
        ({"dtype": "bf16"}, "unknown dtype 'bf16'"),
        ({"context": 2000}, "context 2000 exceeds the 1024 learned positions of this model; use 1024 or fewer"),
        ({"dtype": torch.float16}, "unknown dtype 'torch.float16'; did you mean 'float16'"),
        ({"batch": 10**16}, "10,000,000,000,000,000 sequences of 1,024 tokens need a tensor that is too large"),
        ({"batch": 0}, "batch is 0; it must be 1 or more"),
        ({"context": 0}, "context is 0; it must be 1 or more"),
        ({"gpus": 2}, "ddp cannot divide a batch of 1 sequences among 2 GPUs; use a batch that is a multiple"),
        ({"gpus": 5, "parallel": "tp"}, "tensor parallelism cannot divide 12 heads among 5 GPUs"),
        ({"gpus": 24, "parallel": "tp"}, "tensor parallelism cannot divide 12 heads among 24 GPUs"),
        ({"phase": "train", "weights": "int8"}, "weights 'int8' are for inference; leave them out"),
        ({"phase": "decode", "recompute": True}, "recompute has no effect in phase 'decode'; leave it out"),
        ({"source": 9}, "source applies only to an encoder-decoder; leave it out"),
        ({"training_tokens": 0}, "training_tokens is 0; it must be from 1 to 1e\\+30"),
        ({"training_tokens": math.nan}, "training_tokens is nan"),
        ({"training_tokens": math.inf}, "training_tokens is inf"),
        (
            {"phase": "decode", "training_tokens": 9},
            "training_tokens applies only to phase 'train'; leave it out for phase 'decode'",
        ),
    ],
)
def test_an_invalid_argument_raises_an_error_of_one_sentence(options, message):
    with pytest.raises(ClearheadError, match=message.replace("(", r"\(")):
        cost(preset("gpt2"), **options)


def test_a_name_instead_of_a_config_raises_an_error():
    with pytest.raises(ClearheadError, match=r"config is 'gpt2'; it must be a ModelConfig: clearhead\.preset"):
        cost("gpt2")


def test_decoding_with_an_encoder_raises_an_error():
    with pytest.raises(ClearheadError, match="phase 'decode' needs a decoder; for this encoder use phase 'prefill'"):
        cost(preset("bert-base"), phase="decode")


@pytest.mark.parametrize("device", ["h200", "cuda"])
def test_measuring_another_machine_raises_an_error(device, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(app, ["cost", "gpt2", "--context", "8", "--measure", "--device", device])
    assert str(done.exception) == f"a measurement runs on this machine; use --device cpu instead of {device}"


# --- the answer


def printed(report, width=100):
    console = Console(file=StringIO(), width=width, highlight=False)
    print_report(report, "a model", console)
    return console.file.getvalue()


def test_the_answer_comes_before_formulas_and_tables():
    text = printed(cost(preset("llama-3.1-8b"), phase="decode", context=8192, device="h200"))
    beginning = text[: text.index("FLOPs of one layer")]
    for words in ("at least 3.352 ms on h200", "at most 298.3 tokens/s", "17.14 GB peak", "yes: h200 has 141 GB"):
        assert words in beginning
    assert "compute-bound above 206 FLOPs/byte" in " ".join(text[len(beginning) :].split())


def test_the_answer_says_how_to_get_a_time():
    assert "time      unknown without a device: h200" in printed(cost(preset("gpt2"), context=8))


def test_contexts_beyond_the_models_own_are_marked():
    config = preset("smollm2-135m")
    assert "beyond" not in printed(cost(config, context=config.context))
    text = printed(cost(config, context=config.context + 1, phase="decode", device="h100"), width=400)
    assert f"context {config.context + 1:,} (beyond the model's own context of {config.context:,})" in text
    assert re.search(rf"or context [\d,]+ \(beyond the model's own context of {config.context:,}\) at this batch", text)


def test_the_data_says_whether_the_workload_fits():
    small = report_to_dict(cost(preset("gpt2"), context=8, device="h200"))
    large = report_to_dict(cost(preset("gpt3-175b"), context=8, device="h200"))
    assert (small["fits"], large["fits"]) == (True, False)
    assert small["bound"]["memory_bytes"] == 141e9
    assert small["model_context"] == 1024
    assert report_to_dict(cost(preset("gpt2"), context=8))["fits"] is None


def test_a_workload_that_does_not_fit_has_no_time_and_no_speed():
    report = cost(preset("gpt3-175b"), phase="train", training_tokens=300e9, context=8, device="h200")
    text = " ".join(printed(report, width=400).split())
    needed = format_amount(report.memory.peak, "B")
    assert f"time none, since it does not fit: it needs {needed}, and h200 has 141 GB" in text
    assert "tokens/s" not in text
    assert "at this speed" not in text
    assert repr(report).endswith("does not fit h200)")
    assert report_to_dict(report)["bound"]["tokens_per_second"] is None


def test_a_training_run_has_a_time():
    report = cost(preset("gpt2"), training_tokens=300e9, context=1024, batch=32, device="h100")
    days = 300e9 / report.bound.tokens_per_second / 86_400
    assert f"at least {days:.4g} days at this speed" in printed(report)


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.1e-3, "3.1 ms"), (90, "90 s"), (150, "2.5 minutes"), (10**9, "31.69 years")]
)
def test_long_durations_are_not_printed_in_seconds(seconds, text):
    assert format_seconds(seconds) == text


# --- interface


def test_cost_and_summarize_take_the_name_of_a_model(tmp_path):
    assert clearhead.cost("gpt2", context=8) == clearhead.cost(preset("gpt2"), context=8)
    assert clearhead.summarize("gpt2") == clearhead.summarize(preset("gpt2"))
    clearhead.create(CASES["gpt2"]).save(tmp_path / "model")
    assert clearhead.cost(str(tmp_path / "model"), context=8) == clearhead.cost(CASES["gpt2"], context=8)
    with pytest.raises(ClearheadError, match="gpt22"):
        clearhead.cost("gpt22")


def test_help_shows_the_arguments_of_cost():
    text = pydoc.plain(pydoc.render_doc(clearhead.cost))
    assert "config: clearhead.architecture.config.ModelConfig | str" in text
    assert all(f"{name}: " in text for name in ("phase", "weights", "parallel"))


def test_clearhead_cost_is_callable_after_its_package_is_imported():
    import clearhead.costs.estimate

    assert clearhead.cost(CASES["gpt2"], context=8).total_parameters > 0


def test_the_docstring_of_cost_documents_every_argument():
    documented = re.findall(r"^ *(\w+): ", clearhead.cost.__doc__, re.MULTILINE)
    arguments = cost.__code__.co_varnames[: cost.__code__.co_argcount + cost.__code__.co_kwonlyargcount]
    assert documented == list(arguments)


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_legend_explains_every_symbol(name):
    operations = cost(CASES[name], context=16).operations
    formulas = " ".join(f"{operation.formula} {operation.traffic}" for operation in operations)
    assert set(re.findall("[A-Za-z]+", formulas)) == {entry.split()[0] for entry in legend(operations).split(", ")}


@pytest.mark.parametrize(("phase", "expected"), [("train", [True]), ("prefill", [])])
def test_training_is_measured_with_freed_memory_reused(phase, expected, monkeypatch):
    """As `clearhead train` runs it."""
    calls = []
    monkeypatch.setattr("clearhead.training.reuse_freed_memory", lambda: calls.append(True))
    monkeypatch.setattr("clearhead.costs.compare_with_measurement", lambda workload, calibration: [])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(app, ["cost", "gpt2", "--phase", phase, "--context", "8", "--measure"])
    assert done.exit_code == 0, done.output
    assert calls == expected
