"""The snippets with OpenAI's client in README.md and docs/serving.md print an answer of a running server."""

import re
from pathlib import Path

import pytest

from tests.server.toys import serve, toy_model

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/serving.md"])
def test_snippet_prints_an_answer(page, capsys):
    text = (ROOT / page).read_text(encoding="utf-8")
    snippets = [each for each in re.findall(r"```text\n(.*?)```", text, re.DOTALL) if "from openai" in each]
    assert len(snippets) == 1
    with serve(toy_model(), names=("smollm2",)) as server:
        code = snippets[0].replace("http://127.0.0.1:8000", server.url)
        assert code != snippets[0]
        exec(compile(code, page, "exec"), {})
    assert capsys.readouterr().out.strip()
