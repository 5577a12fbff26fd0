"""Write the reference pages of the site from the code: the Python API, all packages, and the command line.

    pages = reference_pages()   # {"api.md": "# Python API ...", "packages.md": ..., "cli.md": ...}

Docstrings are plain text: their paragraphs become paragraphs, descriptions of arguments a list, and what is indented or
set in columns is shown as it is written. Statements of the book that they cite become links.
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
_MODULE = re.compile(r"\b(?!torch\.)(?:[a-z_]\w*\.)+(?=[A-Za-z_])")  # clearhead.model.transformer. before Transformer
_OPTIONS_TYPE = re.compile(r"(\*\*\w+): \*<class '[\w.]+'>")
_ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): (.*)$")
_OPTION = re.compile(r"^    (\w+=.*?): (.*)$")
_MAX_SIGNATURE = 88  # characters of a line


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
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    text = _short_types(str(signature))
    if len(name + text) > _MAX_SIGNATURE:
        text = _signature_in_lines(signature)
    return f"```text\n{name}{text}\n```"


def _short_types(text: str) -> str:
    """Return a signature without self, the modules and quotes of its types and the addresses of its defaults."""
    text = _OPTIONS_TYPE.sub(r"\1", _SENTINEL.sub("...", text).replace("(self, ", "(").replace("(self)", "()"))
    return re.sub(r"(: |-> )'([\w. |]+)'", r"\1\2", _MODULE.sub("", text))


def _signature_in_lines(signature: inspect.Signature) -> str:
    """Return a signature with one parameter per line."""
    lines, stars = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not stars:
            lines.append("*")
        stars = stars or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        lines.append(_short_types(str(parameter)))
    returned = str(signature).rpartition(" -> ")
    arrow = _short_types(f" -> {returned[2]}") if returned[1] else ""
    return "(\n" + "".join(f"    {line},\n" for line in lines) + f"){arrow}"


def _docstring(value: Any) -> str:
    """Return a docstring as Markdown, with links to the statements of the book that it cites."""
    text = inspect.getdoc(value) or ""
    first, _, rest = text.partition("\n")
    parts = [_escape(first)] if first else []
    parts += [_paragraph(each) for each in re.split(r"\n\s*\n", rest.strip("\n")) if each.strip()]
    cited = dict.fromkeys(number for group in _CITATION.findall(text) for number in re.findall(r"[A-F]\d+", group))
    if cited:
        parts.append("In the book: " + ", ".join(f"[{number}](#{number})" for number in cited) + ".")
    return "\n\n".join(parts)


def _paragraph(text: str) -> str:
    """Return a paragraph as prose, as a list of arguments, or as it is written if its spaces matter."""
    lines = text.split("\n")
    if lines[0] == "Options:" and all(map(_OPTION.match, lines[1:])):
        found = [match.groups() for match in map(_OPTION.match, lines[1:]) if match]
        return "Options:\n\n" + "\n".join(f"- `{name}`: {_escape(meaning)}" for name, meaning in found)
    if any(line.startswith(" ") or "   " in line for line in lines):
        return f"```text\n{text}\n```"
    if not _ARGUMENT.match(lines[0]):
        return _escape(" ".join(lines))
    items: list[str] = []
    for line in lines:
        if found := _ARGUMENT.match(line):
            items.append(f"- `{found[1]}`: {_escape(found[2])}")
        else:
            items[-1] += f" {_escape(line)}"
    return "\n".join(items)


def _escape(text: str) -> str:
    """Escape what Markdown would interpret, except code between backquotes."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # a backquote without its partner
        return re.sub(r"([\\`*_<>\[\]{}|$#])", r"\\\1", text)
    return "`".join(
        piece if at % 2 else re.sub(r"([\\*_<>\[\]{}|$#])", r"\\\1", piece) for at, piece in enumerate(pieces)
    )


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
