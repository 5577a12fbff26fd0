"""Import the names that a package exports on first use, so that importing the package itself takes no time.

    __getattr__ = lazy_exports(__name__, {"launch": ["Launch", "current_launch"]})   # in an __init__.py

Python calls `__getattr__` of a module for names that it does not contain (PEP 562). Type checkers do not run it: for
them, the package also imports its names under `if TYPE_CHECKING`.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_exports(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package. names: for each of its modules, the names that the package exports."""
    modules = {name: module for module, exported in names.items() for name in exported}

    def import_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return import_name
