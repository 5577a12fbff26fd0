"""Translations judged as sacrebleu judges them, and edit distances against their definition."""

import random
import sys
from dataclasses import replace

import pytest
import sacrebleu

from clearhead.api import Model, RecurrentBaseline
from clearhead.architecture.parts import LearnedPositions
from clearhead.errors import ClearheadError
from clearhead.evaluation.answers import answers, num_edits, pairs, translation
from clearhead.evaluation.result import Result
from clearhead.model.recurrent import RecurrentConfig, RecurrentTranslator
from clearhead.tokenization.characters import byte_tokenizer, character_tokenizer
from clearhead.tokenization.fast import SpecialTokens
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import encoder, toy, translator

SENTENCES = ["a bad cab", "feed a dead bee", "cab", "be a bee", "a a a", "dad had a bad deed"]


@pytest.fixture(scope="module")
def model():
    """A translator of letters with random weights: what it says is nonsense, always the same."""
    tokenizer = character_tokenizer(
        "abcdefgh ijklmnopqrstuvwxy"[:25], SpecialTokens(unknown="?!", eos="</s>", bos="<s>")
    )
    assert tokenizer.vocab_size <= 29
    return Model(toy(translator()), tokenizer, special_ids={"decoder_start_token_id": tokenizer.bos_id})


@pytest.mark.parametrize("beams", [1, 3])
def test_answers_in_their_order(model, beams):
    how = {} if beams == 1 else {"beams": beams}
    alone = [model.generate(source, max_new_tokens=9, **how).text for source in SENTENCES]
    assert len(set(alone)) > 1
    assert answers(model, SENTENCES, beams, max_new_tokens=9) == (alone, 0)


def test_what_cannot_be_read_does_not_end_the_evaluation(model):
    """An empty line of a test set, and characters that the vocabulary has no token for."""
    (empty, unknown, plain), _ = answers(model, ["", "ÖÖ", "cab"], max_new_tokens=9)
    assert (empty, plain) == ("", model.generate("cab", max_new_tokens=9).text)
    assert unknown == model.generate(model.tokenizer.encode("ÖÖ"), max_new_tokens=9).text
    assert answers(model, [""]) == ([""], 0)
    assert answers(model, []) == ([], 0)


def test_a_source_beyond_the_learned_positions_is_cut_and_counted(model):
    """As the tokenizers of transformers cut: the beginning, and the token that ends a text."""
    config = model.config
    learned = {
        name: replace(part, embedding=replace(part.embedding, positions=LearnedPositions(num_positions=6)))
        for name, part in (("encoder", config.encoder), ("decoder", config.decoder))
    }
    short = replace(model, network=toy(replace(config, **learned)))
    ids = model.tokenizer.encode("dad had a bad deed")
    asked = [[*ids[:5], ids[-1]], model.tokenizer.encode("cab")]
    made = [short.generate(one, beams=2, max_new_tokens=4).text for one in asked]
    found = translation(short, [("dad had a bad deed", made[0]), ("cab", made[1])], beams=2, max_new_tokens=4)
    assert found["chrf"] == pytest.approx(100)
    assert found.settings["sources_cut"] == 1
    assert pairs(short, [("cab", "a")], max_new_tokens=4).settings == {"beams": 1, "unit": "word"}


def test_bleu_and_chrf_are_those_of_sacrebleu(model):
    made, _ = answers(model, SENTENCES, 2, max_new_tokens=9)
    wanted = [text if number % 2 else text + " a" for number, text in enumerate(made)]
    found = translation(model, list(zip(SENTENCES, wanted, strict=True)), beams=2, max_new_tokens=9)
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(made, [wanted]).score)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(made, [wanted]).score)
    assert "tok:13a" in found.settings["bleu_signature"]
    assert found.settings["beams"] == 2
    assert found.num_examples == 6
    again = translation(model, list(zip(SENTENCES, wanted, strict=True)), beams=2, max_new_tokens=9)
    assert again == found


def test_resamples_in_which_nothing_matches(model):
    made, _ = answers(model, SENTENCES[:2], 1, max_new_tokens=9)
    found = translation(model, [(SENTENCES[0], made[0]), (SENTENCES[1], "§")], beams=1, max_new_tokens=9)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(made, [[made[0], "§"]]).score)
    assert found.measures[1].standard_error > 0


