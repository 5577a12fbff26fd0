"""Test translation metrics against sacrebleu, and edit distances against their definition."""

import random
import sys
from dataclasses import replace

import pytest
import sacrebleu

from clearhead.api import Model, RecurrentBaseline
from clearhead.architecture import LearnedPositions
from clearhead.errors import ClearheadError
from clearhead.evaluation import EvaluationResult, evaluate_pairs, evaluate_translation
from clearhead.evaluation.answers import edit_distance, generate_answers
from clearhead.model.recurrent import RecurrentConfig, RecurrentTranslator
from clearhead.tokenization.characters import byte_tokenizer, character_tokenizer
from clearhead.tokenization.library_tokenizer import SpecialTokens
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import encoder, toy, translator

SENTENCES = ["a bad cab", "feed a dead bee", "cab", "be a bee", "a a a", "dad had a bad deed"]


@pytest.fixture(scope="module")
def model():
    """Return a character translator with random weights; its output is nonsense, but always the same."""
    tokenizer = character_tokenizer(
        "abcdefgh ijklmnopqrstuvwxy"[:25], SpecialTokens(unknown="?!", eos="</s>", bos="<s>")
    )
    assert tokenizer.vocab_size <= 29
    return Model(toy(translator()), tokenizer, special_ids={"decoder_start_token_id": tokenizer.bos_id})


@pytest.mark.parametrize("beams", [1, 3])
def test_answers_are_in_the_order_of_the_sources(model, beams):
    options = {} if beams == 1 else {"beams": beams}
    expected = [model.generate(source, max_new_tokens=9, **options).text for source in SENTENCES]
    assert len(set(expected)) > 1
    assert generate_answers(model, SENTENCES, beams, max_new_tokens=9) == (expected, 0)


def test_empty_sources_and_unknown_characters_get_answers(model):
    """Test sets source empty lines, and characters for which the vocabulary has no token."""
    (empty, unknown, plain), _ = generate_answers(model, ["", "ÖÖ", "cab"], max_new_tokens=9)
    assert (empty, plain) == ("", model.generate("cab", max_new_tokens=9).text)
    assert unknown == model.generate(model.tokenizer.encode("ÖÖ"), max_new_tokens=9).text
    assert generate_answers(model, [""]) == ([""], 0)
    assert generate_answers(model, []) == ([], 0)


def test_a_source_beyond_the_learned_positions_is_truncated_and_counted(model):
    """As in the tokenizers of transformers, the beginning and the end token are kept."""
    config = model.config
    learned = {
        name: replace(part, embedding=replace(part.embedding, positions=LearnedPositions(num_positions=6)))
        for name, part in (("encoder", config.encoder), ("decoder", config.decoder))
    }
    short = replace(model, network=toy(replace(config, **learned)))
    ids = model.tokenizer.encode("dad had a bad deed")
    prompts = [[*ids[:5], ids[-1]], model.tokenizer.encode("cab")]
    references = [short.generate(one, beams=2, max_new_tokens=4).text for one in prompts]
    result = evaluate_translation(
        short, [("dad had a bad deed", references[0]), ("cab", references[1])], beams=2, max_new_tokens=4
    )
    assert result["chrf"] == pytest.approx(100)
    assert result.settings["sources_truncated"] == 1
    assert evaluate_pairs(short, [("cab", "a")], max_new_tokens=4).settings == {"beams": 1, "unit": "word"}


def test_bleu_and_chrf_equal_those_of_sacrebleu(model):
    outputs, _ = generate_answers(model, SENTENCES, 2, max_new_tokens=9)
    references = [text if number % 2 else text + " a" for number, text in enumerate(outputs)]
    result = evaluate_translation(model, list(zip(SENTENCES, references, strict=True)), beams=2, max_new_tokens=9)
    assert result["bleu"] == pytest.approx(sacrebleu.corpus_bleu(outputs, [references]).score)
    assert result["chrf"] == pytest.approx(sacrebleu.corpus_chrf(outputs, [references]).score)
    assert "tok:13a" in result.settings["bleu_signature"]
    assert result.settings["beams"] == 2
    assert result.num_examples == 6
    again = evaluate_translation(model, list(zip(SENTENCES, references, strict=True)), beams=2, max_new_tokens=9)
    assert again == result


def test_resamples_without_any_match_source_a_standard_error(model):
    outputs, _ = generate_answers(model, SENTENCES[:2], 1, max_new_tokens=9)
    result = evaluate_translation(model, [(SENTENCES[0], outputs[0]), (SENTENCES[1], "§")], beams=1, max_new_tokens=9)
    assert result["chrf"] == pytest.approx(sacrebleu.corpus_chrf(outputs, [[outputs[0], "§"]]).score)
    assert result.metrics[1].standard_error > 0


