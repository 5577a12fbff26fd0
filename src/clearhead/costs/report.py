"""The report of what a workload costs, as typed data, as text and as JSON.

    print_report(cost(preset("gpt2"), phase="decode"), "gpt2")

The text begins with the answer: time, tokens per second, memory and whether it fits the device. The book's tables F2 (a
whole sequence) and F3 (one token) follow with all constants.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clearhead.config import to_dict
from clearhead.costs.formulas import Communication, OperationCost, Workload, default_context
from clearhead.costs.simulation import MemoryEstimate
from clearhead.costs.tables import formula_table, legend, number_table
from clearhead.costs.units import format_amount, format_rate, format_seconds
from clearhead.terminal import TerminalConsole

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
    memory_bytes: float  # of the device
    source: str  # where the peak rates are from
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

    @property
    def fits(self) -> bool | None:
        """Whether the workload fits into the memory of the device; None without a device."""
        return None if self.bound is None else self.memory.peak <= self.bound.memory_bytes

    def __repr__(self) -> str:
        workload, memory = self.workload, format_amount(self.memory.peak, "B")
        sizes = f"{workload.phase}, batch {workload.batch:,}, context {workload.context:,}, {workload.dtype}"
        work = f"{format_amount(self.flops, 'FLOP')}, {format_amount(self.num_bytes, 'B')} moved"
        time = f", at least {format_seconds(self.bound.seconds)} on {self.bound.device}" if self.bound else ""
        time = f", does not fit {self.bound.device}" if self.bound and not self.fits else time
        return f"Report({sizes}: {self.total_parameters:,} parameters, {work}, peak memory {memory}{time})"

    def _repr_html_(self) -> str:
        """Show the printed report in a notebook."""
        console = TerminalConsole(record=True, file=StringIO(), width=120)
        print_report(self, "cost", console)
        return console.export_html(inline_styles=True, code_format='<pre style="line-height: 1.2">{code}</pre>')


def print_report(report: Report, title: str, console: Console | None = None) -> None:
    """Print the answer first (time, tokens per second, memory, whether it fits), then formulas and tables."""
    console = console or TerminalConsole()
    workload = report.workload
    console.print(f"[bold]{escape(title)}[/bold]: {_TITLES[workload.phase]}\n{_describe_workload(workload)}")
    console.print(_answer_table(report))
    has_two_stacks = workload.config.is_encoder_decoder
    limited_by = None if report.bound is None else report.bound.limited_by
    console.print("\n[bold]parameters[/bold]")
    console.print("; ".join(f"{part} {count:,}" for part, count in report.parameters.items()))
    console.print(f"\n[bold]operations[/bold]{' of one GPU' if workload.gpus > 1 else ''}")
    console.print(formula_table(report.operations, has_two_stacks))
    console.print(legend(report.operations), style="dim")
    console.print()
    console.print(number_table(report.operations, has_two_stacks, limited_by))
    console.print(
        "FLOPs: multiplications and additions of matrix products. FLOPs with mask: attention counts only the pairs "
        "of query and key that the mask allows. Bytes: every operand read and every result written, once.",
        style="dim",
    )
    saved = sum(operation.fused_score_bytes for operation in report.operations)
    if saved:
        console.print(
            f"Terms in brackets: a fused kernel neither writes nor reads its scores; without it, attention would move "
            f"{format_amount(saved, 'B')} more.",
            style="dim",
        )
    if workload.phase == "train":
        _print_training(report, console)
    if report.bound is not None:
        console.print(
            f"Limit: on {report.bound.device} ({escape(report.bound.source)}) an operation is compute-bound above "
            f"{report.bound.balance:.3g} FLOPs/byte and memory-bound below.",
            style="dim",
        )


def _describe_workload(workload: Workload) -> str:
    source = f", source {workload.source:,}" if workload.config.is_encoder_decoder else ""
    weights = f", weights in {workload.weights}" if workload.is_packed else ""
    gpus = f", {workload.gpus} GPUs with {workload.parallel}" if workload.gpus > 1 else ""
    context = f"context {workload.context:,}{_beyond_context(workload, workload.context)}"
    return f"batch {workload.batch:,}, {context}{source}, {workload.dtype}{weights}{gpus}"


def _beyond_context(workload: Workload, length: int) -> str:
    """Return a remark if a length exceeds the context that the model was designed for, else an empty text."""
    own = default_context(workload.config)
    return f" (beyond the model's own context of {own:,})" if length > own else ""


def _answer_table(report: Report) -> Table:
    """Return the answer as a table of two columns: what is asked, and the number."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _answer(report):
        table.add_row(name, escape(value))
    return table


