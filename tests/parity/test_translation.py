"""mBART, M2M-100 (NLLB), mT5, UMT5 and encoders of T5 compared with transformers: logits, greedy texts and beams."""

import json
import math
from dataclasses import replace

import pytest
import torch
import transformers

import clearhead
from clearhead.checkpoint.huggingface import load_folder, read_folder_config
from clearhead.errors import ClearheadError
from tests.parity.harness import (
    VOCAB,
    Case,
    build_reference,
    check_briefly,
    check_float64,
    check_logits,
    check_mutants,
)
from tests.parity.test_t5 import draw_attention

SIZES = {"vocab_size": VOCAB, "d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4}
SIZES |= {"decoder_attention_heads": 6, "encoder_ffn_dim": 80, "decoder_ffn_dim": 64, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "attn_implementation": "eager"}
LED = {name: value for name, value in SIZES.items() if name not in ("max_position_embeddings", "attn_implementation")}
LED |= {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 48, "attention_window": [4, 8]}
RELU = {"activation_function": "relu", "scale_embedding": False}
BIGBIRD = SIZES | {"attention_type": "original_full"}
T5 = {"vocab_size": VOCAB, "d_model": 48, "d_kv": 20, "d_ff": 80, "num_layers": 2, "num_decoder_layers": 3}
T5 |= {"num_heads": 3, "relative_attention_num_buckets": 16, "relative_attention_max_distance": 20}
T5 |= {"layer_norm_epsilon": 1e-3, "attn_implementation": "eager"}


def case(name, class_name, settings, **options):
    model_class = getattr(transformers, class_name)

    def build():
        model = model_class(model_class.config_class(**settings))
        refine_sinusoids(model)
        return model

    return Case(name, build, first_token=3, **options)


def refine_sinusoids(model):
    """Give the tables of positions the digits that transformers' float32 arithmetic lacks, if they are in float64."""
    for part in model.modules():
        if type(part).__name__ == "M2M100SinusoidalPositionalEmbedding" and part.weights.dtype == torch.float64:
            half = part.embedding_dim // 2
            frequencies = torch.exp(-math.log(10000) / (half - 1) * torch.arange(half, dtype=torch.float64))
            angles = torch.arange(len(part.weights), dtype=torch.float64)[:, None] * frequencies
            part.weights.copy_(torch.cat([angles.sin(), angles.cos()], dim=1))


CASES = [
    case("mbart", "MBartForConditionalGeneration", SIZES | {"scale_embedding": True}),
    case("m2m_100", "M2M100ForConditionalGeneration", SIZES),
    case("bigbird_pegasus", "BigBirdPegasusForConditionalGeneration", BIGBIRD),
    case("mt5", "MT5ForConditionalGeneration", T5, draw=draw_attention, length=40),
    case("umt5", "UMT5ForConditionalGeneration", T5, draw=draw_attention, length=40),
]
WIDE = [
    case("mbart-unscaled-relu", "MBartForConditionalGeneration", SIZES | {"activation_function": "relu"}),
    case("bigbird_pegasus-biases", "BigBirdPegasusForConditionalGeneration", BIGBIRD | {"use_bias": True}),
    case("bigbird_pegasus-relu", "BigBirdPegasusForConditionalGeneration", BIGBIRD | RELU),
    case("m2m_100-padding", "M2M100ForConditionalGeneration", SIZES | {"pad_token_id": 0, "scale_embedding": False}),
    case("mt5-relu", "MT5ForConditionalGeneration", T5 | {"feed_forward_proj": "relu"}, draw=draw_attention, length=40),
    case("umt5-silu", "UMT5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-silu"}, draw=draw_attention),
]
LED_CASE = case("led", "LEDForConditionalGeneration", LED)
ENCODERS = [
    case("t5-encoder", "T5EncoderModel", T5, draw=draw_attention),
    case("umt5-encoder", "UMT5EncoderModel", T5, draw=draw_attention),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_briefly(case, tmp_path):
    check_briefly(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *WIDE], ids=str)
def test_agrees(case, tmp_path):
    check_briefly(case, tmp_path / "brief")
    check_logits(case, tmp_path)
    assert check_mutants(replace(case, undetectable=("context",)), tmp_path) >= 30


