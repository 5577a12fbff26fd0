"""The report of what a workload costs, as typed data, as text and as JSON.

    print_report(cost(preset("gpt2"), phase="decode"), "gpt2")

The text has the book's tables F2 (a whole sequence) and F3 (one token) with all constants, then memory and time.
"""

from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape

from clearhead.config import to_dict
from clearhead.costs.formulas import Communication, OperationCost, Workload
from clearhead.costs.simulation import MemoryEstimate
from clearhead.costs.tables import formula_table, legend, number_table
from clearhead.costs.units import format_amount, format_seconds

_TITLES = {
    "train": "one training step, forward and backward",
    "prefill": "prefill of a whole sequence",
    "decode": "one decode step with a KV cache, one token per sequence",
}
_MEMORY_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "logits",
    "cache": "KV cache",
    "cross_cache": "cross-attention KV cache",
}


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs per training token by the two conventions of model FLOPs utilization (MFU).

    P is the number of weights that a token is multiplied by. `palm`: 6·P + 12·L·N·H·T, which counts all pairs of
    queries and keys (Chowdhery et al. 2022, appendix B). `causal`: only the pairs that the mask allows, which is half
    of them for causal attention (Megatron) and at most the window of a layer. Every layer counts its own heads.
    """

    matrix_parameters: int  # P
    palm_flops_per_token: int
    causal_flops_per_token: int


@dataclass(frozen=True)
class Bound:
    """The roofline bound: the minimum time on a device, if every operation runs at the peak rate that limits it."""

    device: str
    source: str  # of the peak rates
    seconds: float
    communication_seconds: float  # included in `seconds`: added to it (tp), or overlapped with the computation
    tokens_per_second: float
    balance: float  # FLOPs per byte at which computing and moving data take equally long
    limited_by: list[Literal["compute", "memory"]]  # one entry per operation
    predicted_seconds: float | None  # from measured rates; None if the device or the workload is not calibrated
    largest_batch: int
    largest_context: int


@dataclass(frozen=True)
class Report:
    """What a workload costs. Operations and memory are those of one GPU."""

    workload: Workload
    parameters: dict[str, int]  # by part
    active_parameters: int
    operations: list[OperationCost]
    memory: MemoryEstimate
    cache_bytes_per_token: int
    model_flops: ModelFlops
    training_tokens: int | None
    training_flops: int | None  # 6 FLOPs per token and active parameter (Kaplan et al. 2020)
    communication: Communication | None
    bound: Bound | None

    @property
    def total_parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(self.parameters.values())

    @property
    def flops(self) -> int:
        """FLOPs of all operations; attention counts all pairs of queries and keys that its kernel receives."""
        return sum(operation.flops for operation in self.operations)

    @property
    def allowed_flops(self) -> int:
        """FLOPs of all operations; attention counts only the pairs that the mask allows."""
        return sum(operation.allowed_flops for operation in self.operations)

    @property
    def num_bytes(self) -> int:
        """Bytes that all operations read and write."""
        return sum(operation.num_bytes for operation in self.operations)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte moved."""
        return self.flops / self.num_bytes

    def __repr__(self) -> str:
        workload, memory = self.workload, format_amount(self.memory.peak, "B")
        sizes = f"{workload.phase}, batch {workload.batch:,}, context {workload.context:,}, {workload.dtype}"
        work = f"{format_amount(self.flops, 'FLOP')}, {format_amount(self.num_bytes, 'B')} moved"
        time = f", at least {format_seconds(self.bound.seconds)} on {self.bound.device}" if self.bound else ""
        return f"Report({sizes}: {self.total_parameters:,} parameters, {work}, peak memory {memory}{time})"

    def _repr_html_(self) -> str:
        """Show the printed report in a notebook."""
        console = Console(record=True, file=StringIO(), width=120, highlight=False)
        print_report(self, "cost", console)
        return console.export_html(inline_styles=True, code_format='<pre style="line-height: 1.2">{code}</pre>')


