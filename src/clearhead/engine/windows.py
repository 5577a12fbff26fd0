"""Which tokens a sequence still needs, for models whose layers all attend to a window or a chunk. No torch.

windows = windows_of(config.output_stack); first = first_needed(windows, position)
"""

from clearhead.architecture import Chunked, SlidingWindow, Stack

Windows = tuple[SlidingWindow | Chunked, ...]


def windows_of(stack: Stack) -> Windows:
    """Return the distinct windows and chunks of a stack; nothing if a layer attends to all earlier tokens."""
    patterns = {layer.attention.pattern for layer in stack.layers}
    windows = tuple(pattern for pattern in patterns if isinstance(pattern, SlidingWindow | Chunked))
    return windows if len(windows) == len(patterns) else ()


def first_needed(windows: Windows, position: int) -> int:
    """Return the first token that a token at `position`, or a later one, attends to in any layer."""
    if not windows:
        return 0
    return min(
        position // window.size * window.size if isinstance(window, Chunked) else max(position - window.size + 1, 0)
        for window in windows
    )
