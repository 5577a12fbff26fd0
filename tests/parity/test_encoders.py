"""The encoders besides BERT compared with transformers: language heads, no head, and heads that classify."""

from dataclasses import replace

import pytest
import torch
import transformers

from clearhead.checkpoint.huggingface import load_folder, save_folder
from clearhead.errors import ClearheadError
from clearhead.families import family_of_type, preset
from clearhead.families.settings import Settings
from tests.parity.harness import (
    VOCAB,
    Case,
    build_reference,
    check_briefly,
    check_logits,
    check_mutants,
    make_inputs,
)

SMALL = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 80, "max_position_embeddings": 40, "attn_implementation": "eager"}
NORMS = {"layer_norm_eps": 1e-3}
LABELS = {"num_labels": 5}
DISTIL = {"vocab_size": VOCAB, "dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 80}
DISTIL |= {"max_position_embeddings": 40, "attn_implementation": "eager"}
MODERN = SMALL | {"norm_eps": 1e-3, "local_attention": 8, "num_hidden_layers": 4, "pad_token_id": 0}
MODERN |= {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
ALBERT = SMALL | NORMS | {"embedding_size": 20}
ELECTRA = SMALL | NORMS | {"embedding_size": 20}


def case(name, class_name, settings, **options):
    """Return a case of a class of transformers."""
    model_class = getattr(transformers, class_name)
    options = {"first_token": 3, "takes_position_ids": False} | options
    return Case(name, lambda: model_class(model_class.config_class(**settings)), **options)


def hidden(name, class_name, settings, **options):
    """Return a case of a model without head; we save the names of the full model, which transformers reads too."""
    return case(name, class_name, settings, output="last_hidden_state", same_tensors=False, **options)


DEBERTA = SMALL | NORMS | {"relative_attention": True, "share_att_key": True, "pos_att_type": ["p2c", "c2p"]}
DEBERTA |= {"norm_rel_ebd": "layer_norm", "position_buckets": 8, "max_relative_positions": 20}
DEBERTA |= {"position_biased_input": False, "max_position_embeddings": 40}
ROBERTA = SMALL | NORMS | {"type_vocab_size": 1, "pad_token_id": 1}
LANGUAGE = [
    case("roberta", "RobertaForMaskedLM", ROBERTA),
    case("distilbert", "DistilBertForMaskedLM", DISTIL),
    case("mpnet", "MPNetForMaskedLM", SMALL | NORMS),
    case("electra", "ElectraForMaskedLM", ELECTRA),
    case("albert", "AlbertForMaskedLM", ALBERT),
    case("modernbert", "ModernBertForMaskedLM", MODERN, takes_position_ids=True),
    case("deberta", "DebertaV2ForMaskedLM", DEBERTA),
    case("nomic", "NomicBertForMaskedLM", SMALL | NORMS | {"pad_token_id": 0}, takes_position_ids=True),
]
WIDE = [
    case("xlm-roberta", "XLMRobertaForMaskedLM", ROBERTA, same_tensors=True),
    case("camembert", "CamembertForMaskedLM", ROBERTA | {"pad_token_id": 2, "type_vocab_size": 2}),
    case("roberta-tanh-gelu", "RobertaForMaskedLM", ROBERTA | {"hidden_act": "gelu_pytorch_tanh"}),
    case("distilbert-relu", "DistilBertForMaskedLM", DISTIL | {"activation": "relu"}),
    case("electra-equal-widths", "ElectraForMaskedLM", ELECTRA | {"embedding_size": 48}),
    case("albert-relu", "AlbertForMaskedLM", ALBERT | {"hidden_act": "relu"}),
    case(
        "modernbert-biases",
        "ModernBertForMaskedLM",
        MODERN
        | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True, "decoder_bias": False}
        | {"hidden_activation": "silu", "classifier_activation": "tanh", "local_attention": 4},
    ),
    case(
        "modernbert-thetas",
        "ModernBertForMaskedLM",
        MODERN
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        },
    ),
    hidden("roberta-model", "RobertaModel", ROBERTA),
    hidden("distilbert-model", "DistilBertModel", DISTIL),
    hidden("mpnet-model", "MPNetModel", SMALL | NORMS),
    hidden("electra-model", "ElectraModel", ELECTRA),
    hidden("albert-model", "AlbertModel", ALBERT),
    hidden("modernbert-model", "ModernBertModel", MODERN),
    case("roberta-tokens", "RobertaForTokenClassification", ROBERTA | LABELS),
    case("distilbert-tokens", "DistilBertForTokenClassification", DISTIL | LABELS),
    case("mpnet-tokens", "MPNetForTokenClassification", SMALL | NORMS | LABELS),
    case("electra-tokens", "ElectraForTokenClassification", ELECTRA | LABELS),
    case("albert-tokens", "AlbertForTokenClassification", ALBERT | LABELS),
    case("modernbert-tokens", "ModernBertForTokenClassification", MODERN | LABELS),
    case("bert-tokens", "BertForTokenClassification", SMALL | NORMS | LABELS),
    case("roberta-texts", "RobertaForSequenceClassification", ROBERTA | LABELS),
    case("mpnet-texts", "MPNetForSequenceClassification", SMALL | NORMS | LABELS),
    case("electra-texts", "ElectraForSequenceClassification", ELECTRA | LABELS),
    case("albert-texts", "AlbertForSequenceClassification", ALBERT | LABELS),
    case("albert-two-labels", "AlbertForSequenceClassification", ALBERT | {"num_labels": 2}),
    case("modernbert-texts", "ModernBertForSequenceClassification", MODERN | LABELS),
    case("modernbert-mean", "ModernBertForSequenceClassification", MODERN | LABELS | {"classifier_pooling": "mean"}),
    case("deberta-positions", "DebertaV2ForMaskedLM", DEBERTA | {"position_biased_input": True, "type_vocab_size": 2}),
    case("deberta-texts", "DebertaV2ForSequenceClassification", DEBERTA | LABELS | {"pooler_hidden_act": "tanh"}),
    case("deberta-tokens", "DebertaV2ForTokenClassification", DEBERTA | LABELS),
    case("nomic-texts", "NomicBertForSequenceClassification", SMALL | NORMS | LABELS),
    hidden("nomic-model", "NomicBertModel", SMALL | NORMS | {"hidden_act": "gelu"}),
    hidden("deberta-model", "DebertaV2Model", DEBERTA),
    case("bert-texts", "BertForSequenceClassification", SMALL | NORMS | LABELS),
    case("bert-two-labels", "BertForSequenceClassification", SMALL | NORMS | {"num_labels": 2}),  # as for pretraining
    case("distilbert-texts", "DistilBertForSequenceClassification", DISTIL | LABELS),
]
BRIEF = [
    *LANGUAGE,
    *[each for each in WIDE if each.name in ("roberta-texts", "albert-texts", "bert-two-labels", "modernbert-mean")],
]
# transformers computes with 32 buckets, 128 positions and an epsilon of 1e-12 where config.json cannot say otherwise
UNDETECTABLE = ("max_distance", "num_buckets", "context", "epsilon", "placement")


