"""docs/models.md lists every model type as the code has it."""

from clearhead.families import FAMILIES
from tests.rules.models_page import PAGE, page


def test_the_page_is_up_to_date():
    """If this fails, run `python -m tests.rules.models_page`."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_model_type_has_a_row_and_a_test():
    text = PAGE.read_text(encoding="utf-8")
    for family in FAMILIES:
        for model_type in family.model_types:
            assert f"| `{model_type}` |" in text
    assert "`—`" not in text
