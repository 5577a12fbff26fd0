"""The one answer: numbers known from elsewhere, the command line, and bad input in one sentence."""

import json
import math
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from clearhead.cli.app import app
from clearhead.costs.calibration.devices import DEVICES
from clearhead.costs.report import cost
from clearhead.costs.tables import legend
from clearhead.errors import ClearheadError
from clearhead.families import preset
from tests.costs.cases import CASES


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "clearhead", *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("llama-3.1-8b", "--phase", "decode", "--context", 128), ("8,030,261,248 parameters", "131,072 bytes")),
        (("deepseek-v3", "--phase", "decode", "--context", 2), ("70,272 bytes for each token",)),
        (("gpt2", "--tokens", "1e9", "--context", 64), ("PaLM: 6·P + 12·L·N·H·T", "1,000,000,000 tokens: 746.6 PFLOP")),
    ],
)
def test_known_numbers_from_the_command_line(arguments, expected):
    done = command("cost", *arguments)
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in expected)
    assert "…" not in done.stdout


def test_gpt3_took_314_zettaflop():
    """Brown et al. 2020, table D.1: 3.14e23 for 300 billion tokens."""
    told = json.loads(command("cost", "gpt3-175b", "--tokens", "300e9", "--context", 8, "--json").stdout)
    assert told["training_flops"] == pytest.approx(314e21, rel=2e-3)


def test_json_holds_the_whole_report():
    done = command(
        "cost", "gpt2", "--phase", "decode", "--context", 64, "--device", "h200", "--quant", "q4_0", "--json"
    )
    told = json.loads(done.stdout)
    assert told["total_parameters"] == 124_439_808
    assert told["flops"] == sum(row["flops"] for row in told["rows"])
    assert told["workload"]["config"]["width"] == 768
    assert told["bound"]["sides"] == ["memory"] * len(told["rows"])
    assert told["bound"]["predicted_seconds"] is None


def test_decoding_llama_on_an_h200_is_bound_by_memory():
    """15.01 GB of weights and 131,072 bytes a token at 4.8 TB/s: 3.13 ms at a short context."""
    report = cost(preset("llama-3.1-8b"), phase="decode", context=128, device="h200")
    assert report.bound is not None
    assert report.bound.seconds == pytest.approx(3.13e-3, rel=5e-3)
    assert set(report.bound.sides) == {"memory"}
    assert report.bound.largest_batch > 5000
    assert report.intensity == pytest.approx(1.0, rel=0.01)


def test_prefill_is_bound_by_compute():
    report = cost(preset("gpt2"), phase="prefill", batch=64, context=1024, device="h200")
    assert report.bound is not None
    sides = dict(zip([row.name for row in report.rows], report.bound.sides, strict=True))
    assert sides["feed-forward"] == "compute"
    assert sides["head"] == "memory"  # of 64 rows, the last tokens


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "tp"])
def test_gpus_share_the_work(parallel):
    alone = cost(CASES["gpt2"], phase="train", batch=4, context=16)
    shared = cost(CASES["gpt2"], phase="train", batch=4, context=16, gpus=4, parallel=parallel)
    whole = alone.rows[-1].flops if parallel == "tp" else 0  # the head's
    assert (shared.flops - whole) * 4 == pytest.approx(alone.flops - whole, rel=1e-3)
    assert shared.communication is not None
    assert shared.communication.bytes_each_way > 0
    assert alone.communication is None


def test_what_is_not_computed_is_not_sent():
    """The decoder has read nothing when the source is; rows that are only run are nobody else's business."""
    config = CASES["bart-base"]
    reading = cost(config, phase="prefill", context=16, source=8, gpus=2, parallel="tp").communication
    assert reading is not None
    sums = 2 * len(config.encoder.layers) * 8 * config.width * 2  # of attention and feed-forward, in two bytes
    assert reading.bytes_each_way == 2 * sums // 2
    assert cost(CASES["gpt2"], phase="prefill", batch=2, context=16, gpus=2).communication is None
    once, again = (
        cost(CASES["gpt2"], phase="train", context=16, gpus=2, parallel="tp", recompute=recompute).communication
        for recompute in (False, True)
    )
    assert again.bytes_each_way * 2 == once.bytes_each_way * 3