@pytest.mark.parametrize("case", BRIEF, ids=str)
def test_agrees_briefly(case, tmp_path):
    check_briefly(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_agrees(case, tmp_path):
    check_briefly(case, tmp_path / "brief")
    check_logits(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*LANGUAGE, *WIDE], ids=str)
def test_every_error_in_one_field_is_detected(case, tmp_path):
    assert check_mutants(replace(case, undetectable=UNDETECTABLE), tmp_path) >= 12


@torch.no_grad()
def test_poolers(tmp_path):
    for name, settings in (("RobertaModel", ROBERTA), ("MPNetModel", SMALL | NORMS), ("AlbertModel", ALBERT)):
        each = hidden(name, name, settings)
        model = build_reference(each)
        model.save_pretrained(tmp_path / name)
        network = load_folder(tmp_path / name).network
        inputs = make_inputs(each, network.config, padded=False)
        theirs = model(input_ids=inputs["tokens"]).pooler_output
        assert (network.pool(network(inputs["tokens"])) - theirs).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize(
    ("class_name", "settings", "output"),
    [
        ("ElectraForPreTraining", ELECTRA, "logits"),
        ("BertForPreTraining", SMALL | NORMS, "seq_relationship_logits"),
        ("AlbertForPreTraining", ALBERT, "sop_logits"),
    ],
)
def test_the_heads_of_pretraining_are_kept(class_name, settings, output, tmp_path):
    """The discriminator of ELECTRA, and the second heads of BERT and ALBERT, survive loading and saving."""
    each = case(class_name, class_name, settings)
    model = build_reference(each)
    model.save_pretrained(tmp_path / "theirs")
    loaded = load_folder(tmp_path / "theirs")
    tokens = make_inputs(each, loaded.network.config, padded=False)["tokens"]
    theirs = getattr(model(input_ids=tokens), output)
    ours = loaded.network.classify(loaded.network.hidden_states(tokens))
    assert (ours.squeeze(-1) - theirs).abs().max() <= 1e-5
    save_folder(loaded.network, tmp_path / "ours", loaded.family, loaded.special_ids)
    reloaded = type(model).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert torch.equal(getattr(reloaded(input_ids=tokens), output), theirs)


@pytest.mark.parametrize(
    "name",
    [
        "roberta-base",
        "xlm-roberta-base",
        "distilbert-base",
        "mpnet-base",
        "electra-small",
        "albert-base",
        "modernbert-base",
    ],
)
def test_a_written_preset_reads_back(name):
    config = preset(name)
    family = family_of_type(name.rpartition("-")[0])
    data = family.write_config(config)
    assert family.read_config(Settings(data, "written")) == config


@pytest.mark.parametrize(
    ("model_type", "wrong"),
    [
        ("roberta", {"is_decoder": True}),
        ("distilbert", {"sinusoidal_pos_embds": True}),
        ("mpnet", {"relative_attention_num_buckets": 16}),
        ("albert", {"num_hidden_groups": 2}),
        ("modernbert", {"tie_word_embeddings": False}),
        ("electra", {"position_embedding_type": "relative_key"}),
    ],
)
def test_settings_that_are_not_supported(model_type, wrong):
    data = transformers.AutoConfig.for_model(model_type).to_dict()
    with pytest.raises(ClearheadError, match="which is not supported"):
        family_of_type(model_type).read_config(Settings(data | wrong, "config.json"))
