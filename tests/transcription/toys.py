"""A folder with a toy Whisper model of transformers: a window of one second, three languages, a tokenizer of bytes.

model = make_folder(tmp_path); sound = warble(seconds=2.5)
"""

import json
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.parity.harness import build_reference
from tests.parity.test_whisper import SIZES, Case, draw_convolution, whisper_model

WORDS = ("endoftext", "startoftranscript", "en", "de", "fr", "translate", "transcribe", "startoflm", "startofprev")
SPECIAL = tuple(f"<|{name}|>" for name in (*WORDS, "nospeech", "notimestamps"))
END, START, FIRST_TIMESTAMP = 256, 257, 256 + len(SPECIAL)
NUM_POSITIONS, BANDS, CONTEXT = 50, 20, 64
VOCAB = FIRST_TIMESTAMP + NUM_POSITIONS + 1
TOKENS = {name: 256 + number for number, name in enumerate(SPECIAL)}
LANGUAGES = {name: TOKENS[name] for name in ("<|en|>", "<|de|>", "<|fr|>")}
GENERATION = {
    "decoder_start_token_id": START,
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
    "no_timestamps_token_id": FIRST_TIMESTAMP - 1,
    "is_multilingual": True,
    "lang_to_id": LANGUAGES,
    "task_to_id": {"transcribe": TOKENS["<|transcribe|>"], "translate": TOKENS["<|translate|>"]},
    "suppress_tokens": [3, 4, 5, START, *range(TOKENS["<|translate|>"], FIRST_TIMESTAMP - 1)],
    "begin_suppress_tokens": [32, END],
    "max_initial_timestamp_index": 10,
    "max_length": CONTEXT,
}


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes with Whisper's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    times = [AddedToken(f"<|{number * 0.02:.2f}|>", special=False) for number in range(NUM_POSITIONS + 1)]
    tokenizer.add_tokens(times)
    return tokenizer


def make_folder(folder: Path, seed: int = 0, **changes: object) -> transformers.WhisperForConditionalGeneration:
    """Write a model with random weights, its tokenizer and its generation_config.json; return the model."""
    sizes = {"vocab_size": VOCAB, "num_mel_bins": BANDS, "max_source_positions": NUM_POSITIONS}
    sizes |= {"max_target_positions": CONTEXT, "pad_token_id": END, "bos_token_id": END, "eos_token_id": END}
    case = Case("speech", whisper_model(**sizes, decoder_start_token_id=START), draw=draw_convolution)
    model = build_reference(case)
    with torch.no_grad():  # other weights: these decide the text
        generator = torch.Generator().manual_seed(seed)
        table = model.model.decoder.embed_tokens.weight
        deviation = (0.4, 0.2, 0.1)[seed % 3]  # small: all tokens are about as likely, and timestamps are together
        table.copy_(deviation * torch.randn(table.shape, generator=generator))
    model.generation_config = transformers.GenerationConfig(**GENERATION | changes)
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "WhisperTokenizer", "eos_token": SPECIAL[0], "bos_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return model


def warble(seconds: float, rate: int = 16_000, seed: int = 0) -> torch.Tensor:
    """Return a tone whose pitch and loudness change, with a little noise: something like speech."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(round(seconds * rate), dtype=torch.float64) / rate
    pitch = 300 + 200 * torch.sin(2 * torch.pi * 1.7 * time)
    tone = torch.sin(2 * torch.pi * pitch.cumsum(0) / rate) * (0.6 + 0.4 * torch.sin(2 * torch.pi * 4 * time))
    return (0.3 * tone + 0.01 * torch.randn(len(time), generator=generator)).float()


assert SIZES["vocab_size"] < VOCAB
