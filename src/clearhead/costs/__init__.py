"""What a model costs, before anything is run: parameters, FLOPs, bytes, memory and time.

    report = clearhead.cost(clearhead.preset("llama-3.1-8b"), phase="decode", context=8192, device="h200")

formulas      what a workload takes, as closed formulas from its config
simulation    what a workload runs, operation by operation, on the meta device
calibration   what this machine does: measured rates, and times predicted from them
estimate      cost: all of it in one Report
report        Report: typed data, printed text and JSON
tables        tables of operations and comparisons
curves        how work grows with the length, as a plot
recurrent     FLOPs of the recurrent baseline
units         numbers with units

Of formulas, simulation and calibration, each depends only on those before it.
"""

from clearhead.costs.calibration import (
    Comparison,
    compare_with_measurement,
    device_for_gpu,
    find_device,
    load_calibration,
    measure_machine,
    save_calibration,
)
from clearhead.costs.curves import draw_curves, measure_curves
from clearhead.costs.estimate import cost, model_flops
from clearhead.costs.formulas import (
    Workload,
    active_parameters,
    cache_bytes_per_token,
    layer_parameters,
    operation_costs,
    parameters_by_part,
    shard_config,
    shard_heads,
)
from clearhead.costs.recurrent import recurrent_flops
from clearhead.costs.report import Report, print_report, report_to_dict
from clearhead.costs.simulation import KernelCounter, estimate_memory
from clearhead.costs.tables import print_comparisons

__all__ = [
    "Comparison",
    "KernelCounter",
    "Report",
    "Workload",
    "active_parameters",
    "cache_bytes_per_token",
    "compare_with_measurement",
    "cost",
    "device_for_gpu",
    "draw_curves",
    "estimate_memory",
    "find_device",
    "layer_parameters",
    "load_calibration",
    "measure_curves",
    "measure_machine",
    "model_flops",
    "operation_costs",
    "parameters_by_part",
    "print_comparisons",
    "print_report",
    "recurrent_flops",
    "report_to_dict",
    "save_calibration",
    "shard_config",
    "shard_heads",
]
