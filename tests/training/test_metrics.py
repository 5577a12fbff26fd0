"""Test the metrics log, the throughput meter, the progress display and the loss curve."""

import sys
from io import StringIO
from types import ModuleType

import pytest
import torch
from rich.console import Console

from clearhead.costs.calibration.devices import device_for_gpu
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.training import metrics
from clearhead.training.curve import draw_loss_curve
from clearhead.training.display import Display, format_duration, format_metrics
from clearhead.training.metrics import MetricsLog, ThroughputMeter, flops_per_token, read_metrics
from clearhead.training.reporter import _count_due
from clearhead.training.trackers import open_tracker
from tests.training.recipes import run


@pytest.mark.parametrize(
    ("name", "num_weights", "layers", "width"),
    [("gpt2", 124_439_808 - 1024 * 768, 12, 768), ("llama-3.1-8b", 8_030_261_248 - 128_256 * 4096, 32, 4096)],
)
def test_flops_per_token_follow_the_convention_of_palm(name, num_weights, layers, width):
    """A tied table counts as the head; an untied input table only looks up. Norms and biases hardly matter."""
    expected = 6 * num_weights + 12 * layers * width * 1024
    assert flops_per_token(preset(name), 1024) == pytest.approx(expected, rel=1e-3)


def test_flops_per_token_of_a_mixture_count_chosen_experts_only():
    """Qwen3-30B-A3B has 3.3 billion active parameters, 0.3 of them in the input table, which only looks up."""
    assert flops_per_token(preset("qwen3-30b-a3b"), 1) == pytest.approx(6 * 3.0e9, rel=0.05)


def test_the_device_is_found_by_the_name_of_the_gpu():
    names = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce GTX 1080")
    assert [device and device.name for device in map(device_for_gpu, names)] == ["h200", "a100", "rtx-4090", None]


def test_the_meter_restarts_when_it_is_read(monkeypatch):
    clock = iter([0.0, 2.0, 2.0, 6.0, 6.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    meter = ThroughputMeter(torch.nn.Linear(1, 1), torch.device("cpu"))
    meter.count_step(100)
    meter.count_step(300)
    assert meter.read(8, num_steps_left=10) == {"tokens_per_second": 200.0, "seconds_left": 10.0}
    meter.count_step(400)
    assert meter.read(8, num_steps_left=1)["tokens_per_second"] == 100.0


def test_a_resumed_log_deletes_the_rows_of_repeated_steps(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the run was killed while it wrote this row
    MetricsLog(tmp_path, 2).write({"step": 3, "loss": 30.0})
    assert [row["loss"] for row in read_metrics(tmp_path)] == [1.0, 2.0, 30.0]


def test_format_metrics():
    row = {"step": 5, "loss": 1.23456, "learning_rate": 0.001, "gradient_norm": 0.5, "tokens_per_second": 12345.6}
    line = format_metrics({**row, "mfu": 0.479, "memory_bytes": 2.84e10, "seconds_left": 65.0})
    assert line == (
        "loss 1.2346  rate 1.00e-03  gradient 0.50  12,346 tokens/s  MFU 47.9% (6P+12LDT)  28.4 GB  1:05 left"
    )


def test_a_terminal_shows_the_last_step_and_validation_loss():
    console = Console(file=StringIO(), force_terminal=True, width=150)
    with Display(console, num_steps=10, first_step=0) as display:
        display.show_metrics({"step": 4, "validation_loss": 2.5})
        display.show_metrics({"step": 5, "loss": 1.5})
    shown = console.file.getvalue()
    assert "5/10" in shown
    assert "loss 1.5000" in shown
    assert "validation 2.5000" in shown


def test_a_silent_display_prints_nothing():
    console = Console(file=StringIO())
    with Display(console, num_steps=10, first_step=0, silent=True) as display:
        display.show_metrics({"step": 5, "loss": 1.5})
        display.print("model")
    assert console.file.getvalue() == ""


def test_tensorboard_writes_events(tmp_path):
    pytest.importorskip("tensorboard")
    run(tmp_path, {"train": {"tracker": "tensorboard", "steps": 3}})
    assert list((tmp_path / "tensorboard").glob("events*"))


@pytest.mark.parametrize(
    ("module", "extra", "function"),
    [
        ("matplotlib.figure", "plot", draw_loss_curve),
        ("torch.utils.tensorboard", "train", lambda folder: open_tracker("tensorboard", folder, "p", {}, 0)),
        ("wandb", "wandb", lambda folder: open_tracker("wandb", folder, "p", {}, 0)),
        ("trackio", "trackio", lambda folder: open_tracker("trackio", folder, "p", {}, 0)),
    ],
)
def test_a_missing_extra_gives_an_error_with_the_pip_command(tmp_path, monkeypatch, module, extra, function):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ClearheadError, match=rf"pip install \"clearhead\[{extra}\]\""):
        function(tmp_path)


def test_a_run_without_matplotlib_writes_no_loss_curve(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(tmp_path, {"train": {"steps": 2}})
    assert (tmp_path / "model").exists()
    assert not (tmp_path / "loss.png").exists()


def test_damaged_lines_of_metrics_are_skipped(tmp_path):
    lines = (b'{"step": 1}', b'{"step" 2}', b'{"step": 3, "loss": 1.0\xff}', b"[" * 2000, b"[1]", b'{"loss": 1.0}')
    more = (b'{"step": "4"}', b'{"step": 5, "loss": "high"}', b"", b'{"step": 6, "loss": 0.5}', b'{"step": 7')
    (tmp_path / metrics.METRICS_FILE).write_bytes(b"\n".join((*lines, *more)))
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 6, "loss": 0.5}]


def test_a_bad_byte_in_the_metrics_does_not_stop_a_resume(tmp_path):
    run(tmp_path, {"train": {"steps": 2}})
    path = tmp_path / metrics.METRICS_FILE
    path.write_bytes(path.read_bytes().replace(b'"loss"', b'"lo\xffs"', 1))
    run(tmp_path, {"train": {"steps": 4}})
    assert [row["step"] for row in read_metrics(tmp_path) if "loss" in row] == [2, 3, 4]


def test_a_display_shows_one_time_left_and_the_progress_of_a_validation():
    console = Console(file=StringIO(), force_terminal=True, width=150)
    with Display(console, num_steps=10, first_step=0) as display:
        display.show_metrics({"step": 4, "loss": 2.5, "seconds_left": 65.0})
        display.show_validation(3, 7)
        display.bar.refresh()
        during = console.file.getvalue()
        display.show_validation(7, 7)
        console.file.truncate(0)
        display.bar.refresh()
        after = console.file.getvalue()
    assert "1:05 left" in during
    assert "3/7" in during
    assert "0:00:" not in during
    assert "7/7" not in after


def test_the_bar_moves_with_every_step():
    console = Console(file=StringIO(), force_terminal=True, width=150)
    with Display(console, num_steps=10, first_step=0) as display:
        display.show_step(3)
        display.bar.refresh()
    assert "3/10" in console.file.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65, "1:05"), (3600, "1:00:00"), (90061, "25:01:01")])
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


