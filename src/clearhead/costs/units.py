"""Numbers with units, for people to read.

format_amount(1.6e10, "B"); format_seconds(0.0031)   # 16 GB, 3.1 ms
"""

_PREFIXES = (("Z", 1e21), ("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def format_amount(number: float, unit: str) -> str:
    """Return a number with four digits, an SI prefix and a unit."""
    for prefix, size in _PREFIXES:
        if number >= size:
            return f"{number / size:.4g} {prefix}{unit}"
    return f"{number:.4g} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration in seconds, milliseconds or microseconds."""
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("µs", 1e-6))
    return f"{seconds / size:.4g} {unit}"
