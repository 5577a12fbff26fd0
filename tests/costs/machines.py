"""Invented machines with round rates, for tests that turn kernels into seconds.

MACHINE.kernel_time(kernel, "float32"); GPU.run_time(run, "float32", "decode")
"""

from dataclasses import replace

import torch

from clearhead.costs.calibration.rates import Calibration, Rate, Traffic, machine_name

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