def test_led_agrees_without_its_global_attention(tmp_path):
    """Windows of 4 and 8 tokens, of 24; what transformers needs for marked tokens is not kept."""
    check_logits(LED_CASE, tmp_path / "logits")
    check_float64(LED_CASE, tmp_path / "float64")
    assert check_mutants(replace(LED_CASE, undetectable=("context",)), tmp_path / "mutants") >= 30
    model = clearhead.load(tmp_path / "logits")
    with pytest.raises(ClearheadError, match="LED cannot be saved for transformers"):
        model.save(tmp_path / "folder", format="huggingface")
    reloaded = clearhead.load(model.save(tmp_path / "native")).network
    weights = model.network.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in reloaded.state_dict().items())


def test_settings_of_long_sources_that_are_not_supported_are_refused(tmp_path):
    for settings, message in ((BIGBIRD | {"attention_type": "block_sparse"}, "up to 704 tokens"), (LED, "even number")):
        name = "led" if settings is LED else "bigbird_pegasus"
        data = settings | {"model_type": name, "attention_window": [7, 8]}
        (tmp_path / "config.json").write_text(json.dumps(data))
        with pytest.raises(ClearheadError, match=message):
            read_folder_config(tmp_path)


@pytest.mark.parametrize("case", ENCODERS, ids=str)
def test_encoders_alone(case, tmp_path):
    case = replace(case, output="last_hidden_state", takes_position_ids=False)
    check_briefly(replace(case, same_tensors=False), tmp_path)
    assert load_folder(tmp_path / "theirs").network.config.decoder is None


# --- generation

LANGUAGES = {"eng": 5, "fra": 6, "deu": 7}


TOKEN_SCALES = {"mbart": 0.02, "m2m_100": 0.2, "mt5": 0.02, "umt5": 0.02, "bigbird_pegasus": 0.02, "led": 0.1}


def draw_varied(case):
    """Return a function that draws weights with which a text depends on its source and does not repeat one token.

    Token embeddings are small, because a token would otherwise make itself the next one. Biases are small, because they
    add the same to the logits of every step, and the other weights of BART's relatives are large.
    """

    scale = 4 if case.name == "mbart" else 6

    def draw(name, tensor):
        noise = torch.randn_like(tensor)
        if "shared" in name or "embed_tokens" in name:
            return TOKEN_SCALES[case.name] * noise
        if "t5" in case.name:
            return draw_attention(name, tensor)
        if "layer_norm" in name or "layernorm" in name:
            return 0.1 * noise + (0 if name.endswith("bias") else 1)
        if name.endswith("final_logits_bias"):
            return 0.01 * noise
        return (
            0.3 * noise if "embed_positions" in name or tensor.ndim == 1 else scale * noise * tensor.shape[-1] ** -0.5
        )

    return draw


def save_translator(case, folder, **generation):
    """Save a reference with its generation config; return it, and our model of the folder."""
    model = build_reference(replace(case, draw=draw_varied(case)))
    model.generation_config.update(**{"max_new_tokens": None, "max_length": 20} | generation)
    model.save_pretrained(folder)
    return model, clearhead.load(folder)


# transformers builds the cache of T5's decoder with the number of layers of the encoder
EQUAL_LAYERS = [
    case("mt5", "MT5ForConditionalGeneration", T5 | {"num_decoder_layers": 2}),
    case("umt5", "UMT5ForConditionalGeneration", T5 | {"num_decoder_layers": 2}),
]


@torch.no_grad()
@pytest.mark.parametrize("case", [*CASES[:3], LED_CASE, *EQUAL_LAYERS], ids=str)
@pytest.mark.parametrize("beams", [None, 4])
def test_texts_equal_those_of_transformers(case, beams, tmp_path):
    model, ours = save_translator(case, tmp_path)
    texts = []
    for source in ([11, 12, 13, 14, 15], [50, 40, 30, 20, 10, 9, 8, 7]):
        theirs = model.generate(torch.tensor([source]), max_new_tokens=12, num_beams=beams or 1, do_sample=False)
        texts.append(list(ours.generate(source, max_new_tokens=12, beams=beams).tokens))
        expected = theirs[0, 1:].tolist()
        num_free = 11 if case.name == "mbart" and not beams else 12  # greedy decoding does not force the last token
        assert texts[-1][:num_free] == expected[:num_free]
    assert texts[0] != texts[1]
    assert len(set(texts[0])) > 2


