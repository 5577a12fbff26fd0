"""Measure what packed weights cost on real models: changed predictions and perplexity against float32, and bytes.

    python benchmarks/rounding.py stories15m opus-mt-zh-en smollm2

The texts are the model's own: samples of a decoder, translations of an encoder-decoder. "4 bits, plain" spreads 16
levels over the range of each group of 32 weights in all matrices, as GGUF's Q4_1 does. Q4_K_M is written by our own
writer, if it can write the model. Packed weights are compared in float32, so that no other rounding is measured.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import clearhead
from clearhead.api import Model, save_gguf
from clearhead.backends import PackedMatrix, is_packable
from clearhead.errors import ClearheadError

PROMPTS = ("Once upon a time", "One day", "The", "In the morning", "There was a", "Tom and", "My friend", "When")
SOURCES = (
    "今天天气很好。", "我想学习中文。", "他昨天去了北京。", "这本书很有意思。", "你叫什么名字？", "请给我一杯水。",
    "我们明天早上八点出发。", "这个问题很难回答。", "她的妹妹在医院工作。", "火车晚点了一个小时。",
)  # fmt: skip
Batch = tuple[Tensor, ...]  # arguments of the network for one text; the last are the tokens that are predicted


def own_texts(model: Model) -> list[Batch]:
    """Return texts that the model itself generates."""
    if model.config.is_encoder_decoder:
        results = [model.generate(source, max_new_tokens=40) for source in SOURCES]
        start = model.special_ids["decoder_start_token_id"]
        return [
            (torch.tensor([model.encode(source)]), torch.tensor([[start, *result.tokens]]))
            for source, result in zip(SOURCES, results, strict=True)
        ]
    results = model.generate_many(list(PROMPTS), max_new_tokens=240, temperature=1.0, seed=1)
    pairs = zip(PROMPTS, results, strict=True)
    return [(torch.tensor([[*model.encode(prompt), *result.tokens]]),) for prompt, result in pairs]


@torch.inference_mode()
def predict(model: Model, texts: list[Batch]) -> list[Tensor]:
    """Return the log-probabilities (T, V) of the next tokens in each text."""
    return [model.network(*text)[0].float().log_softmax(dim=-1) for text in texts]


def describe(label: str, size: float, texts: list[Batch], before: list[Tensor], after: list[Tensor]) -> str:
    """Return one line: how predictions and perplexity changed."""
    divergence = torch.cat([(old.exp() * (old - new)).sum(-1) for old, new in zip(before, after, strict=True)]).mean()
    equal = torch.cat([old.argmax(-1) == new.argmax(-1) for old, new in zip(before, after, strict=True)])
    old_nats, new_nats = (
        torch.cat([-each[:-1].gather(1, text[-1][0, 1:, None]) for each, text in zip(found, texts, strict=True)]).mean()
        for found in (before, after)
    )
    return (
        f"  {label:16}{size / 1e6:8.1f} MB   same most likely token {equal.float().mean():.3f}   "
        f"KL divergence {divergence:.4f}   perplexity {100 * ((new_nats - old_nats).exp() - 1):+.2f} %"
    )


def round_plainly(weight: Tensor) -> Tensor:
    """Round to 16 levels between the smallest and the largest value of each group of 32."""
    groups = weight.flatten(0, -2).unflatten(-1, (-1, 32))
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    scales, lowest = ((highest - lowest) / 15).half().float(), lowest.half().float()
    quants = ((groups - lowest) / torch.where(scales == 0, 1.0, scales)).round().clamp(0, 15)
    return (quants * scales + lowest).view_as(weight)


def measure(name: str) -> None:
    """Print the losses of one model."""
    model = clearhead.load(name, dtype="float32", fast=False)
    texts = own_texts(model)
    before = predict(model, texts)
    print(f"{name}: {sum(text[-1].numel() for text in texts)} tokens", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for weights in ("int8", "int4"):
            packed = clearhead.load(name, dtype="float32", weights=weights, fast=False)  # type: ignore[arg-type]
            size = sum(part.packed.num_bytes for part in packed.network.modules() if isinstance(part, PackedMatrix))
            print(describe(weights, size, texts, before, predict(packed, texts)), flush=True)
        path = Path(folder) / "model.gguf"
        try:
            save_gguf(model, path, "q4_k_m")
        except ClearheadError as error:
            print(f"  Q4_K_M: {error}")
        else:
            stored = clearhead.load(path, dtype="float32", weights="stored", fast=False)
            size = sum(part.packed.num_bytes for part in stored.network.modules() if isinstance(part, PackedMatrix))
            print(describe("Q4_K_M", size, texts, before, predict(stored, texts)), flush=True)
    parameters = dict(model.network.named_parameters())
    rounded = [parameter.data for key, parameter in parameters.items() if is_packable(model.network, key)]
    for weight in rounded:
        weight.copy_(round_plainly(weight))
    size = sum(weight.numel() * 20 / 32 for weight in rounded)
    print(describe("4 bits, plain", size, texts, before, predict(model, texts)))


if __name__ == "__main__":
    for each in sys.argv[1:] or ["stories15m", "opus-mt-zh-en", "smollm2"]:
        measure(each)
