"""Write the reference pages of the site from the code: the Python API, all packages, and the command line.

    pages = reference_pages()   # {"api.md": "# Python API ...", "packages.md": ..., "cli.md": ...}

Docstrings are shown as they are written, since they are plain text; statements of the book that they cite become links.
"""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

import clearhead
from clearhead.cli.app import app

_SOURCE = Path(clearhead.__file__).parent
_CITATION = re.compile(r"\bbook ((?:[A-F]\d+(?:, |-| and | to )?)+)")
_SENTINEL = re.compile(r"<[\w.]+ object at 0x[0-9a-f]+>")


def reference_pages() -> dict[str, str]:
    """Return the text of each page by file name."""
    return {"api.md": _api_page(), "packages.md": _packages_page(), "cli.md": _cli_page()}


def _api_page() -> str:
    parts = ["# Python API\n\nThe names of `import clearhead`, from their docstrings."]
    for name in clearhead.__all__:
        parts.append(_documented(name, getattr(clearhead, name), level=2))
    return "\n\n".join(parts) + "\n"


def _documented(name: str, value: Any, level: int) -> str:
    """Return a section about a function or a class with its public methods."""
    parts = [f"{'#' * level} {name}", _signature(name, value), _docstring(value)]
    if inspect.isclass(value) and level == 2:
        for attribute, member in vars(value).items():
            function = getattr(member, "__func__", member)
            if inspect.isfunction(function) and not attribute.startswith("_") and function.__doc__:
                parts.append(_documented(f"{name}.{attribute}", function, level + 1))
    return "\n\n".join(part for part in parts if part)


def _signature(name: str, value: Any) -> str:
    try:
        signature = _SENTINEL.sub("...", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return ""
    return f"```text\n{name}{signature}\n```"


def _docstring(value: Any) -> str:
    """Return a docstring as text: its first line as a sentence, the rest as it is written, and links to the book."""
    text = inspect.getdoc(value) or ""
    first, _, rest = text.partition("\n")
    parts = [_escape(first)] if first else []
    if rest.strip():
        parts.append(f"```text\n{rest.strip(chr(10))}\n```")
    cited = dict.fromkeys(number for group in _CITATION.findall(text) for number in re.findall(r"[A-F]\d+", group))
    if cited:
        parts.append("In the book: " + ", ".join(f"[{number}](#{number})" for number in cited) + ".")
    return "\n\n".join(parts)


def _escape(text: str) -> str:
    return re.sub(r"([\\*_<>\[\]{}|$#])", r"\\\1", text)


def _packages_page() -> str:
    parts = ["# Packages\n\nWhat each package is for, its modules, and the names that other packages may use."]
    for folder in sorted(path.parent for path in _SOURCE.glob("*/__init__.py")):
        module = import_module(f"clearhead.{folder.name}")
        names = ", ".join(f"`{name}`" for name in getattr(module, "__all__", ()))
        parts.append(f"## clearhead.{folder.name}\n\n{_docstring(module)}" + (f"\n\nExports: {names}" if names else ""))
        for path in sorted(folder.glob("*.py")):
            text = inspect.cleandoc(_module_docstring(path))
            cited = [each for group in _CITATION.findall(text) for each in re.findall(r"[A-F]\d+", group)]
            links = "".join(f" [{each}](#{each})" for each in dict.fromkeys(cited))
            if path.stem != "__init__":
                parts.append(f"- `{folder.name}/{path.name}`: {_escape(text.partition(chr(10))[0])}{links}")
    return "\n\n".join(parts) + "\n"


def _module_docstring(path: Path) -> str:
    import ast

    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", {})
    if path and not children:
        yield " ".join(path), command
    for name, child in sorted(children.items()):
        yield from _commands(child, (*path, name))


def _cli_page() -> str:
    parts = ["# Command line\n\nAll commands and options, from their help. `clearhead COMMAND --help` prints the same."]
    for name, command in _commands(typer.main.get_command(app)):
        arguments = " ".join(each.name.upper() for each in _arguments(command))
        parts += [f"## clearhead {name}", f"```text\nclearhead {name} {arguments} [OPTIONS]\n```".replace("  ", " ")]
        parts.append("\n\n".join(_escape(each) for each in inspect.cleandoc(command.help or "").split("\n\n")))
        rows = [(_names(each), _cell(each.help or ""), _default(each)) for each in command.params]
        parts.append("| argument or option | meaning | default |\n|---|---|---|\n" + "\n".join(map(_row, rows)))
        if command.epilog:
            parts.append(command.epilog)
    return "\n\n".join(parts) + "\n"


def _arguments(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "argument"]


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _cell(text: str) -> str:
    return _escape(" ".join(text.split()))


def _default(parameter: Any) -> str:
    value = parameter.default
    return "" if value is None or callable(value) or value in ((), False, "") else f"`{value}`"


def _row(cells: tuple[str, str, str]) -> str:
    return f"| {' | '.join(cells)} |"
