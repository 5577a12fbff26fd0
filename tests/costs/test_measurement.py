"""Measurement of this machine with few and small points, and of host time with toy networks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from clearhead.cli.app import app
from clearhead.costs.calibration import gpu_rates, measurement, timing, toy_networks
from clearhead.costs.calibration.comparison import compare_with_measurement
from clearhead.costs.calibration.progress import MeasuredParts
from clearhead.costs.calibration.rates import Rate, load_calibration, save_calibration
from clearhead.costs.calibration.timing import collect_points, time_runs
from clearhead.costs.calibration.toy_networks import (
    UNUSUAL_HEAD_WIDTH,
    kernel_host_seconds,
    solve_host_seconds,
    toy_decoder,
    toy_gpt2,
    toy_llama,
)
from clearhead.costs.simulation.meta_run import simulate
from clearhead.errors import ClearheadError
from tests.costs.cases import CASES, make_workload
from tests.costs.machines import MACHINE


def test_a_point_that_fails_is_skipped_with_a_warning():
    def fail():
        raise RuntimeError("out of memory\nand a long trace")

    with pytest.warns(UserWarning, match="skipped: out of memory$"):
        rates = collect_points([lambda: Rate((1, 1), 10.0), fail, lambda: Rate((4, 4), 4.0)])
    assert [rate.shape for rate in rates] == [(1, 1), (4, 4)]


@pytest.fixture
def few_points(monkeypatch):
    """Measure few and small points."""
    for name, value in {
        "DTYPES": {"cpu": ("float32",)},
        "GRIDS": {"cpu": ((1, 16), (64,), (64, 128))},
        "LENGTHS": {"cpu": (1, 16)},
        "TRAFFIC_BYTES": (1 << 12, 1 << 20),
        "COLD_BYTES": {"cpu": 1 << 20},
        "MAX_SCORES": {"cpu": 1 << 13},
        "_OPTIMIZER_MATRICES": {"cpu": (2, 64)},
    }.items():
        monkeypatch.setattr(measurement, name, value)
    monkeypatch.setattr("clearhead.costs.calibration.timing.POINT_SECONDS", {"cpu": 0.001})
    monkeypatch.setattr(toy_networks, "STEP_SECONDS", {"cpu": 0.01})
    monkeypatch.setattr(toy_networks, "NUM_ROUNDS", 2)
    shallow = toy_decoder(
        width=64, inner_width=64, num_heads=2, num_kv_heads=1, head_width=32, num_layers=1, context=64
    )
    monkeypatch.setattr(toy_networks, "toy_llama", lambda: shallow)
    monkeypatch.setattr(measurement, "measure_packed", lambda weights: {"layer_seconds": 1e-5})


def test_a_round_ends_early_on_a_busy_machine(monkeypatch):
    """Kernels that take 100 times as long as usual must not make a calibration take 100 minutes."""
    ends = [0.0]  # of the runs, by a clock that only they advance
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: ends[-1]))
    assert time_runs([lambda: ends.append(ends[-1] + 0.02)] * 1000, "cpu") == pytest.approx(0.02)
    assert ends[-1] < timing.MAX_ROUND_SECONDS + 4 * 0.02


def test_every_precision_is_a_part_of_its_own(few_points):
    progress = []
    machine = measurement.measure_machine("cpu", lambda *step: progress.append(step), ["float32", "bfloat16"])
    names = {part for part, _, _ in progress}
    assert {"float32 matrix products, pass 1", "bfloat16 attention backward, pass 1"} <= names
    for table in (machine.products, machine.attention, machine.attention_backward):
        assert list(table) == ["float32", "bfloat16"]


def test_a_measured_machine_has_positive_rates(few_points):
    machine = measurement.measure_machine("cpu")
    tables = (machine.products, machine.attention, machine.attention_backward)
    assert all(rate.per_second > 0 for table in tables for rate in table["float32"])
    assert machine.bytes_per_second > 1e8
    assert all(1e-7 < machine.host_seconds[phase]["each"] < 1e-2 for phase in ("train", "prefill", "decode"))
    save_calibration(machine)
    assert load_calibration("cpu") == machine
    with pytest.raises(ClearheadError, match="unknown device to measure 'gpu'"):
        measurement.measure_machine("gpu")


def test_an_interrupted_measurement_continues_with_the_next_part(few_points, monkeypatch):
    calls = []

    def stop_in_the_second_pass(part, done, total):
        calls.append((part, done, total))
        if part == "float32 attention, pass 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measurement.measure_machine("cpu", stop_in_the_second_pass)
    num_parts = calls[-1][2]
    assert [done for _, done, _ in calls] == list(range(len(calls)))
    assert load_calibration("cpu") is None
    measured = []
    for name in ("_measure_traffic", "_measure_products"):
        original = getattr(measurement, name)
        monkeypatch.setattr(
            measurement, name, lambda *shape, original=original, name=name: measured.append(name) or original(*shape)
        )
    progress = []
    machine = measurement.measure_machine("cpu", lambda *step: progress.append(step))
    assert progress[0][1:] == (0, num_parts)
    assert measured == ["_measure_traffic"] * 2 + ["_measure_products"]  # those of the third pass
    assert machine.products["float32"]
    assert MeasuredParts("cpu", ["float32"], 1).finished == {}  # a complete measurement leaves nothing behind


def test_a_slow_machine_is_measured_once(few_points, monkeypatch):
    monkeypatch.setattr(measurement, "_MAX_SECONDS", 0.0)
    progress = []
    measurement.measure_machine("cpu", lambda *step: progress.append(step))
    assert not any("pass 2" in part for part, _, _ in progress)
    assert progress[-1][1] == progress[-1][2] - 1


@pytest.mark.parametrize("content", ["{", "[]", '{"key": 1, "parts": {"bandwidth, pass 1": {}}}'])
def test_a_damaged_file_of_an_unfinished_measurement_is_ignored(content):
    path = MeasuredParts("cpu", ["float32"], 1).path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    assert MeasuredParts("cpu", ["float32"], 1).finished == {}


def test_ctrl_c_during_calibrate_says_what_is_kept(monkeypatch):
    def stop(device, show_progress):
        show_progress("attention", 3, 20)
        raise KeyboardInterrupt

    monkeypatch.setattr("clearhead.costs.measure_machine", stop)
    done = CliRunner().invoke(app, ["calibrate"])
    assert done.exit_code == 130
    assert "3 of 20 measurements are kept; the same command continues" in " ".join(done.stderr.split())


def test_measurements_for_gpus_run_on_a_cpu(monkeypatch):
    """The same code on a CPU; its numbers say nothing about a GPU."""
    monkeypatch.setattr(gpu_rates, "HEAD_SIZES", (16, 33, 32))
    monkeypatch.setattr(gpu_rates, "HEADS_SHAPE", (2, 8, 4, 32))
    monkeypatch.setattr(gpu_rates, "NUM_ROWS", 8)
    monkeypatch.setattr("clearhead.costs.calibration.timing.POINT_SECONDS", {"cpu": 0.001})
    assert set(gpu_rates.measure_uneven("cpu", "float32")) == set("mnk")
    assert gpu_rates.measure_scattered("cpu") > 0
    assert gpu_rates.measure_argmax("cpu") > 0
    names = {kernel.name for kernel in simulate(make_workload(CASES["gpt2"], "train", 8)).kernels}
    names |= {kernel.name for kernel in simulate(make_workload(toy_llama(), "train", 8)).kernels}
    rates = gpu_rates.measure_reductions("cpu")
    assert set(rates) <= names
    assert [rate.shape for rate in rates["sum"]] == [(width,) for width in gpu_rates.WIDTHS]
    for num_queries in (1, 8):
        assert set(kernel_host_seconds("cpu", num_queries)) == {"mm", "addmm", "attention"}


# --- toy networks


def test_two_networks_determine_the_host_time_of_operations_and_launches():
    """8.5 µs for an operation and 18 more for a launch, as on an H200."""
    each, launch = 8.5e-6, 18e-6
    counts = [(1068, 555), (554, 177)]
    solution = solve_host_seconds(*((*count, count[0] * each + count[1] * launch) for count in counts))
    assert solution == pytest.approx({"each": each, "launch": launch})


@pytest.mark.parametrize("other", [(500, 250, 9e-3), (1000, 100, 30e-3)])  # the same mixture; fewer kernels take longer
def test_launches_are_free_if_two_networks_do_not_determine_them(other):
    solution = solve_host_seconds((1000, 500, 20e-3), other)
    assert solution == pytest.approx({"each": (20e-3 + other[2]) / (1000 + other[0]), "launch": 0.0})


def test_the_two_toys_have_different_shares_of_launches():
    configs = (toy_llama(UNUSUAL_HEAD_WIDTH), toy_gpt2())
    runs = [simulate(make_workload(config, "decode", 8, device_type="cuda")) for config in configs]
    assert not any(run.in_graph for run in runs)
    shares = [len(run.kernels) / run.num_dispatches for run in runs]
    assert shares[0] > 1.5 * shares[1]


def test_rates_of_packed_weights_are_plausible(monkeypatch):
    monkeypatch.undo()  # the kernels are compiled once, in the home that all tests share
    monkeypatch.setattr(toy_networks, "MEASURED_SECONDS", 0.05)
    monkeypatch.setattr(toy_networks, "WIDE", (256, 1024))
    rates = toy_networks.measure_packed("int4")
    assert 1e-7 < rates["layer_seconds"] < 1e-2
    assert rates["cache_bytes_per_second"] > 1e7
    workload = make_workload(toy_llama(), "decode", 24, weights="int4", batch=1)
    comparisons = compare_with_measurement(workload, replace(MACHINE, packed={"int4": rates}))
    assert [comparison.quantity for comparison in comparisons] == ["seconds"]
