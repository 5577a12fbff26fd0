"""Small tokenizers trained by other libraries, and strings that are difficult for tokenizers."""

import argparse
import inspect
import io
import json
import random
from functools import cache

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and isn't it quick? They'll see; we've seen 1234567 of them.",
    "def encode(self, text: str) -> list[int]:\n    return [self.ids[c] for c in text]  # 0x1F, 3.14e-5\n",
    "Les élèves étudient à l'école près de Besançon; où est l'œuvre naïve? Größe und Straße über Öl.",
    "你好，世界！今天天气很好。こんにちは世界、カタカナとｶﾀｶﾅ。 한국어 텍스트도 있습니다.",
    "Привет мир, как дела? مرحبا بالعالم. नमस्ते दुनिया। ไทยภาษา",
    "① ② ﬁne ﬂow Ⅷ ½ ２０２４年 👍🏽 👨‍👩‍👧 e\u0301 \u1112\u1161\u11ab",
    "<table><tr><td>x = y;</td></tr></table> ----- ===== ..... !!!!! aaaa bbbb     \t\t\n\n",
]
CORPUS = SENTENCES * 20 + inspect.getsource(argparse).splitlines()[:800]

PIECES = [
    *"abcdefghijklmnopqrstuvwxyzABCDEFT0123456789     .,;:!?'\"()[]{}<>=+-*/\\_\n\t",
    *("  ", "   ", "    ", "\r\n", "\n\n", "\u3000", "\u00a0", "\u2028", "\x85", "the ", "def ", "self.", "'ll", "'S"),
    *("é", "ü", "ß", "İ", "ǅ", "Å", "\u212b", "\u2126", "e\u0301", "a\u0300\u0323", "\u0345", "ﬁ", "Ⅷ", "½", "①"),
    *("你", "好", "世", "こ", "ん", "ｶﾞ", "ﾞ", "\u1112\u1161\u11ab", "한", "नि", "क्ष", "ไทย", "ກຳ", "ж", "م"),
    *("👍🏽", "👨‍👩‍👧", "\u200b", "\u200d", "\ufeff", "\u00ad", "\ufffd", "\x00", "\x01", "\x1c", "\x7f", "▁", "▁▁"),
]
PLANES = [(1, 0x300), (0x300, 0x3100), (0x3100, 0xD800), (0xE000, 0x11000), (0x1F000, 0x1FB00)]


def varied_strings(count: int, seed: int = 0, also: tuple[str, ...] = ()) -> list[str]:
    """Return strings of words, code, spaces, emoji, combining marks and control characters; a sixth are any Unicode."""
    generator = random.Random(seed)
    pieces = [*PIECES, *also]
    strings = ["", " ", "a" * 50, " " * 40, "-" * 77, "\t" * 9, "ab" * 30]
    while len(strings) < count:
        if generator.random() < 1 / 6:
            planes = generator.choices(PLANES, k=generator.randrange(1, 12))
            strings.append("".join(chr(generator.randrange(*plane)) for plane in planes))
        else:
            strings.append("".join(generator.choices(pieces, k=generator.randrange(1, 30))))
    return strings[:count]


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<call ✓>", normalized=False)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Return a tokenizer built like Llama's tokenizer.json."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = _meta_spaces()
    trained.train_from_iterator(
        [sentence.replace("你", "").replace("👍", "") for sentence in CORPUS],
        trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False),
    )
    learned = json.loads(trained.to_str())["model"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = learned["vocab"] | {token: len(learned["vocab"]) + byte for byte, token in enumerate(byte_tokens)}
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = _meta_spaces()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def _meta_spaces() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


@cache
def metaspace_unigram() -> Tokenizer:
    """Return a tokenizer built like T5's tokenizer.json."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    return tokenizer


@cache
def wordpiece() -> Tokenizer:
    """Return a tokenizer built like BERT's tokenizer.json."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


@cache
def word_ends() -> Tokenizer:
    """Return a tokenizer built like GPT-1's tokenizer.json: `</w>` ends a word and becomes a space before the next."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False),
    )
    return tokenizer


LIBRARY_TOKENIZERS = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "metaspace": metaspace_unigram,
    "wordpiece": wordpiece,
    "word ends": word_ends,
}


@cache
def sentencepiece_model(**options: object) -> bytes:
    """Return the contents of a `.model` file trained by the sentencepiece package."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=900 if options.get("byte_fallback") else 600,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return model.getvalue()