def test_the_time_left_includes_the_remaining_validations():
    assert [_count_due(step, 10, 4) for step in (1, 4, 5, 8, 9, 10)] == [3, 3, 2, 2, 1, 1]
    assert [_count_due(step, 8, 4) for step in (1, 4, 5, 8)] == [2, 2, 1, 1]


def test_a_loss_curve_of_one_point_shows_it(tmp_path, monkeypatch):
    """A line through one point has no length."""
    axes_module = pytest.importorskip("matplotlib.axes")
    markers = []
    plot = axes_module.Axes.plot
    monkeypatch.setattr(
        axes_module.Axes,
        "plot",
        lambda self, *args, **kwargs: markers.append(kwargs["marker"]) or plot(self, *args, **kwargs),
    )
    log = MetricsLog(tmp_path, 0)
    log.write({"step": 1, "loss": 2.0})
    log.write({"step": 2, "loss": 1.0})
    log.write({"step": 2, "validation_loss": 1.5})
    draw_loss_curve(tmp_path)
    assert markers == [None, "o"]


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_a_run_logs_every_row_to_an_experiment_tracker(tmp_path, monkeypatch, kind):
    calls = []

    class Run:
        def log(self, values, step):
            calls.append((step, values))

        def finish(self):
            calls.append("finished")

    module = ModuleType(kind)
    module.init = lambda **options: calls.append(options) or Run()
    monkeypatch.setitem(sys.modules, kind, module)
    run(tmp_path / "my-run", {"train": {"tracker": kind, "project": "tests", "steps": 2, "validate_every": 2}})
    options, *rows, last = calls
    assert (options["project"], options["name"], options["resume"]) == ("tests", "my-run", "allow")
    assert ("id" in options) == (kind == "wandb")
    assert options["config"]["train"]["steps"] == 2
    assert [step for step, _ in rows] == [1, 2, 2]
    assert "validation_loss" in rows[-1][1]
    assert last == "finished"
