"""Calibration: kernels to seconds on an invented machine, and the saved file."""

import json
import math
from dataclasses import replace

import pytest

from clearhead.costs.calibration.devices import find_device
from clearhead.costs.calibration.rates import (
    Rate,
    Traffic,
    best_of,
    calibration_path,
    interpolate,
    load_calibration,
    save_calibration,
)
from clearhead.costs.simulation.counter import Kernel, KernelCounter
from clearhead.errors import ClearheadError
from tests.costs.machines import GPU, MACHINE, RATES


def run_of(*kernels, num_dispatches, in_graph=False):
    run = KernelCounter()
    run.kernels, run.num_dispatches, run.in_graph = list(kernels), num_dispatches, in_graph
    return run


# --- one kernel


def test_a_kernel_takes_the_longer_of_compute_and_traffic_and_at_least_the_shortest_time():
    assert MACHINE.kernel_time(Kernel("mul", 1 << 20), "float32") == pytest.approx((1 << 20) / 1e9)
    assert MACHINE.kernel_time(Kernel("mul", 8), "float32") == 1e-6
    product = Kernel("mm", 0, 2 * 1024**3, shape=(1, 1024, 1024, 1024))
    assert MACHINE.kernel_time(product, "float32") == pytest.approx(2 * 1024**3 / 1e11, rel=1e-3)
    attention = Kernel("flash", 1 << 20, 1000, attention_shape=(1, 1024, 64))
    assert MACHINE.kernel_time(attention, "float32") == pytest.approx((1 << 20) / 1e9)


def test_rates_are_interpolated_in_logarithms():
    """A grid point has its own rate; halfway between two, their geometric mean; beyond the grid, that of its edge."""
    assert interpolate(RATES, (1, 1024, 1024)) == pytest.approx(1e9)
    assert interpolate(RATES, (32, 1024, 1024)) == pytest.approx(math.sqrt(1e9 * 1e11))
    assert interpolate(RATES, (1 << 20, 1, 1 << 20)) == pytest.approx(1e11)
    corners = [Rate((a, b), 10.0**power) for (a, b), power in {(1, 1): 0, (1, 4): 2, (4, 1): 4, (4, 4): 6}.items()]
    assert interpolate(corners, (2, 2)) == pytest.approx(10.0**3)
    assert MACHINE.bandwidth(1 << 15) == pytest.approx(2e9)
    assert MACHINE.bandwidth(1) == pytest.approx(4e9)
    assert MACHINE.bandwidth(1 << 30) == pytest.approx(1e9)


def test_a_missing_grid_point_leaves_its_weight_to_the_others():
    rates = [Rate((1, 1), 10.0), Rate((4, 1), 1000.0), Rate((4, 4), 4.0)]
    assert interpolate(rates, (2, 1)) == pytest.approx(100)
    assert interpolate(rates, (1, 2)) == pytest.approx(10)
    with pytest.raises(ClearheadError, match=r"no rate near shape \(1, 4\) was measured on this machine"):
        interpolate(rates, (1, 4))


def test_unaligned_and_scattered_operands_and_reductions_are_slower_on_a_gpu():
    slow = replace(GPU, uneven={"float32": {"n": 1e10}}, scattered_per_second=1e6, passes={"mean": [Rate((8,), 1e3)]})
    product = Kernel("mm", 0, 2 * 1024**3, shape=(1, 1024, 1024, 1024))
    assert slow.kernel_time(product, "float32") == pytest.approx(2 * 1024**3 / 1e11, rel=1e-3)
    assert slow.kernel_time(replace(product, uneven_axes="kn"), "float32") == pytest.approx(
        2 * 1024**3 / 1e10, rel=1e-3
    )
    one_row = Kernel("mm", 0, 2 * 1024**2, shape=(1, 1, 1024, 1024), uneven_axes="n")
    assert slow.kernel_time(one_row, "float32") == pytest.approx(2 * 1024**2 / 1e9)
    assert slow.kernel_time(Kernel("mul", 8, num_scattered=1000), "float32") == pytest.approx(1e-3)
    assert slow.kernel_time(Kernel("mean", 1000), "float32") == pytest.approx(1)
    wide = replace(slow, passes={"sum": [Rate((8,), 1e3), Rate((32,), 4e3)]})
    assert wide.kernel_time(Kernel("sum", 1000, width=16), "float32") == pytest.approx(0.5)


def test_kernels_of_a_decode_step_have_their_own_rates():
    both = Kernel("multiply_row", 0, 2 * 1024 * 1024, shape=(2, 1, 512, 1024))
    assert MACHINE.kernel_time(both, "float32") == pytest.approx(2 * 1024 * 1024 / 2e9)
    moments = replace(MACHINE, passes={"moments": [Rate((64,), 1e9)]}, kernel_seconds=1.0)
    no_launch = moments.kernel_time(Kernel("moments", 1000, width=64), "float32")  # part of another kernel
    assert no_launch == pytest.approx(1e-6)
    argmax = replace(MACHINE, chosen_per_second=1e6)  # 64 rows take as long as one
    assert argmax.kernel_time(Kernel("argmax", 64 * 4000, width=1000), "float32") == pytest.approx(1e-3)
    run = run_of(both, num_dispatches=0, in_graph=True)
    started = replace(MACHINE, graph_seconds=1.0).run_time(run, "float32", "decode")
    assert started == pytest.approx(1 + MACHINE.run_time(run, "float32", "decode"))
    attention = Kernel("attend_row", 1 << 20, 0, attention_shape=(8, 1024, 64))
    assert MACHINE.kernel_time(attention, "float32") == pytest.approx((1 << 20) / 1e9)


