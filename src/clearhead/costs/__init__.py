"""What a model costs before it is paid for: parameters, FLOPs, bytes, memory and time.

clearhead.cost(clearhead.preset("llama-3.1-8b"), phase="decode", context=8192, device="h200")

workload     the question                             operations  every matrix product (attention, product)
parameters   how many, part by part                   memory      weights, activations, cache; what fits
devices      peaks, and this machine as measured      report      all of it in one answer (tables: printed)
counter      what PyTorch really runs                 layout      the same without running (running: the steps)
calibration  kernels to seconds                       measure     predicted beside measured (curves: plotted)
calibrate    measures (host, …_rates)                 clock       how long something takes
graphed      a token in a CUDA graph                  predict     a workload to seconds
parallel     what GPUs send each other                share       a model as one of them holds it
"""

from clearhead.costs.calibration.calibration import (
    Calibration,
    fastest,
    load_calibration,
    save_calibration,
)
from clearhead.costs.calibration.clock import (
    clock,
    several_seconds,
)
from clearhead.costs.calibration.compare import (
    Comparison,
    begin,
    compare,
)
from clearhead.costs.calibration.devices import (
    device,
    device_named,
)
from clearhead.costs.calibration.host import (
    host_seconds,
)
from clearhead.costs.calibration.measure_machine import (
    measure_machine,
    measure_once,
)
from clearhead.costs.calibration.predict import (
    predict_seconds,
)
from clearhead.costs.curves import draw_curves, measure_curves
from clearhead.costs.formulas.memory import (
    footprint,
)
from clearhead.costs.formulas.workload import (
    Workload,
)
from clearhead.costs.report import cost, utilization
from clearhead.costs.simulation.workload_steps import (
    in_graph,
)
from clearhead.costs.tables import (
    as_data,
    print_comparisons,
    print_report,
)

__all__ = [
    "Calibration",
    "Comparison",
    "Workload",
    "as_data",
    "begin",
    "clock",
    "compare",
    "cost",
    "device",
    "device_named",
    "draw_curves",
    "fastest",
    "footprint",
    "host_seconds",
    "in_graph",
    "load_calibration",
    "measure_curves",
    "measure_machine",
    "measure_once",
    "predict_seconds",
    "print_comparisons",
    "print_report",
    "save_calibration",
    "several_seconds",
    "utilization",
]
