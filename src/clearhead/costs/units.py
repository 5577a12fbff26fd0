"""Numbers with units, for people to read.

format_amount(1.6e10, "B"); format_seconds(0.0031)   # 16 GB, 3.1 ms
"""

_PREFIXES = (("Z", 1e21), ("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_DURATIONS = (  # unit, its seconds, and the seconds from which it is used
    ("years", 31_556_952.0, 2 * 31_556_952.0),
    ("days", 86_400.0, 2 * 86_400.0),
    ("hours", 3_600.0, 2 * 3_600.0),
    ("minutes", 60.0, 2 * 60.0),
    ("s", 1.0, 1.0),
    ("ms", 1e-3, 1e-3),
)


def format_amount(number: float, unit: str) -> str:
    """Return a number with four digits, an SI prefix and a unit."""
    for prefix, size in _PREFIXES:
        if number >= size:
            return f"{number / size:.4g} {prefix}{unit}"
    return f"{number:.4g} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration in a unit from microseconds to years."""
    unit, size = next(((unit, size) for unit, size, lowest in _DURATIONS if seconds >= lowest), ("µs", 1e-6))
    return f"{seconds / size:.4g} {unit}"


def format_rate(per_second: float) -> str:
    """Return a rate with four digits; a large one in full, with thousands separators."""
    return f"{per_second:,.0f}" if per_second >= 1000 else f"{per_second:.4g}"
