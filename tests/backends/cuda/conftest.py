"""Spare Triton's interpreter work that has no effect on what a kernel computes.

For each call of one kernel function by another, the interpreter replaces some three hundred functions of
`triton.language` again, and restores them only after the launch. This took almost half of the time of these tests.
"""

from collections.abc import Iterator
from contextlib import suppress

import pytest


@pytest.fixture(scope="session", autouse=True)
def functions_are_replaced_once_in_a_launch() -> Iterator[None]:
    """Let the interpreter remember during a launch for which kernel functions it has replaced the language."""
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError, AttributeError):  # without Triton, or with a version that has other internals
            _replace_once(patch)
        yield


def _replace_once(patch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    replace, nothing_to_restore = interpreter._patch_lang, interpreter._LangPatchScope
    launch, replaced = interpreter.GridExecutor.__call__, set()

    def replace_once(function):
        if function in replaced:
            return nothing_to_restore()
        replaced.add(function)
        return replace(function)

    def start_afresh(executor, *arguments, **options):
        replaced.clear()
        return launch(executor, *arguments, **options)

    patch.setattr(interpreter, "_patch_lang", replace_once)
    patch.setattr(interpreter.GridExecutor, "__call__", start_afresh)
