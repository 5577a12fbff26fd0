"""40 greedy tokens and 4 beams of every class that generates, compared with transformers' generate.

test_decoders.py does so for the rows of the decoder table.
"""

import pytest
import torch
import transformers

import clearhead
from tests.parity.config_types import DECODERS, TRANSLATORS
from tests.parity.decoder_cases import CASES
from tests.parity.generation import check_beams, check_greedy
from tests.parity.harness import Case, build_reference, load_network, randomize
from tests.parity.test_config_fields import keep_sinusoids
from tests.parity.test_t5 import draw_attention

NAMES = [name for name in DECODERS if name not in CASES]
SOURCES = ([11, 12, 13, 14, 15], [50, 40, 30, 20, 10, 9, 8, 7], [60, 33, 7])
# Of token embeddings and of other matrices: with these scales texts depend on their source and vary. Token embeddings
# are small, because a token would otherwise make itself the next one. No scales were found with which Marian's vary.
SCALES = {"bart": (0.2, 6), "pegasus": (0.1, 6), "m2m_100": (0.2, 6), "led": (0.1, 10), "t5": (0.1, 6)}
DEFAULT_SCALES = (0.02, 6)


def build(class_name, settings, **changes):
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**settings | changes | {"attn_implementation": "eager"})
    return model_class(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_forty_greedy_tokens_and_four_beams_of_a_decoder_agree(name, tmp_path):
    case = Case(name, lambda: build(*DECODERS[name]))
    model = build_reference(case)
    network = load_network(model, tmp_path)
    check_greedy(model, network, case, 40)
    check_beams(model, network, case, 12)


def draw_varied(name, model):
    """Return a function that draws weights with which a text depends on its source and varies."""
    token_scale, scale = SCALES.get(name, DEFAULT_SCALES)

    def draw(name, tensor):
        noise = torch.randn_like(tensor)
        if "shared" in name or "embed_tokens" in name:
            return token_scale * noise
        if "t5" in model.config.model_type:
            return draw_attention(name, tensor)
        if "layer_norm" in name or "layernorm" in name:
            return 0.1 * noise + (0 if name.endswith("bias") else 1)
        if name.endswith("final_logits_bias"):
            return 0.01 * noise
        if "embed_positions" in name or tensor.ndim == 1:
            fixed = keep_sinusoids(model, name, tensor)
            return 0.3 * noise if fixed is None else fixed
        return scale * noise * tensor.shape[-1] ** -0.5

    return draw


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSLATORS)
def test_forty_greedy_tokens_and_four_beams_of_an_encoder_decoder_agree(name, tmp_path):
    texts = check_texts(name, tmp_path)
    assert name == "marian" or len(set(texts)) > 2
    assert name == "marian" or max(len(set(text)) for text in texts) > 3


@torch.no_grad()
def check_texts(name, folder):
    """Compare 40 greedy tokens and 12 of the best of 4 beams, and return them for every source."""
    class_name, settings = TRANSLATORS[name]
    # transformers builds the cache of T5's decoder with the number of layers of the encoder
    changes = {"num_decoder_layers": settings["num_layers"]} if "t5" in name else {}
    model = build(class_name, settings, **changes).eval()
    torch.manual_seed(0)
    randomize(model, draw_varied(name, model))
    model.config.eos_token_id = model.config.forced_eos_token_id = None
    rules = {"eos_token_id": None, "forced_eos_token_id": None, "decoder_start_token_id": 0}
    if name == "m2m_100":  # transformers gives the tokens after a padding token other positions
        rules["bad_words_ids"] = [[model.config.pad_token_id]]
    model.generation_config.max_new_tokens, model.generation_config.max_length = None, 60
    model.generation_config.update(**rules)
    model.save_pretrained(folder)
    ours, texts = clearhead.load(folder), []
    for source in SOURCES:
        for count, beams in ((40, None), (12, 4)):
            theirs = model.generate(
                torch.tensor([source]), max_new_tokens=count, num_beams=beams or 1, do_sample=False, eos_token_id=None
            )
            texts.append(tuple(ours.generate(list(source), max_new_tokens=count, beams=beams).tokens))
            assert list(texts[-1]) == theirs[0, 1:].tolist()
    return texts
