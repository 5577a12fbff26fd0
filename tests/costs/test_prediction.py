"""Predicted seconds, comparisons with measurements, and the curves over the length."""

from dataclasses import replace

import pytest

from clearhead.costs import curves
from clearhead.costs.calibration.comparison import Comparison, compare_with_measurement
from clearhead.costs.calibration.prediction import can_predict, predict_seconds
from clearhead.costs.calibration.toy_networks import toy_llama
from clearhead.costs.formulas.memory import cache_bytes, weight_bytes
from clearhead.costs.formulas.parameters import total_parameters
from clearhead.costs.simulation.meta_run import simulate
from clearhead.costs.simulation.workload_steps import build_network
from clearhead.costs.tables import print_comparisons
from clearhead.errors import ClearheadError
from clearhead.families import preset
from tests.costs.cases import CASES, make_workload
from tests.costs.machines import GPU, MACHINE

# --- seconds


def test_a_training_step_ends_with_adamw():
    workload = make_workload(CASES["gpt2"], "train", 8)
    run = simulate(workload)
    weights = 4 * sum(parameter.numel() for parameter in build_network(workload, "meta").parameters())
    expected = MACHINE.run_time(run, "float32", "train") + weights / 2e8
    assert predict_seconds(workload, MACHINE) == pytest.approx(expected)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("config", [toy_llama(), preset("gpt2")], ids=["toy", "gpt2"])
def test_a_decode_step_in_a_cuda_graph_takes_the_sum_of_its_kernels(config, batch):
    workload = make_workload(config, "decode", 24, batch=batch, device_type="cuda")
    expected = sum(GPU.kernel_time(kernel, "float32") for kernel in simulate(workload).kernels)
    assert predict_seconds(workload, GPU) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("config", "options", "is_known"),
    [
        (toy_llama(), {}, True),
        (toy_llama(), {"batch": 2}, False),
        (toy_llama(), {"weights": "q4_0"}, False),
        (toy_llama(), {"device_type": "cuda"}, False),
        (CASES["deepseek-v3"], {}, False),
        (CASES["qwen3-30b-a3b"], {}, False),
    ],
    ids=["decoded by kernels", "batch", "format", "device", "latent attention", "experts"],
)
def test_packed_weights_are_predicted_only_where_our_kernels_decode_them(config, options, is_known):
    workload = make_workload(config, "decode", 24, **({"weights": "int4", "batch": 1} | options))
    rates = {"weight_bytes_per_second": 1e9, "layer_seconds": 1e-3, "cache_bytes_per_second": 1e6}
    packed = replace(MACHINE, packed={"int4": rates, "q4_0": rates})
    assert can_predict(workload, packed) == is_known
    assert not can_predict(workload, MACHINE)
    if is_known:
        layers = 1e-3 * len(workload.config.decoder.layers)
        expected = weight_bytes(workload) / 1e9 + layers + cache_bytes(workload) / 1e6
        assert predict_seconds(workload, packed) == pytest.approx(expected)


# --- predicted and measured


def test_predictions_equal_what_the_counter_measures():
    """Seconds are measured too, but those of an invented machine are not compared."""
    for phase in ("train", "prefill", "decode"):
        comparisons = compare_with_measurement(make_workload(CASES["llama-3.1-8b"], phase, 24), MACHINE)
        by_quantity = {comparison.quantity: comparison for comparison in comparisons}
        assert by_quantity["FLOPs"].ratio == 1
        assert by_quantity["bytes moved"].ratio == pytest.approx(1, rel=0.03)
        assert by_quantity["peak bytes"].ratio == pytest.approx(1, rel=0.03)
        assert by_quantity["seconds"].measured > 0


def test_a_precision_that_is_not_calibrated_is_compared_without_seconds():
    comparisons = compare_with_measurement(make_workload(CASES["gpt2"], "decode", 8, dtype="float64"), MACHINE)
    assert [comparison.quantity for comparison in comparisons] == ["FLOPs", "bytes moved", "peak bytes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weights": "int8"},
            "with int8 weights, only decoding of one sequence on a CPU in int8 or int4 can be measured",
        ),
        ({"gpus": 2}, "a measurement runs on one device; leave out gpus, which is 2"),
    ],
)
def test_a_workload_that_this_machine_cannot_run_raises_an_error(options, message):
    with pytest.raises(ClearheadError, match=message):
        compare_with_measurement(make_workload(CASES["llama-3.1-8b"], "prefill", 8, **options))


def test_a_workload_that_exceeds_the_memory_is_not_started(monkeypatch):
    """Weights take 4 bytes each while the network is created, even those of bfloat16."""
    workload = make_workload(CASES["gpt2"], "decode", 8, dtype="bfloat16")
    monkeypatch.setattr(
        "clearhead.costs.calibration.comparison.device_memory_bytes",
        lambda device: 4 * total_parameters(workload.config) - 1,
    )
    message = r"this run needs .* GB, but this machine has .* GB; measure a shorter context"
    with pytest.raises(ClearheadError, match=message):
        compare_with_measurement(workload)


def test_comparisons_are_printed_with_units(capsys):
    print_comparisons(
        [Comparison("FLOPs", 3.1e7, 3.1e7), Comparison("peak bytes", 6e7, 6e7), Comparison("seconds", 0.013, 0.026)],
        "cpu",
    )
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("31 M", "60 MB", "13 ms", "26 ms", "0.500"))


# --- curves


def test_curves_have_their_slopes(tmp_path, monkeypatch):
    """Counted points lie on the lines; doubling n doubles O(n) and more than doubles O(n²) (book F4)."""
    monkeypatch.setattr(curves, "MEASURED_SECONDS", 0.01)
    measured = curves.measure_curves(MACHINE, lengths=(256, 512))
    for curve in measured:
        assert all(point.flops == point.counted_flops for point in curve.points)
        assert all(point.measured_seconds > 0 for point in curve.points)
    prefill, decode, recurrent = ([point.flops for point in curve.points] for curve in measured)
    assert prefill[1] > 2.5 * prefill[0]
    assert decode[0] < decode[1] < 2 * decode[0]
    assert recurrent[1] == 2 * recurrent[0]
    curves.draw_curves(measured, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_curves_of_a_gpu_are_measured_in_bfloat16_and_outside_a_graph(phase, monkeypatch):
    """Run on the CPU here; the counter would see nothing of a CUDA graph."""
    monkeypatch.setattr(curves, "build_network", lambda workload, device: build_network(workload, "cpu"))
    monkeypatch.setattr(curves, "time_step", lambda *step: 1.0)
    tables = {name: {"bfloat16": getattr(GPU, name)["float32"]} for name in ("products", "attention")}
    point = curves.transformer_point(phase, 16, replace(GPU, **tables))
    assert point.flops == point.counted_flops > 0
    assert point.seconds > 0