def test_the_spread_of_bleu_is_that_of_resampled_sentences(model):
    made, _ = answers(model, SENTENCES, 1, max_new_tokens=9)
    wanted = [text if number % 2 else text[:4] + " a b" for number, text in enumerate(made)]
    found = translation(model, list(zip(SENTENCES, wanted, strict=True)), beams=1, max_new_tokens=9)
    chrf = next(one for one in found.measures if one.name == "chrf")
    draw = random.Random(0)
    scores = []
    for _ in range(300):
        rows = [draw.randrange(6) for _ in range(6)]
        scores.append(sacrebleu.corpus_chrf([made[n] for n in rows], [[wanted[n] for n in rows]]).score)
    mean = sum(scores) / len(scores)
    spread = (sum((score - mean) ** 2 for score in scores) / len(scores)) ** 0.5
    assert chrf.standard_error == pytest.approx(spread, rel=0.25)


def test_without_sacrebleu(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    with pytest.raises(ClearheadError, match=r'pip install "clearhead\[eval\]"'):
        translation(model, [("a", "b")])


@pytest.mark.parametrize("network", [tiny_network(), toy(encoder())], ids=["decoder", "encoder"])
def test_half_a_translator_does_not_translate(network):
    """It would be scored for going on with the sentence."""
    with pytest.raises(ClearheadError, match="translation is for an encoder-decoder"):
        translation(Model(network, byte_tokenizer()), [("one", "eins")])


def test_what_leaves_nothing_to_judge_is_said(model):
    with pytest.raises(ClearheadError, match="no sentence to translate"):
        translation(model, [])
    sizes = {"source_vocab_size": 29, "target_vocab_size": 29, "embedding_width": 4, "width": 4, "context": 9}
    network = RecurrentTranslator(RecurrentConfig(cell="gru", attention="none", **sizes))
    with pytest.raises(ClearheadError, match="a recurrent network does not search; give beams as 1"):
        translation(RecurrentBaseline(network, model.tokenizer), [("a", "b")])


def test_pairs(model):
    made, _ = answers(model, ["cab", "bee", "a"], max_new_tokens=6)
    rows = [("cab", "zz"), ("cab", made[0]), ("bee", made[1] + "z"), ("a", made[2][:-1])]
    found = pairs(model, rows, unit="character", max_new_tokens=6)
    assert found.num_examples == 3
    assert found["exact_match"] == pytest.approx(1 / 3)
    lengths = [len(" ".join(text.split())) for text in (made[0], made[1] + "z", made[2][:-1])]
    edits = [0, 1, num_edits(" ".join(made[2].split()), " ".join(made[2][:-1].split()))]
    assert found["character_error_rate"] == pytest.approx(sum(edits) / sum(lengths))
    assert isinstance(found, Result)


def test_pairs_without_a_target(model):
    for rows in ([], [("cab", "")]):
        with pytest.raises(ClearheadError, match="no target, or all are empty"):
            pairs(model, rows)


def test_pairs_of_words(model):
    (answer,), _ = answers(model, ["cab"], max_new_tokens=6)
    found = pairs(model, [("cab", f"{answer}  and  more")], max_new_tokens=6)
    num_words = len(answer.split())
    assert found["word_error_rate"] == pytest.approx(2 / (num_words + 2))
    with pytest.raises(ClearheadError, match="did you mean 'word'"):
        pairs(model, [("a", "b")], unit="words")


def slowly(have, want):
    """The definition, without a table."""
    if not have or not want:
        return len(have) + len(want)
    if have[-1] == want[-1]:
        return slowly(have[:-1], want[:-1])
    return 1 + min(slowly(have[:-1], want), slowly(have, want[:-1]), slowly(have[:-1], want[:-1]))


@pytest.mark.parametrize(("have", "want", "expected"), [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3)])
def test_known_edits(have, want, expected):
    assert num_edits(have, want) == expected


def test_edits_by_definition():
    draw = random.Random(1)
    for _ in range(60):
        have, want = ("".join(draw.choices("abc", k=draw.randrange(7))) for _ in range(2))
        assert num_edits(have, want) == slowly(have, want)


def test_a_decoder_alone_answers_too():
    tokenizer = byte_tokenizer()
    model = Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer)
    assert pairs(model, [("The sea", "is")], max_new_tokens=3).num_examples == 1