# --- a run


def test_host_time_adds_up_on_a_cpu_and_overlaps_on_a_gpu():
    run = run_of(*[Kernel("mul", 8)] * 10, num_dispatches=20)
    assert MACHINE.run_time(run, "float32", "decode") == pytest.approx(10e-6 + 40e-6)
    assert MACHINE.run_time(run, "float32", "train") == pytest.approx(10e-6 + 20e-6)
    assert GPU.run_time(run, "float32", "decode") == pytest.approx(40e-6)
    run.in_graph = True
    assert GPU.run_time(run, "float32", "decode") == pytest.approx(10e-6)


def test_a_gpu_kernel_waits_for_its_launch():
    """During a long kernel the host gets ahead; before the first kernel and after the last one it is waited for."""
    long, short = Kernel("mul", 1 << 20), Kernel("mul", 8)
    run = run_of(replace(long, num_dispatches=5), replace(short, num_dispatches=10), num_dispatches=20)
    assert GPU.run_time(run, "float32", "decode") == pytest.approx(5 * 2e-6 + (1 << 20) / 1e9 + 1e-6)
    run.num_dispatches = 10_000
    assert GPU.run_time(run, "float32", "decode") == pytest.approx(10_000 * 2e-6)


def test_some_kinds_of_kernels_add_host_time():
    slow = replace(GPU, host_seconds={"decode": {"each": 2e-6, "addmm": 30e-6, "attention": 50e-6}})
    product = Kernel("addmm", 8, 8, shape=(1, 1, 2, 2), num_dispatches=1)
    attention = Kernel("flash", 8, 8, attention_shape=(1, 8, 64), num_dispatches=2)
    run = run_of(product, attention, num_dispatches=3)
    assert slow.run_time(run, "float32", "decode") == pytest.approx(3 * 2e-6 + 80e-6)


def test_launches_add_host_time():
    each, launch = 8.5e-6, 18e-6
    run = run_of(Kernel("mul", 8, num_dispatches=2), Kernel("mul", 8, num_dispatches=3), num_dispatches=4)
    slow = replace(GPU, host_seconds={"decode": {"each": each, "launch": launch}})
    assert slow.run_time(run, "float32", "decode") == pytest.approx(4 * each + 2 * launch)


# --- several passes and the file


def test_best_of_several_passes_takes_the_fastest_of_each_number():
    """More FLOPs and bytes per second, fewer seconds."""
    disturbed = replace(
        MACHINE,
        traffic=[Traffic(1 << 10, 3e9), Traffic(1 << 20, 2e9)],
        products={"float32": [RATES[0], Rate((1024, 1024, 1024), 2e11)]},
        kernel_seconds=3e-6,
        host_seconds=MACHINE.host_seconds | {"train": {"each": 5e-7}},
    )
    best = best_of([MACHINE, disturbed])
    assert best == best_of([disturbed, MACHINE])
    assert best == replace(
        MACHINE,
        traffic=[Traffic(1 << 10, 4e9), Traffic(1 << 20, 2e9)],
        products=disturbed.products,
        host_seconds=disturbed.host_seconds,
    )


def test_a_calibration_is_saved_and_loaded():
    assert load_calibration("cpu") is None
    with pytest.raises(ClearheadError, match="has not been measured; run: clearhead calibrate --device cpu"):
        find_device("cpu")
    save_calibration(MACHINE)
    assert load_calibration("cpu") == MACHINE
    assert find_device("cpu").peak("float32") == 1e11
    with pytest.raises(ClearheadError, match="the peak rate of cpu in bfloat16 is not known; use one of: float32"):
        find_device("cpu").peak("bfloat16")


@pytest.mark.parametrize("change", [{"machine": "abacus, 64 threads"}, {"torch": "0.1"}])
def test_a_calibration_of_another_machine_warns(change):
    save_calibration(replace(MACHINE, **change))
    message = (
        f"measured on .*{next(iter(change.values()))}.*, but this is {MACHINE.machine}, torch .*"
        "clearhead calibrate --device cpu"
    )
    with pytest.warns(UserWarning, match=message):
        assert load_calibration("cpu") == replace(MACHINE, **change)


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"traffic": [1]})])
def test_a_damaged_file_raises_an_error_that_names_it(text):
    path = calibration_path("cpu")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ClearheadError, match="is not a calibration of this version; run clearhead calibrate again"):
        load_calibration("cpu")
