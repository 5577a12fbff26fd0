"""Calibration: what this machine does. Measured rates of its kernels, and times that are predicted from them.

    calibration = measure_machine("cpu"); predict_seconds(workload, calibration)

rates          Calibration: the measured rates, saved in a file, and the time of a kernel from them
timing         how long a function takes on a CPU or a GPU
progress       parts of a measurement: progress, and continuing after an interruption
measurement    measure_machine: bandwidth, matrix products, attention, optimizer, host overhead
gpu_rates      kernels that are slower than their size says, and those of a CUDA graph
toy_networks   host time per operation, and packed weights on a CPU, measured with toy networks
prediction     predict_seconds: a workload to seconds
comparison     a workload predicted and measured side by side
devices        published peaks of GPUs, and this machine as measured

This package builds on `formulas` and `simulation`.
"""

from clearhead.costs.calibration.comparison import Comparison, compare_with_measurement, prepare_trial
from clearhead.costs.calibration.devices import Device, device_for_gpu, find_device
from clearhead.costs.calibration.measurement import measure_machine, measure_once
from clearhead.costs.calibration.prediction import can_predict, predict_seconds
from clearhead.costs.calibration.rates import Calibration, best_of, load_calibration, save_calibration
from clearhead.costs.calibration.timing import time_repeats, time_step
from clearhead.costs.calibration.toy_networks import UNUSUAL_HEAD_WIDTH, measure_host_seconds, toy_llama

__all__ = [
    "UNUSUAL_HEAD_WIDTH",
    "Calibration",
    "Comparison",
    "Device",
    "best_of",
    "can_predict",
    "compare_with_measurement",
    "device_for_gpu",
    "find_device",
    "load_calibration",
    "measure_host_seconds",
    "measure_machine",
    "measure_once",
    "predict_seconds",
    "prepare_trial",
    "save_calibration",
    "time_repeats",
    "time_step",
    "toy_llama",
]
