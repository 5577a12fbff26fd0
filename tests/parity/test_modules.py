"""Modules of transformers in memory: from_huggingface and to_huggingface give the same logits for every class."""

import sys
import warnings
from functools import partial

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import clearhead
from clearhead.api import create
from clearhead.architecture import AudioEmbedding
from clearhead.backends import pack_network
from clearhead.errors import ClearheadError
from tests.checkpoint.tiny import tiny_config
from tests.parity.config_types import TEXT_PARTS, TYPES
from tests.parity.harness import VOCAB, randomize
from tests.parity.test_config_fields import composite_data, draw_features, keep_sinusoids, toy_data

TOLERANCE, LENGTH = 1e-5, 12
# One type for each way of storing tensors: fused, transposed, per expert, stacked experts, tied, with computed tables
USUAL = ("llama", "gpt2", "gpt_neox", "mixtral", "gpt_oss", "deepseek_v3", "bert", "albert", "pegasus", "t5")


def toy_module(data):
    """Return the module that a config.json describes, with all weights drawn anew."""
    data = {name: value for name, value in data.items() if name != "dtype"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module_class = getattr(transformers, data["architectures"][0])
        torch.manual_seed(0)
        module = module_class(module_class.config_class.from_dict(data, attn_implementation="eager")).eval()
    randomize(module, partial(keep_sinusoids, module))
    for name, parameter in module.named_parameters():  # T5 does not divide its scores by the root of the width
        if name.endswith(("SelfAttention.q.weight", "EncDecAttention.q.weight")):
            parameter.data *= 0.3
    return module


def outputs(module, network):
    """Return the logits of a module and of our network for the same tokens."""
    tokens = torch.randint(6, VOCAB - 2, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        if isinstance(network.config.encoder and network.config.encoder.embedding, AudioEmbedding):
            features = draw_features(module.config)
            theirs = module(input_features=features, decoder_input_ids=tokens[:1]).logits
            return theirs, network(features, tokens[:1])
        if network.config.is_encoder_decoder:
            theirs = module(input_ids=tokens, decoder_input_ids=tokens[:, 3:]).logits
            return theirs, network(tokens, tokens[:, 3:])
        return module(input_ids=tokens).logits, network(tokens)


def check_both_ways(data):
    """Compare the logits of a module, of our model and of the module that this gives back."""
    module = toy_module(data)
    model = clearhead.from_huggingface(module, fast=False)
    theirs, ours = outputs(module, model.network)
    assert theirs.abs().max() > 0.1
    assert (theirs - ours).abs().max() <= TOLERANCE
    returned = model.to_huggingface()
    assert (outputs(returned, model.network)[0] - theirs).abs().max() <= TOLERANCE
    stored = [parameter.data_ptr() for parameter in module.parameters()]
    assert not {parameter.data_ptr() for parameter in model.network.parameters()} & set(stored)


@pytest.mark.parametrize("model_type", USUAL)
def test_a_usual_module_is_read_and_given_back(model_type):
    check_both_ways(toy_data(model_type))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [model_type for model_type in TYPES if model_type not in (*USUAL, "led")])
def test_every_module_is_read_and_given_back(model_type):
    check_both_ways(toy_data(model_type))


def test_led_is_read_but_not_given_back_without_its_global_attention():
    module = toy_module(toy_data("led"))
    model = clearhead.from_huggingface(module, fast=False)
    theirs, ours = outputs(module, model.network)
    assert (theirs - ours).abs().max() <= TOLERANCE
    with pytest.raises(ClearheadError, match="LED cannot be saved"):
        model.to_huggingface()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TEXT_PARTS)
def test_the_text_part_of_a_module_that_reads_images_is_read(model_type):
    module = toy_module(composite_data(model_type))
    theirs, ours = outputs(module, clearhead.from_huggingface(module, fast=False).network)
    assert (theirs - ours).abs().max() <= TOLERANCE


def test_special_ids_labels_and_dtype_come_with_a_module():
    data = toy_data("bert") | {"architectures": ["BertForSequenceClassification"], "id2label": {0: "no", 1: "yes"}}
    module = toy_module(data | {"label2id": {"no": 0, "yes": 1}}).to(torch.bfloat16)
    model = clearhead.from_huggingface(module)
    assert model.labels.names == ("no", "yes")
    assert model.dtype == torch.bfloat16
    returned = model.to_huggingface()
    assert returned.config.id2label == {0: "no", 1: "yes"}
    assert returned.dtype == torch.bfloat16
    module = toy_module(toy_data("llama"))
    module.generation_config.eos_token_id = [3, 4]
    assert clearhead.from_huggingface(module).special_ids["eos_token_id"] == [3, 4]


def test_a_module_generates_with_a_tokenizer_of_transformers():
    words = {f"w{number}": number for number in range(VOCAB)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w1")
    module = toy_module(toy_data("llama"))
    generation = clearhead.from_huggingface(module, tokenizer).generate("w7 w9 w23", max_new_tokens=6, stop_ids=())
    inputs = torch.tensor([tokenizer("w7 w9 w23")["input_ids"]])
    theirs = module.generate(inputs, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(generation.tokens) == theirs[0, 3:].tolist()


def test_a_class_of_ones_own_is_refused():
    class MyLlama(transformers.LlamaForCausalLM):
        pass

    module = MyLlama(transformers.LlamaConfig(**TYPES["llama"][1]))
    with pytest.raises(ClearheadError, match=r"MyLlama of .* is not a class of transformers"):
        clearhead.from_huggingface(module)
    with pytest.raises(ClearheadError, match=r"Linear of .* is not a class of transformers"):
        clearhead.from_huggingface(torch.nn.Linear(2, 2))


def test_packed_weights_and_unknown_architectures_are_refused_in_a_sentence():
    model = create(tiny_config())
    pack_network(model.network, "int8")
    with pytest.raises(ClearheadError, match="packed weights"):
        model.to_huggingface()
    with pytest.raises(ClearheadError, match="no Hugging Face"):
        create("gopher-44m", tiny=True).to_huggingface()


def test_without_transformers_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ClearheadError, match="pip install 'transformers>=5'"):
        create(tiny_config()).to_huggingface()