def test_a_ring_sends_all_but_its_own_share():
    """Ddp sums 2 bytes of every gradient: each GPU sends 2 · 3/4 of them, at 450 GB/s."""
    report = cost(CASES["gpt2"], phase="train", batch=4, context=16, gpus=4, device="h200")
    assert report.communication is not None
    assert report.bound is not None
    assert report.communication.bytes_each_way == round(2 * 0.75 * 2 * report.total_parameters)
    assert report.bound.communication_seconds == report.communication.bytes_each_way / 450e9
    assert report.bound.seconds >= report.bound.communication_seconds


def test_published_peaks_name_their_source():
    assert all(device.source and device.peak("bfloat16") > device.peak("float32") for device in DEVICES)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "h2000"}, "unknown device 'h2000'; did you mean 'h200'"),
        ({"phase": "trian"}, "unknown phase 'trian'; did you mean 'train'"),
        ({"quant": "q4_2"}, "unknown quant 'q4_2'; did you mean 'q4_"),
        ({"dtype": "bf16"}, "unknown dtype 'bf16'"),
        ({"context": 2000}, "context 2000 is beyond the 1024 positions this model has learned; ask for 1024"),
        ({"dtype": torch.float16}, "unknown dtype 'torch.float16'; did you mean 'float16'"),
        ({"batch": 10**16}, "10,000,000,000,000,000 rows of 1,024 tokens are more than can be addressed"),
        ({"batch": 0}, "batch is 0; it must be 1 or more"),
        ({"context": 0}, "context is 0; it must be 1 or more"),
        ({"gpus": 2}, "ddp shares the batch: 1 rows do not divide among 2 GPUs"),
        ({"gpus": 5, "parallel": "tp"}, "tp shares heads: 12 do not divide among 5 GPUs"),
        ({"gpus": 24, "parallel": "tp"}, "tp shares heads: 12 do not divide among 24 GPUs"),
        ({"phase": "train", "quant": "int8"}, "quant 'int8' is for running"),
        ({"phase": "decode", "recompute": True}, "recompute has no effect on decode; leave it out"),
        ({"source": 9}, "source is for an encoder-decoder; leave it out"),
        ({"tokens": 0}, "tokens is 0; it must be from 1 to 1e\\+30"),
        ({"tokens": math.nan}, "tokens is nan"),
        ({"tokens": math.inf}, "tokens is inf"),
        ({"phase": "decode", "tokens": 9}, "tokens are those of a whole training; leave them out of phase 'decode'"),
    ],
)
def test_bad_input_is_one_sentence(options, sentence):
    with pytest.raises(ClearheadError, match=sentence.replace("(", r"\(")):
        cost(preset("gpt2"), **options)


def test_a_name_is_no_config():
    with pytest.raises(ClearheadError, match=r"config is 'gpt2'; it must be a ModelConfig: clearhead\.preset"):
        cost("gpt2")


def test_an_encoder_decodes_nothing():
    with pytest.raises(ClearheadError, match="an encoder alone decodes nothing; ask for phase 'prefill'"):
        cost(preset("bert-base"), phase="decode")


def test_the_room_is_its_own_door():
    """`clearhead.cost` stays callable when Python has put the package in its place."""
    import clearhead.costs.report

    assert clearhead.cost(CASES["gpt2"], context=8).total_parameters > 0


@pytest.mark.parametrize("asked", ["h200", "cuda"])
def test_only_this_machine_is_measured(asked, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(app, ["cost", "gpt2", "--context", "8", "--measure", "--device", asked])
    sentence = f"what is measured is this machine, which is cpu and not {asked}; say --device cpu"
    assert str(done.exception) == sentence


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_symbol_is_explained(name):
    rows = cost(CASES[name], context=16).rows
    used = {symbol for row in rows for symbol in re.findall("[A-Za-z]+", f"{row.formula} {row.traffic}")}
    assert used == {entry.split()[0] for entry in legend(rows).split(", ")}


@pytest.mark.parametrize(("phase", "kept"), [("train", [True]), ("prefill", [])])
def test_training_is_measured_as_it_is_run(phase, kept, monkeypatch):
    """With freed memory kept, as `clearhead train` does."""
    found = []
    monkeypatch.setattr("clearhead.training.learner.keep_freed_memory", lambda: found.append(True))
    monkeypatch.setattr("clearhead.costs.calibration.compare.compare", lambda workload, calibration: [])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(app, ["cost", "gpt2", "--phase", phase, "--context", "8", "--measure"])
    assert done.exit_code == 0, done.output
    assert found == kept
