"""Kernels to seconds on a machine made up here, and the real machine where that is quick."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import nll_loss

from clearhead.architecture.parts import Rope, SlidingWindow
from clearhead.costs import curves as curve_room
from clearhead.costs.calibration import gpu_rates, packed_rates
from clearhead.costs.calibration import measure_machine as calibrate
from clearhead.costs.calibration.calibration import (
    Calibration,
    Rate,
    Traffic,
    between,
    calibration_path,
    fastest,
    load_calibration,
    machine_name,
    save_calibration,
)
from clearhead.costs.calibration.clock import measured
from clearhead.costs.calibration.compare import Comparison, compare
from clearhead.costs.calibration.devices import device
from clearhead.costs.calibration.host import UNUSUAL, longer_seconds, plain_toy, told_apart, toy
from clearhead.costs.calibration.predict import is_predicted, predict_seconds
from clearhead.costs.curves import draw_curves, measure_curves
from clearhead.costs.formulas.memory import cache_bytes, footprint, weight_bytes
from clearhead.costs.formulas.operations import operations
from clearhead.costs.formulas.parameters import parameters
from clearhead.costs.report import table_rows
from clearhead.costs.simulation.counter import Counter, Kernel
from clearhead.costs.simulation.layout import lay_out
from clearhead.costs.simulation.workload_steps import build, in_graph
from clearhead.costs.tables import print_comparisons
from clearhead.errors import ClearheadError
from clearhead.families import preset
from tests.costs.cases import CASES
from tests.costs.test_operations import workload_of

RATES = [Rate((1, 1024, 1024), 1e9), Rate((1024, 1024, 1024), 1e11)]
ROW_RATES = [Rate((count, 1024, 1024), count * 1e9) for count in (1, 2)]
ATTENTION_RATES = [Rate((1, 64), 1e9), Rate((1024, 64), 1e11)]
MACHINE = Calibration(
    device="cpu",
    machine=machine_name("cpu"),
    torch=torch.__version__,
    memory_bytes=10**9,
    traffic=[Traffic(1 << 10, 4e9), Traffic(1 << 20, 1e9)],
    products={"float32": RATES},
    attention={"float32": ATTENTION_RATES},
    attention_backward={"float32": ATTENTION_RATES},
    optimizer={"float32": 2e8},
    kernel_seconds=1e-6,
    host_seconds={"train": {"each": 1e-6}, "prefill": {"each": 2e-6}, "decode": {"each": 2e-6}},
    row_products={"float32": ROW_RATES},
    row_attention={"float32": [Rate((8, 1024, 64), 1e9)]},
)
GPU = replace(MACHINE, device="cuda")


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_HOME", str(tmp_path))


def test_a_kernel_takes_as_long_as_its_slower_side():
    assert MACHINE.kernel_time(Kernel("mul", 1 << 20), "float32") == pytest.approx((1 << 20) / 1e9)
    assert MACHINE.kernel_time(Kernel("mul", 8), "float32") == 1e-6
    product = Kernel("mm", 0, 2 * 1024**3, shape=(1, 1024, 1024, 1024))
    assert MACHINE.kernel_time(product, "float32") == pytest.approx(2 * 1024**3 / 1e11, rel=1e-3)
    attention = Kernel("flash", 1 << 20, 1000, attention=(1, 1024, 64))
    assert MACHINE.kernel_time(attention, "float32") == pytest.approx((1 << 20) / 1e9)


def test_rates_between_the_measured_ones():
    """On a point its own rate; half way, in powers of two, the geometric mean; beyond the grid that of its edge."""
    assert between(RATES, (1, 1024, 1024)) == pytest.approx(1e9)
    assert between(RATES, (32, 1024, 1024)) == pytest.approx(math.sqrt(1e9 * 1e11))
    assert between(RATES, (1 << 20, 1, 1 << 20)) == pytest.approx(1e11)
    corners = [Rate((a, b), 10.0**power) for (a, b), power in {(1, 1): 0, (1, 4): 2, (4, 1): 4, (4, 4): 6}.items()]
    assert between(corners, (2, 2)) == pytest.approx(10.0**3)
    assert MACHINE.bandwidth(1 << 15) == pytest.approx(2e9)
    assert MACHINE.bandwidth(1) == pytest.approx(4e9)
    assert MACHINE.bandwidth(1 << 30) == pytest.approx(1e9)


def test_of_several_passes_the_fastest_counts():
    """Number by number: more FLOPs and bytes per second, fewer seconds."""
    disturbed = replace(
        MACHINE,
        traffic=[Traffic(1 << 10, 3e9), Traffic(1 << 20, 2e9)],
        products={"float32": [RATES[0], Rate((1024, 1024, 1024), 2e11)]},
        kernel_seconds=3e-6,
        host_seconds=MACHINE.host_seconds | {"train": {"each": 5e-7}},
    )
    both = fastest([MACHINE, disturbed])
    assert both == fastest([disturbed, MACHINE])
    assert both == replace(
        MACHINE,
        traffic=[Traffic(1 << 10, 4e9), Traffic(1 << 20, 2e9)],
        products=disturbed.products,
        host_seconds=disturbed.host_seconds,
    )


def test_a_point_that_fails_is_left_out():
    """What is around it answers in its place; where nothing is, that is said."""

    def fails():
        raise RuntimeError("out of memory\nand a long trace")

    with pytest.warns(UserWarning, match="skipped: out of memory$"):
        found = measured([lambda: Rate((1, 1), 10.0), fails, lambda: Rate((4, 1), 1000.0), lambda: Rate((4, 4), 4.0)])
    assert [point.shape for point in found] == [(1, 1), (4, 1), (4, 4)]
    assert between(found, (2, 1)) == pytest.approx(100)
    assert between(found, (1, 2)) == pytest.approx(10)
    with pytest.raises(ClearheadError, match="nothing near a shape of \\(1, 4\\) was measured here"):
        between(found, (1, 4))


def test_the_host_adds_on_a_cpu_and_hides_on_a_gpu():
    run = Counter()
    run.kernels, run.num_dispatches = [Kernel("mul", 8)] * 10, 20
    assert MACHINE.seconds(run, "float32", "decode") == pytest.approx(10e-6 + 40e-6)
    assert MACHINE.seconds(run, "float32", "train") == pytest.approx(10e-6 + 20e-6)
    assert GPU.seconds(run, "float32", "decode") == pytest.approx(40e-6)
    run.in_graph = True
    assert GPU.seconds(run, "float32", "decode") == pytest.approx(10e-6)


def test_a_gpu_waits_where_the_host_has_not_come():
    """A long kernel lets the host get ahead; before the first it cannot be, and after the last it is waited for."""
    long, short = Kernel("mul", 1 << 20), Kernel("mul", 8)
    run = Counter()
    run.kernels = [replace(long, num_dispatches=5), replace(short, num_dispatches=10)]
    run.num_dispatches = 20
    assert GPU.seconds(run, "float32", "decode") == pytest.approx(5 * 2e-6 + (1 << 20) / 1e9 + 1e-6)
    run.num_dispatches = 10_000
    assert GPU.seconds(run, "float32", "decode") == pytest.approx(10_000 * 2e-6)


def test_some_kernels_keep_the_host_longer():
    slow = replace(GPU, host_seconds={"decode": {"each": 2e-6, "addmm": 30e-6, "attention": 50e-6}})
    run = Counter()
    flash = Kernel("flash", 8, 8, attention=(1, 8, 64), num_dispatches=2)
    run.kernels = [Kernel("addmm", 8, 8, shape=(1, 1, 2, 2), num_dispatches=1), flash]
    run.num_dispatches = 3
    assert slow.seconds(run, "float32", "decode") == pytest.approx(3 * 2e-6 + 80e-6)


def test_two_toys_tell_launches_from_views():
    """8.5 us for an operation and 18 more for a launch, as on an H200; a third network follows from the two."""
    each, launch = 8.5e-6, 18e-6
    counted = [(1068, 555), (554, 177)]
    found = told_apart(*((*count, count[0] * each + count[1] * launch) for count in counted))
    assert found == pytest.approx({"each": each, "launch": launch})
    run = Counter()
    run.kernels = [Kernel("mul", 8, num_dispatches=2), Kernel("mul", 8, num_dispatches=3)]
    run.num_dispatches = 4
    slow = replace(GPU, host_seconds={"decode": found})
    assert slow.seconds(run, "float32", "decode") == pytest.approx(4 * each + 2 * launch)


@pytest.mark.parametrize("other", [(500, 250, 9e-3), (1000, 100, 30e-3)])  # the same mixture; fewer kernels take longer
def test_where_they_cannot_be_told_apart_operations_bear_it_all(other):
    found = told_apart((1000, 500, 20e-3), other)
    assert found == pytest.approx({"each": (20e-3 + other[2]) / (1000 + other[0]), "launch": 0.0})


def test_the_toys_of_the_host_mix_launches_and_views_differently():
    runs = [lay_out(workload_of(config, "decode", 8, device_type="cuda")) for config in (toy(UNUSUAL), plain_toy())]
    assert not any(run.in_graph for run in runs)
    shares = [len(run.kernels) / run.num_dispatches for run in runs]
    assert shares[0] > 1.5 * shares[1]


def test_a_loss_reads_one_number_of_each_row():
    """And its backward none: 2 rows of 1,000 numbers, of which it writes all."""
    logits = torch.randn(2, 1000, requires_grad=True)
    with Counter() as counter:
        nll_loss(logits, torch.zeros(2, dtype=torch.int64), reduction="sum").backward()
    moved = {kernel.name: kernel.num_bytes for kernel in counter.kernels}
    assert moved["nll_loss_forward"] == 2 * 8 + 2 * 4 + 2 * 4  # targets, numbers, the loss and the sum of weights
    assert moved["nll_loss_backward"] == 4 + 2 * 8 + 4 + 2 * 1000 * 4


def test_awkward_places_slow_a_gpu_down():
    slow = replace(GPU, uneven={"float32": {"n": 1e10}}, scattered_per_second=1e6, passes={"mean": [Rate((8,), 1e3)]})
    product = Kernel("mm", 0, 2 * 1024**3, shape=(1, 1024, 1024, 1024))
    assert slow.kernel_time(product, "float32") == pytest.approx(2 * 1024**3 / 1e11, rel=1e-3)
    assert slow.kernel_time(replace(product, uneven="kn"), "float32") == pytest.approx(2 * 1024**3 / 1e10, rel=1e-3)
    one_row = Kernel("mm", 0, 2 * 1024**2, shape=(1, 1, 1024, 1024), uneven="n")
    assert slow.kernel_time(one_row, "float32") == pytest.approx(2 * 1024**2 / 1e9)
    assert slow.kernel_time(Kernel("mul", 8, num_scattered=1000), "float32") == pytest.approx(1e-3)
    assert slow.kernel_time(Kernel("mean", 1000), "float32") == pytest.approx(1)
    wide = replace(slow, passes={"sum": [Rate((8,), 1e3), Rate((32,), 4e3)]})
    assert wide.kernel_time(Kernel("sum", 1000, width=16), "float32") == pytest.approx(0.5)


def test_kernels_of_a_decoded_token_have_rates_of_their_own():
    both = Kernel("multiply_row", 0, 2 * 1024 * 1024, shape=(2, 1, 512, 1024))
    assert MACHINE.kernel_time(both, "float32") == pytest.approx(2 * 1024 * 1024 / 2e9)
    moments = replace(MACHINE, passes={"moments": [Rate((64,), 1e9)]}, kernel_seconds=1.0)
    assert moments.kernel_time(Kernel("moments", 1000, width=64), "float32") == pytest.approx(
        1e-6
    )  # no launch of its own
    choosing = replace(MACHINE, chosen_per_second=1e6)  # of 64 rows as of one
    assert choosing.kernel_time(Kernel("argmax", 64 * 4000, width=1000), "float32") == pytest.approx(1e-3)
    run = Counter()
    run.kernels, run.in_graph = [Kernel("multiply_row", 0, 2 * 1024 * 1024, shape=(2, 1, 512, 1024))], True
    started = replace(MACHINE, graph_seconds=1.0).seconds(run, "float32", "decode")
    assert started == pytest.approx(1 + MACHINE.seconds(run, "float32", "decode"))
    attention = Kernel("attend_row", 1 << 20, 0, attention=(8, 1024, 64))
    assert MACHINE.kernel_time(attention, "float32") == pytest.approx((1 << 20) / 1e9)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("config", [toy(), preset("gpt2")], ids=["toy", "gpt2"])
def test_the_graph_of_a_decoded_token_is_laid_out(config, batch):
    """Every matrix read once and multiplied once, as the formulas say; the cache is as long as the context."""
    workload = workload_of(config, "decode", 24, batch=batch, device_type="cuda")
    assert in_graph(workload)
    run = lay_out(workload)
    names = [kernel.name for kernel in run.kernels]
    assert names.count("attend_row") == len(workload.config.decoder.layers)
    assert ("multiply_row" in names) == (batch == 1)
    assert run.flops == sum(row.flops for row in table_rows(operations(workload), workload))
    longer = replace(workload, context=32)
    turning = {
        layer.attention for layer in workload.config.decoder.layers if isinstance(layer.attention.position, Rope)
    }
    angles = sum(4 * attention.head_width for attention in turning)  # a cosine and a sine for every pair, in float32
    more = cache_bytes(longer) - cache_bytes(workload) + (longer.context - workload.context) * angles
    assert footprint(longer).peak - footprint(workload).peak == more
    assert predict_seconds(workload, GPU) == pytest.approx(
        sum(GPU.kernel_time(kernel, "float32") for kernel in run.kernels)
    )


def test_the_graph_reads_a_window_and_keeps_all():
    config = toy()
    layers = [
        replace(one, attention=replace(one.attention, pattern=SlidingWindow(size=5))) for one in config.decoder.layers
    ]
    windowed = workload_of(
        replace(config, decoder=replace(config.decoder, layers=tuple(layers))), "decode", 24, device_type="cuda"
    )
    run, whole = lay_out(windowed), lay_out(replace(windowed, config=config))
    assert run.flops == sum(row.allowed_flops for row in table_rows(operations(windowed), windowed)) < whole.flops
    read, of_all = ({kernel.num_bytes for kernel in one.kernels if kernel.name == "attend_row"} for one in (run, whole))
    assert {24 * size for size in read} == {5 * size for size in of_all}
    assert run.peak_bytes == whole.peak_bytes


def test_other_models_decode_without_a_graph():
    assert not in_graph(workload_of(preset("bloom-560m"), "decode", 24, device_type="cuda"))
    assert not in_graph(workload_of(CASES["llama-3.1-8b"], "decode", 24))


def test_kept_in_a_file():
    assert load_calibration("cpu") is None
    with pytest.raises(ClearheadError, match="run: clearhead calibrate --device cpu"):
        device("cpu")
    save_calibration(MACHINE)
    assert load_calibration("cpu") == MACHINE
    assert device("cpu").peak("float32") == 1e11
    with pytest.raises(ClearheadError, match="no rate of bfloat16 is known for cpu; known are: float32"):
        device("cpu").peak("bfloat16")


@pytest.mark.parametrize("other", [{"machine": "abacus, 64 threads"}, {"torch": "0.1"}])
def test_what_was_measured_otherwise_is_told_of(other):
    save_calibration(replace(MACHINE, **other))
    sentence = (
        f"{next(iter(other.values()))}.*, and this is {MACHINE.machine}, torch .*clearhead calibrate --device cpu"
    )
    with pytest.warns(UserWarning, match=sentence):
        assert load_calibration("cpu") == replace(MACHINE, **other)


def test_a_precision_that_was_not_measured_keeps_what_was_counted():
    counted = compare(workload_of(CASES["gpt2"], "decode", 8, dtype="float64"), MACHINE)
    assert [row.what for row in counted] == ["FLOPs", "bytes moved", "peak bytes"]


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"traffic": [1]})])
def test_a_damaged_file_is_named(text):
    path = calibration_path("cpu")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ClearheadError, match="is not a calibration of this version; run clearhead calibrate again"):
        load_calibration("cpu")


def test_measures_this_machine(monkeypatch):
    """With few and small points: what comes out is positive and predicts something."""
    for name, value in {
        "DTYPES": {"cpu": ("float32",)},
        "GRIDS": {"cpu": ((1, 16), (64,), (64, 128))},
        "LENGTHS": {"cpu": (1, 16)},
        "TRAFFIC_BYTES": (1 << 12, 1 << 20),
        "COLD_BYTES": {"cpu": 1 << 20},
    }.items():
        monkeypatch.setattr(calibrate, name, value)
    monkeypatch.setattr("clearhead.costs.calibration.clock.POINT_SECONDS", {"cpu": 0.001})
    monkeypatch.setattr("clearhead.costs.calibration.host.STEP_SECONDS", {"cpu": 0.01})
    monkeypatch.setattr(calibrate, "measure_packed", lambda quant: {"layer_seconds": 1e-5})
    found = calibrate.measure_machine("cpu")
    rates = [rate for table in (found.products, found.attention, found.attention_backward) for rate in table["float32"]]
    assert all(rate.per_second > 0 for rate in rates)
    assert found.bytes_per_second > 1e8
    assert all(1e-7 < found.host_seconds[phase]["each"] < 1e-2 for phase in ("train", "prefill", "decode"))
    save_calibration(found)
    assert load_calibration("cpu") == found
    with pytest.raises(ClearheadError, match="unknown device to measure 'gpu'"):
        calibrate.measure_machine("gpu")


def test_what_only_a_gpu_is_asked(monkeypatch):
    """The same code on the CPU, where it says nothing about a GPU but runs."""
    monkeypatch.setattr(gpu_rates, "HEAD_SIZES", (16, 33, 32))
    monkeypatch.setattr(gpu_rates, "HEADS_SHAPE", (2, 8, 4, 32))
    monkeypatch.setattr(gpu_rates, "NUM_ROWS", 8)
    monkeypatch.setattr("clearhead.costs.calibration.clock.POINT_SECONDS", {"cpu": 0.001})
    assert set(gpu_rates.measure_uneven("cpu", "float32")) == set("mnk")
    assert gpu_rates.measure_scattered("cpu") > 0
    assert gpu_rates.measure_choice("cpu") > 0
    names = {kernel.name for kernel in lay_out(workload_of(CASES["gpt2"], "train", 8)).kernels}
    names |= {kernel.name for kernel in lay_out(workload_of(toy(), "train", 8)).kernels}
    passes = gpu_rates.measure_passes("cpu")
    assert set(passes) <= names
    assert [rate.shape for rate in passes["sum"]] == [(width,) for width in gpu_rates.WIDTHS]
    for num_queries in (1, 8):
        assert set(longer_seconds("cpu", num_queries)) == {"mm", "addmm", "attention"}


def test_predicted_beside_measured():
    """By the counter both agree; the clock is asked, but a made-up machine keeps no time."""
    for phase in ("train", "prefill", "decode"):
        rows = {row.what: row for row in compare(workload_of(CASES["llama-3.1-8b"], phase, 24), MACHINE)}
        assert rows["FLOPs"].ratio == 1
        assert rows["bytes moved"].ratio == pytest.approx(1, rel=0.03)
        assert rows["peak bytes"].ratio == pytest.approx(1, rel=0.03)
        assert rows["seconds"].measured > 0


def test_a_training_step_ends_with_adamw():
    workload = workload_of(CASES["gpt2"], "train", 8)
    run = lay_out(workload)
    weights = 4 * sum(parameter.numel() for parameter in build(workload, "meta").parameters())
    expected = MACHINE.seconds(run, "float32", "train") + weights / 2e8
    assert predict_seconds(workload, MACHINE) == pytest.approx(expected)


def test_only_what_runs_here_is_measured():
    with pytest.raises(ClearheadError, match="with quant only one row decoded on a CPU in int8 or int4"):
        compare(workload_of(CASES["llama-3.1-8b"], "prefill", 8, quant="int8"))


@pytest.mark.parametrize(
    ("config", "options", "known"),
    [
        (toy(), {}, True),
        (toy(), {"batch": 2}, False),
        (toy(), {"quant": "q4_0"}, False),
        (toy(), {"device_type": "cuda"}, False),
        (CASES["deepseek-v3"], {}, False),
    ],
    ids=["decoded by kernels", "batch", "format", "device", "latent attention"],
)
def test_packed_weights_are_predicted_where_our_kernels_run_them(config, options, known):
    workload = workload_of(config, "decode", 24, **({"quant": "int4", "batch": 1} | options))
    rates = {"weight_bytes_per_second": 1e9, "layer_seconds": 1e-3, "cache_bytes_per_second": 1e6}
    packed = replace(MACHINE, packed={"int4": rates, "q4_0": rates})
    assert is_predicted(workload, packed) == known
    assert not is_predicted(workload, MACHINE)
    if known:
        layers = 1e-3 * len(workload.config.decoder.layers)
        expected = weight_bytes(workload) / 1e9 + layers + cache_bytes(workload) / 1e6
        assert predict_seconds(workload, packed) == pytest.approx(expected)


def test_packed_rates_of_this_machine(monkeypatch):
    monkeypatch.undo()  # the kernels are built once, in the home of all tests
    monkeypatch.setattr(packed_rates, "MEASURED_SECONDS", 0.05)
    monkeypatch.setattr(packed_rates, "WIDE", (256, 1024))
    rates = packed_rates.measure_packed("int4")
    assert 1e-7 < rates["layer_seconds"] < 1e-2
    assert rates["cache_bytes_per_second"] > 1e7
    workload = workload_of(toy(), "decode", 24, quant="int4", batch=1)
    assert [row.what for row in compare(workload, replace(MACHINE, packed={"int4": rates}))] == ["seconds"]


def test_what_does_not_fit_is_not_begun(monkeypatch):
    """Weights alone take 4 bytes each while the network is made, also those of bfloat16."""
    workload = workload_of(CASES["gpt2"], "decode", 8, dtype="bfloat16")
    monkeypatch.setattr(
        "clearhead.costs.calibration.compare.encoder_output_of",
        lambda device: 4 * sum(parameters(workload.config).values()) - 1,
    )
    with pytest.raises(
        ClearheadError, match=r"this run needs .* GB, and there are .* GB here; measure a shorter context"
    ):
        compare(workload)


def test_predicted_and_measured_are_told_in_units(capsys):
    print_comparisons(
        [Comparison("FLOPs", 3.1e7, 3.1e7), Comparison("peak bytes", 6e7, 6e7), Comparison("seconds", 0.013, 0.026)],
        "cpu",
    )
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("31 M", "60 MB", "13 ms", "26 ms", "0.500"))


def test_curves_have_their_slopes(tmp_path, monkeypatch):
    """Points counted lie on the lines; doubling n doubles what is O(n) and more than doubles what is not."""
    monkeypatch.setattr("clearhead.costs.curves.CLOCK_SECONDS", 0.01)
    drawn = measure_curves(MACHINE, lengths=(256, 512))
    for curve in drawn:
        assert all(point.flops == point.counted_flops for point in curve.points)
        assert all(point.measured_seconds > 0 for point in curve.points)
    whole, token, recurrent = ([point.flops for point in curve.points] for curve in drawn)
    assert whole[1] > 2.5 * whole[0]
    assert token[0] < token[1] < 2 * token[0]
    assert recurrent[1] == 2 * recurrent[0]
    draw_curves(drawn, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_curves_of_a_gpu_are_in_what_is_measured_there(phase, monkeypatch):
    """Run on the CPU here: in bfloat16, and in kernels that the counter sees."""
    monkeypatch.setattr(curve_room, "build", lambda workload, device: build(workload, "cpu"))
    monkeypatch.setattr(curve_room, "clock", lambda *step: 1.0)
    tables = {name: {"bfloat16": getattr(GPU, name)["float32"]} for name in ("products", "attention")}
    point = curve_room.transformer_point(phase, 16, replace(GPU, **tables))
    assert point.flops == point.counted_flops > 0
    assert point.seconds > 0