@torch.no_grad()
@pytest.mark.parametrize("beams", [None, 4])
def test_forced_tokens_and_excluded_tokens(beams, tmp_path):
    """A first token, a last token and tokens that never occur, as generation_config.json asks for."""
    plain, _ = save_translator(CASES[0], tmp_path / "plain")
    source = [11, 12, 13, 14, 15]
    first = plain.generate(torch.tensor([source]), max_new_tokens=12, num_beams=beams or 1, do_sample=False)[0, 1:]
    banned = [token for token in first.tolist() if token > 2][:3]
    rules = {"forced_bos_token_id": 9, "forced_eos_token_id": 2, "bad_words_ids": [[token] for token in banned]}
    model, ours = save_translator(CASES[0], tmp_path / "rules", **rules)
    theirs = model.generate(torch.tensor([source]), max_new_tokens=12, num_beams=beams or 1, do_sample=False)[0]
    assert theirs[1] == 9
    tokens = list(ours.generate(source, max_new_tokens=11, beams=beams).tokens)  # the forced token is not counted
    expected = theirs[2:].tolist()
    assert tokens[:-1] == expected[:-1]
    assert not set(tokens) & set(banned)
    if beams:
        assert tokens[-1] == expected[-1] == 2
        sources = [source, [50, 40, 30, 20], source[::-1]]  # searches of one batch end in the same step
        many = ours.generate_many(sources, max_new_tokens=11, beams=beams)
        assert [each.tokens for each in many] == [
            ours.generate(each, max_new_tokens=11, beams=beams).tokens for each in sources
        ]
    again = clearhead.load(ours.save(tmp_path / "again", format="huggingface"))
    assert list(again.generate(source, max_new_tokens=11, beams=beams).tokens) == tokens


def test_rules_that_are_not_used_are_named(tmp_path):
    save_translator(CASES[0], tmp_path)
    path = tmp_path / "generation_config.json"
    rules = {"no_repeat_ngram_size": 3, "bad_words_ids": [[4], [5, 6]], "min_length": 0, "num_beams": 5}
    path.write_text(json.dumps(json.loads(path.read_text()) | rules))
    with pytest.warns(UserWarning, match=r"sets bad_words_ids with several tokens, no_repeat_ngram_size, which"):
        clearhead.load(tmp_path)
    path.write_text(json.dumps({"bad_words_ids": ["word"]}))
    with pytest.raises(ClearheadError, match="'bad_words_ids' must be lists of token ids"):
        clearhead.load(tmp_path)


@torch.no_grad()
def test_languages(tmp_path):
    """The source has the token of its language, and the text begins with that of the target."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors

    model, _ = save_translator(CASES[1], tmp_path)
    words = ["<s>", "<pad>", "</s>", "<unk>", "x", *LANGUAGES, *[f"w{number}" for number in range(VOCAB - 8)]]
    library = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", *LANGUAGES])
    library.post_processor = processors.TemplateProcessing(
        single=["eng", "$A", "</s>"], special_tokens=[("eng", 5), ("</s>", 2)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    ours = clearhead.load(tmp_path)
    source = torch.tensor([[LANGUAGES["deu"], 20, 21, 22, 2]])
    theirs = model.generate(
        source, max_new_tokens=9, forced_bos_token_id=LANGUAGES["fra"], num_beams=1, do_sample=False
    )
    text = "w12 w13 w14"
    found = ours.generate(text, max_new_tokens=8, source_language="deu", target_language="fra")
    assert list(found.tokens) == theirs[0, 2:].tolist()
    (many,) = ours.generate_many([text], max_new_tokens=8, source_language="deu", target_language="fra")
    assert many.tokens == found.tokens
    assert found.tokens != ours.generate(text, max_new_tokens=8, target_language="fra").tokens
    with pytest.raises(ClearheadError, match="unknown language 'fr'"):
        ours.generate(text, target_language="fr")
