"""What is printed passes through clearhead.terminal, which escapes control characters."""

import ast

from tests.rules.source import FILES, shown, tree_of

# Where text is written to a stream without a console, after it was escaped or because it is constant.
DIRECT_OUTPUT = {
    "cli/app.py": {"print", "sys.stderr.write"},
    "cli/demo.py": {"print"},
    "cli/train.py": {"typer.echo"},
    "training/checkpoints/run_folder.py": {"print"},
}
OUTPUT_CALLS = {"print", "typer.echo", "sys.stdout.write", "sys.stderr.write", "Console", "rich.print"}


def output_calls(tree):
    """Return the names of calls that print without escaping; a TextColumn that reads markup is one of them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in OUTPUT_CALLS:
                found.add(name)
            if name == "TextColumn" and not any(keyword.arg == "markup" for keyword in node.keywords):
                found.add("TextColumn without markup=False")
    return found


def test_output_passes_through_the_terminal_console():
    found = {shown(path): output_calls(tree_of(path)) for path in FILES}
    assert {name: calls for name, calls in found.items() if not calls <= DIRECT_OUTPUT.get(name, set())} == {}


def test_direct_output_is_found():
    source = "from rich.console import Console\nConsole().print(1)\nprint(2)\nTextColumn('x')"
    assert output_calls(ast.parse(source)) == {"Console", "print", "TextColumn without markup=False"}
