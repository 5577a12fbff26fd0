"""Every class of every model type: compared with transformers and saved again, or refused.

The main class of each type has tests of its own; see also the heads that classify in test_encoders.py.
"""

import pytest
import torch
import transformers

from clearhead.checkpoint.huggingface import load_folder, save_folder
from clearhead.errors import ClearheadError
from tests.parity.classes import REFUSED, further_classes, is_refused
from tests.parity.config_types import TYPES
from tests.parity.harness import randomize
from tests.parity.test_config_fields import draw_features, keep_sinusoids

CLASSES = [(model_type, name) for model_type in TYPES for name in further_classes(model_type)]
SAMPLE = ("LlamaModel", "GPT2ForTokenClassification", "RobertaForSequenceClassification", "BartForQuestionAnswering")
TARGET_START = 3


def build(model_type, class_name):
    """Return a toy of a class with random weights."""
    model_class, (_, settings) = getattr(transformers, class_name), TYPES[model_type]
    num_labels = 2 if class_name.endswith(("PreTraining", "QuestionAnswering")) else 3
    changes = {"num_labels": num_labels, "attn_implementation": "eager"}
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings | changes)).eval()
    randomize(model, lambda name, tensor: keep_sinusoids(model, name, tensor))
    return model


def make_batch(model):
    """Return tokens and their mask; the second text is shorter, and padded on the right."""
    tokens = torch.randint(6, 90, (2, 20), generator=torch.Generator().manual_seed(1))
    tokens[1, 12:] = model.config.pad_token_id
    mask = torch.ones_like(tokens)
    mask[1, 12:] = 0
    return tokens, mask


def outputs(model, network, tokens, mask):
    """Return transformers' output and ours: logits, or hidden states of a class without head."""
    target = {"decoder_input_ids": tokens[:, TARGET_START:]} if network.config.is_encoder_decoder else {}
    if network.config.reads_audio:
        features = draw_features(model.config).expand(len(tokens), -1, -1)
        theirs = model(input_features=features, use_cache=False, **target)
        return theirs.encoder_last_hidden_state, network.encode(features).states
    theirs = model(input_ids=tokens, attention_mask=mask, return_dict=True, use_cache=False, **target)
    if target:
        return theirs.encoder_last_hidden_state, network.encode(tokens, mask).states
    logits = getattr(theirs, "logits", getattr(theirs, "prediction_logits", None))
    if logits is None:
        return theirs.last_hidden_state, network.hidden_states(tokens, mask)
    ours = network(tokens, mask)
    return logits, ours.squeeze(-1) if ours.ndim > logits.ndim else ours


def check_class(model_type, class_name, folder):
    model = build(model_type, class_name)
    model.save_pretrained(folder / "theirs")
    if is_refused(class_name):
        with pytest.raises(ClearheadError):
            load_folder(folder / "theirs")
        return
    loaded = load_folder(folder / "theirs")
    tokens, mask = make_batch(model)
    with torch.no_grad():
        theirs, ours = outputs(model, loaded.network, tokens, mask)
        assert ours.shape == theirs.shape
        real = mask.bool() if ours.ndim > 1 and ours.shape[:2] == mask.shape else slice(None)
        assert theirs[real].abs().max() > 0.1
        assert (ours[real] - theirs[real]).abs().max() <= 1e-5
        if model_type == "led":  # Clearhead does not keep what it needs for marked tokens
            return
        save_folder(loaded.network, folder / "ours", loaded.family, loaded.special_ids)
        again = type(model).from_pretrained(folder / "ours", attn_implementation="eager").eval()
        assert torch.equal(outputs(again, loaded.network, tokens, mask)[0], theirs)


@pytest.mark.parametrize(("model_type", "class_name"), [each for each in CLASSES if each[1] in SAMPLE])
def test_a_sample_of_classes_agrees_or_is_refused(model_type, class_name, tmp_path):
    check_class(model_type, class_name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "class_name"), [each for each in CLASSES if each[1] not in SAMPLE])
def test_every_other_class_agrees_or_is_refused(model_type, class_name, tmp_path):
    check_class(model_type, class_name, tmp_path)


def test_the_classes_that_are_refused_exist():
    assert {name for _, name in CLASSES} >= REFUSED