def print_report(report: Report, title: str, console: Console | None = None) -> None:
    """Print a report: parameters, operations, memory, communication and the bound on the time."""
    console = console or Console()
    workload = report.workload
    has_two_stacks = workload.config.is_encoder_decoder
    limited_by = None if report.bound is None else report.bound.limited_by
    active = "" if report.active_parameters == report.total_parameters else f", {report.active_parameters:,} active"
    console.print(f"[bold]{escape(title)}[/bold]: {report.total_parameters:,} parameters{active}")
    console.print("by part: " + "; ".join(f"{part} {count:,}" for part, count in report.parameters.items()))
    console.print(f"\n[bold]{_TITLES[workload.phase]}[/bold]\n{_describe_workload(workload)}")
    console.print(formula_table(report.operations, has_two_stacks))
    console.print(legend(report.operations), style="dim")
    console.print()
    console.print(number_table(report.operations, has_two_stacks, limited_by))
    console.print(
        "FLOPs: multiplications and additions of matrix products. Unmasked FLOPs: attention counts only the pairs of "
        "query and key that the mask allows. Bytes: every operand read and every result written, once.",
        style="dim",
    )
    console.print()
    if workload.phase == "train":
        _print_training(report, console)
    _print_memory(report, console)
    if report.communication is not None:
        sent = format_amount(report.communication.bytes_each_way, "B")
        seconds = f", {format_seconds(report.bound.communication_seconds)}" if report.bound else ""
        console.print(
            f"communication of {workload.gpus} GPUs: {report.communication.description}, {sent} each way{seconds}"
        )
    if report.bound is not None:
        _print_bound(report.bound, report.workload, console)


def _describe_workload(workload: Workload) -> str:
    source = f", source {workload.source:,}" if workload.config.is_encoder_decoder else ""
    quant = f", weights in {workload.quant}" if workload.quant else ""
    gpus = f", {workload.gpus} GPUs with {workload.parallel}, per GPU:" if workload.gpus > 1 else ""
    return f"batch {workload.batch:,}, context {workload.context:,}{source}, {workload.dtype}{quant}{gpus}"


def _print_training(report: Report, console: Console) -> None:
    """Print the FLOPs per token by both conventions, since an MFU has no meaning without its convention."""
    flops = report.model_flops
    console.print(
        f"FLOPs per token for MFU: {format_amount(flops.palm_flops_per_token, '')} (PaLM: 6·P + 12·L·N·H·T, L layers), "
        f"{format_amount(flops.causal_flops_per_token, '')} (attention without masked pairs); "
        f"P = {flops.matrix_parameters:,} weights that multiply a token"
    )
    if report.training_flops is not None and report.training_tokens is not None:
        console.print(
            f"training on {report.training_tokens:,} tokens: {format_amount(report.training_flops, 'FLOP')}, "
            f"6 per token and active parameter, of which there are {report.active_parameters:,}"
        )


def _print_memory(report: Report, console: Console) -> None:
    sizes = {name: getattr(report.memory, part) for part, name in _MEMORY_PARTS.items()}
    console.print("memory: " + ", ".join(f"{name} {format_amount(size, 'B')}" for name, size in sizes.items() if size))
    console.print(f"peak memory: {format_amount(report.memory.peak, 'B')}")
    if report.cache_bytes_per_token and report.workload.phase != "train":
        console.print(f"KV cache: {report.cache_bytes_per_token:,} bytes per token")


def _print_bound(bound: Bound, workload: Workload, console: Console) -> None:
    console.print(
        f"\non {bound.device} ({escape(bound.source)})\n"
        f"at least {format_seconds(bound.seconds)}: operations are compute-bound above {bound.balance:.3g} FLOPs/byte "
        "and memory-bound below"
    )
    rate = f"{bound.tokens_per_second:,.4g} tokens/s"
    if bound.predicted_seconds is None:
        console.print(f"at most {rate}")
    else:
        console.print(f"predicted from measured rates: {format_seconds(bound.predicted_seconds)}, {rate}")
    length = "source" if workload.encodes_source else "context"
    if bound.largest_batch == 0:
        advice = f"use {length} {bound.largest_context:,} or less" if bound.largest_context else "use more GPUs with tp"
        console.print(f"does not fit in memory with any batch at this {length}; {advice}")
        return
    console.print(
        f"fits in memory: batch {bound.largest_batch:,} at this {length}, or {length} {bound.largest_context:,} "
        "at this batch"
    )


def report_to_dict(report: Report) -> dict[str, Any]:
    """Return a report with its totals as JSON data."""
    data = asdict(report) | {
        "total_parameters": report.total_parameters,
        "flops": report.flops,
        "allowed_flops": report.allowed_flops,
        "num_bytes": report.num_bytes,
        "intensity": report.intensity,
    }
    data["workload"]["config"] = to_dict(report.workload.config)
    for operation, operation_data in zip(report.operations, data["operations"], strict=True):
        operation_data["intensity"] = operation.intensity
    return data
