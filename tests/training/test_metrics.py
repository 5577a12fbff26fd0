"""What a run writes down and shows."""

import sys
from io import StringIO

import pytest
import torch
from rich.console import Console

from clearhead.costs.calibration.devices import device_named
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.training import metrics
from clearhead.training.curve import draw_curve
from clearhead.training.display import Display, describe
from clearhead.training.metrics import Journal, Meter, flops_per_token, read_metrics
from tests.training.recipes import run


@pytest.mark.parametrize(
    ("name", "num_weights", "layers", "width"),
    [("gpt2", 124_439_808 - 1024 * 768, 12, 768), ("llama-3.1-8b", 8_030_261_248 - 128_256 * 4096, 32, 4096)],
)
def test_operations_a_token_are_palms(name, num_weights, layers, width):
    """Tied, the table multiplies as the head; untied, the input table only looks up. Norms and biases hardly count."""
    expected = 6 * num_weights + 12 * layers * width * 1024
    assert flops_per_token(preset(name), 1024) == pytest.approx(expected, rel=1e-3)


def test_of_a_mixture_only_what_is_chosen_counts():
    """Qwen3-30B-A3B: 3.3 billion active, 0.3 of them in the table that looks up."""
    assert flops_per_token(preset("qwen3-30b-a3b"), 1) == pytest.approx(6 * 3.0e9, rel=0.05)


def test_a_peak_is_found_by_the_name_of_the_card():
    names = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce GTX 1080")
    assert [one and one.name for one in map(device_named, names)] == ["h200", "a100", "rtx-4090", None]


def test_the_meter_counts_from_where_it_was_read(monkeypatch):
    clock = iter([0.0, 2.0, 2.0, 6.0, 6.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    meter = Meter(torch.nn.Linear(1, 1), torch.device("cpu"))
    meter.count(100)
    meter.count(300)
    assert meter.read(8, num_steps_left=10) == {"tokens_per_second": 200.0, "seconds_left": 10.0}
    meter.count(400)
    assert meter.read(8, num_steps_left=1)["tokens_per_second"] == 100.0


def test_a_resumed_journal_forgets_what_will_be_made_again(tmp_path):
    journal = Journal(tmp_path, 0)
    for step in (1, 2, 3):
        journal.write({"step": step, "loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a kill in the middle of a row
    Journal(tmp_path, 2).write({"step": 3, "loss": 30.0})
    assert [row["loss"] for row in read_metrics(tmp_path)] == [1.0, 2.0, 30.0]


def test_a_row_as_words():
    row = {"step": 5, "loss": 1.23456, "learning_rate": 0.001, "gradient_norm": 0.5, "tokens_per_second": 12345.6}
    words = describe({**row, "mfu": 0.479, "memory_bytes": 2.84e10, "seconds_left": 65.0})
    assert words == (
        "loss 1.2346  rate 1.00e-03  gradient 0.50  12,346 tokens/s  MFU 47.9% (6P+12LDT)  28.4 GB  1:05 left"
    )


def test_a_live_line_on_a_terminal():
    console = Console(file=StringIO(), force_terminal=True, width=150)
    with Display(console, num_steps=10, first_step=0) as display:
        display.show({"step": 4, "validation_loss": 2.5})
        display.show({"step": 5, "loss": 1.5})
    shown = console.file.getvalue()
    assert "5/10" in shown
    assert "loss 1.5000" in shown
    assert "validation 2.5000" in shown


def test_other_ranks_say_nothing():
    console = Console(file=StringIO())
    with Display(console, num_steps=10, first_step=0, silent=True) as display:
        display.show({"step": 5, "loss": 1.5})
        display.say("model")
    assert console.file.getvalue() == ""


def test_tensorboard_by_option(tmp_path):
    pytest.importorskip("tensorboard")
    run(tmp_path, {"train": {"tensorboard": True, "steps": 3}})
    assert list((tmp_path / "tensorboard").glob("events*"))


@pytest.mark.parametrize(
    ("module", "extra", "needs"),
    [
        ("matplotlib.figure", "plot", draw_curve),
        ("torch.utils.tensorboard", "train", lambda folder: Journal(folder, 0, tensorboard=True)),
    ],
)
def test_a_missing_extra_is_one_kind_sentence(tmp_path, monkeypatch, module, extra, needs):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ClearheadError, match=rf"pip install \"clearhead\[{extra}\]\""):
        needs(tmp_path)


def test_without_matplotlib_a_run_still_ends_well(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(tmp_path, {"train": {"steps": 2}})
    assert (tmp_path / "model").exists()
    assert not (tmp_path / "loss.png").exists()


def test_a_damaged_line_is_one_sentence(tmp_path):
    (tmp_path / metrics.METRICS).write_text('{"step": 1}\n{"step" 2}\n{"step": 3')
    with pytest.raises(ClearheadError, match=r"a line of .* is not valid JSON"):
        read_metrics(tmp_path)
