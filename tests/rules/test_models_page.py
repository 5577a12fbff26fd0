"""docs/models.md lists every model type as the code has it."""

from clearhead.families import FAMILIES, GGUF_ARCHITECTURES
from tests.parity.config_types import ENCODERS, SPEECH_MODELS, TYPES
from tests.parity.registry import OF_DECODERS, OF_ENCODERS, comparisons
from tests.rules.models_page import NOT_IN_GGUF, PAGE, WRITTEN_AS, page
from tests.rules.models_size import names_elsewhere


def test_the_page_is_up_to_date():
    """If this fails, run `python -m tests.rules.models_page`."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_model_type_has_a_row_and_a_test():
    text = PAGE.read_text(encoding="utf-8")
    for family in FAMILIES:
        for model_type in family.model_types:
            assert f"| `{model_type}` |" in text


def test_every_model_type_has_a_gguf_architecture_or_a_reason_why_not():
    rows = {row.model_type for row in GGUF_ARCHITECTURES.values()}
    groups = [rows, WRITTEN_AS.keys(), NOT_IN_GGUF.keys()]
    model_types = {model_type for family in FAMILIES for model_type in family.model_types}
    assert set().union(*groups) == model_types
    assert sum(map(len, groups)) == len(model_types)


def test_every_class_is_compared_in_every_way():
    for model_type, (class_name, _) in TYPES.items():
        # The transcripts of speech models are compared in tests/transcription.
        required = OF_ENCODERS if model_type in ENCODERS | SPEECH_MODELS else OF_DECODERS
        not_saved = {"saved"} if model_type == "led" else set()  # transformers needs more than we keep
        assert required - comparisons()[class_name].checks == not_saved, class_name


def test_names_of_models_do_not_spread():
    """A new family needs its name nowhere but in families/."""
    allowed = {"checkpoint", "course", "studies", "tokenization"}
    assert names_elsewhere().keys() == allowed
    assert sum(map(len, names_elsewhere().values())) <= 30