def _answer(report: Report) -> Iterator[tuple[str, str]]:
    """Yield time, speed, memory, whether it fits, the sizes behind them and what several GPUs send."""
    bound, workload = report.bound, report.workload
    each = " per GPU" if workload.gpus > 1 else ""
    if bound is None:
        yield "time", "unknown without a device: h200, h100, a100, rtx-4090, l40s, or cpu or cuda for this machine"
    elif not report.fits:
        needed, has = (format_amount(size, "B") for size in (report.memory.peak, bound.memory_bytes))
        yield "time", f"none, since it does not fit: it needs {needed}{each}, and {bound.device} has {has}"
    elif bound.predicted_seconds is None:
        yield "time", f"at least {format_seconds(bound.seconds)} on {bound.device}"
        yield "speed", f"at most {format_rate(bound.tokens_per_second)} tokens/s"
    else:
        limit = f"at least {format_seconds(bound.seconds)}"
        yield "time", f"{format_seconds(bound.predicted_seconds)} on {bound.device}, predicted from its rates; {limit}"
        yield "speed", f"{format_rate(bound.tokens_per_second)} tokens/s"
    yield "memory", f"{format_amount(report.memory.peak, 'B')} peak{each}: {_memory_parts(report)}"
    if bound is not None:
        yield "fits", _describe_fit(report, bound)
    yield from _training_answer(report)
    active = "" if report.active_parameters == report.total_parameters else f", {report.active_parameters:,} active"
    yield "model", f"{report.total_parameters:,} parameters{active}"
    yield "work", f"{format_amount(report.flops, 'FLOP')}, {format_amount(report.num_bytes, 'B')} moved{each}"
    if report.cache_bytes_per_token and workload.phase != "train":
        yield "KV cache", f"{report.cache_bytes_per_token:,} bytes per token{each}"
    if report.communication is not None:
        sent = format_amount(report.communication.bytes_each_way, "B")
        seconds = f", {format_seconds(bound.communication_seconds)}" if bound else ""
        yield "sent", f"{sent} each way{seconds}: {report.communication.description}"


def _memory_parts(report: Report) -> str:
    sizes = {name: getattr(report.memory, part) for part, name in _MEMORY_PARTS.items()}
    return ", ".join(f"{name} {format_amount(size, 'B')}" for name, size in sizes.items() if size)


def _describe_fit(report: Report, bound: Bound) -> str:
    """Say whether the workload fits into the memory of the device, and what is the most that does."""
    workload, has = report.workload, format_amount(bound.memory_bytes, "B")
    length = "source" if workload.encodes_source else "context"
    longest = f"{length} {bound.largest_context:,}{_beyond_context(workload, bound.largest_context)}"
    if not report.fits:
        advice = [f"batch {bound.largest_batch:,}"] if bound.largest_batch else []
        advice += [longest] if bound.largest_context else []
        most = f"at most {' or '.join(advice)} does" if advice else "no batch or context does; use more GPUs with tp"
        return f"no: {bound.device} has {has}; {most}"
    return (
        f"yes: {bound.device} has {has}, enough for batch {bound.largest_batch:,} at this {length} or {longest} "
        "at this batch"
    )


def _training_answer(report: Report) -> Iterator[tuple[str, str]]:
    """Yield what a whole training run takes, if its number of tokens is given."""
    if report.training_flops is None or report.training_tokens is None:
        return
    total = format_amount(report.training_flops, "FLOP")
    yield "training", f"{report.training_tokens:,} tokens: {total}, 6 per token and active parameter"
    if report.bound is not None and report.fits:
        seconds = format_seconds(report.training_tokens / report.bound.tokens_per_second)
        limit = "at least " if report.bound.predicted_seconds is None else ""
        yield "", f"{limit}{seconds} at this speed"


def _print_training(report: Report, console: Console) -> None:
    """Print the FLOPs per token by both conventions, since an MFU has no meaning without its convention."""
    flops = report.model_flops
    console.print(
        f"FLOPs per token for MFU: {format_amount(flops.palm_flops_per_token, '')} (PaLM: 6·P + 12·L·N·H·T, L layers), "
        f"{format_amount(flops.causal_flops_per_token, '')} (attention without masked pairs); "
        f"P = {flops.matrix_parameters:,} weights that multiply a token"
    )


def report_to_dict(report: Report) -> dict[str, Any]:
    """Return a report with its totals as JSON data."""
    data = asdict(report) | {
        "total_parameters": report.total_parameters,
        "flops": report.flops,
        "allowed_flops": report.allowed_flops,
        "num_bytes": report.num_bytes,
        "intensity": report.intensity,
        "model_context": default_context(report.workload.config),
        "fits": report.fits,
    }
    if report.bound is not None and not report.fits:
        data["bound"]["tokens_per_second"] = None
    data["workload"]["config"] = to_dict(report.workload.config)
    for operation, operation_data in zip(report.operations, data["operations"], strict=True):
        operation_data["intensity"] = operation.intensity
    return data