def test_the_standard_error_is_the_spread_of_resampled_sentences(model):
    outputs, _ = generate_answers(model, SENTENCES, 1, max_new_tokens=9)
    references = [text if number % 2 else text[:4] + " a b" for number, text in enumerate(outputs)]
    result = evaluate_translation(model, list(zip(SENTENCES, references, strict=True)), beams=1, max_new_tokens=9)
    chrf = next(one for one in result.metrics if one.name == "chrf")
    generator = random.Random(0)
    scores = []
    for _ in range(300):
        rows = [generator.randrange(6) for _ in range(6)]
        scores.append(sacrebleu.corpus_chrf([outputs[n] for n in rows], [[references[n] for n in rows]]).score)
    mean = sum(scores) / len(scores)
    spread = (sum((score - mean) ** 2 for score in scores) / len(scores)) ** 0.5
    assert chrf.standard_error == pytest.approx(spread, rel=0.25)


def test_translation_without_sacrebleu_names_the_extra(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    with pytest.raises(ClearheadError, match=r'pip install "clearhead\[eval\]"'):
        evaluate_translation(model, [("a", "b")])


@pytest.mark.parametrize("network", [tiny_network(), toy(encoder())], ids=["decoder", "encoder"])
def test_translation_needs_an_encoder_decoder(network):
    with pytest.raises(ClearheadError, match="translation needs an encoder-decoder"):
        evaluate_translation(Model(network, byte_tokenizer()), [("one", "eins")])


def test_no_sentences_and_beams_of_a_recurrent_network_raise(model):
    with pytest.raises(ClearheadError, match="no sentence to translate"):
        evaluate_translation(model, [])
    sizes = {"source_vocab_size": 29, "target_vocab_size": 29, "embedding_width": 4, "width": 4, "context": 9}
    network = RecurrentTranslator(RecurrentConfig(cell="gru", attention="none", **sizes))
    with pytest.raises(ClearheadError, match="does not support beam search; set beams to 1"):
        evaluate_translation(RecurrentBaseline(network, model.tokenizer), [("a", "b")])


def test_pairs_report_exact_match_and_character_error_rate(model):
    outputs, _ = generate_answers(model, ["cab", "bee", "a"], max_new_tokens=6)
    rows = [("cab", "zz"), ("cab", outputs[0]), ("bee", outputs[1] + "z"), ("a", outputs[2][:-1])]
    result = evaluate_pairs(model, rows, unit="character", max_new_tokens=6)
    assert result.num_examples == 3
    assert result["exact_match"] == pytest.approx(1 / 3)
    lengths = [len(" ".join(text.split())) for text in (outputs[0], outputs[1] + "z", outputs[2][:-1])]
    edits = [0, 1, edit_distance(" ".join(outputs[2].split()), " ".join(outputs[2][:-1].split()))]
    assert result["character_error_rate"] == pytest.approx(sum(edits) / sum(lengths))
    assert isinstance(result, EvaluationResult)


def test_pairs_without_a_target_raise(model):
    for rows in ([], [("cab", "")]):
        with pytest.raises(ClearheadError, match="no target, or all targets are empty"):
            evaluate_pairs(model, rows)


def test_pairs_report_word_error_rate(model):
    (answer,), _ = generate_answers(model, ["cab"], max_new_tokens=6)
    result = evaluate_pairs(model, [("cab", f"{answer}  and  more")], max_new_tokens=6)
    num_words = len(answer.split())
    assert result["word_error_rate"] == pytest.approx(2 / (num_words + 2))
    with pytest.raises(ClearheadError, match="did you mean 'word'"):
        evaluate_pairs(model, [("a", "b")], unit="words")


def recursive_distance(source, target):
    """Return the edit distance by its definition."""
    if not source or not target:
        return len(source) + len(target)
    if source[-1] == target[-1]:
        return recursive_distance(source[:-1], target[:-1])
    return 1 + min(
        recursive_distance(source[:-1], target),
        recursive_distance(source, target[:-1]),
        recursive_distance(source[:-1], target[:-1]),
    )


@pytest.mark.parametrize(("source", "target", "expected"), [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3)])
def test_edit_distance_of_known_words(source, target, expected):
    assert edit_distance(source, target) == expected


def test_edit_distance_equals_its_definition():
    generator = random.Random(1)
    for _ in range(60):
        source, target = ("".join(generator.choices("abc", k=generator.randrange(7))) for _ in range(2))
        assert edit_distance(source, target) == recursive_distance(source, target)


def test_pairs_of_a_decoder_only_model():
    tokenizer = byte_tokenizer()
    model = Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer)
    assert evaluate_pairs(model, [("The sea", "is")], max_new_tokens=3).num_examples == 1
