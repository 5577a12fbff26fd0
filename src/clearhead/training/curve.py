"""Plot the losses in metrics.jsonl over the steps.

draw_loss_curve(Path("runs/x"))   # writes runs/x/loss.png
"""

from pathlib import Path

from clearhead.errors import ClearheadError
from clearhead.files import atomic_write
from clearhead.training.metrics import read_metrics


def draw_loss_curve(folder: Path) -> Path:
    """Write loss.png into a run folder and return its path. Raise ClearheadError if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ClearheadError('the loss curve needs matplotlib; run: pip install "clearhead[plot]"') from None
    rows = read_metrics(folder)
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    for name, label in (("loss", "training"), ("validation_loss", "validation")):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:  # a line through one point would be invisible
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) == 1 else None)
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "loss.png"
    with atomic_write(path) as partial:
        figure.savefig(partial, format="png", dpi=120)
    return path
