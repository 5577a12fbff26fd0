"""Configs for the tests of costs: every family at toy size, and toys for features that no preset has.

for name, config in CASES.items(): ...
"""

from dataclasses import replace

from clearhead.architecture import AudioEmbedding, Chunked, ModelConfig, RelativeSinusoid, SlidingWindow
from clearhead.costs.formulas import Phase, Workload
from clearhead.families import preset
from tests.model.toys import decoder, encoder, latent, stack, translator
from tests.toy_presets import shrink_sizes

# One preset of each kind of architecture; all other presets differ from one of these in sizes only.
PRESETS = (
    "gpt1", "gpt2", "gpt3-175b", "gopher-280b", "palm-540b", "llama-3.1-8b", "mistral-7b", "smollm3-3b", "qwen3-0.6b",
    "qwen3-30b-a3b", "gemma-3-1b", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "llama-4-scout", "grok-1",
    "grok-2", "bloom-560m", "mpt-7b", "gpt-neo-125m", "bert-base", "t5-small", "t5-v1.1-small", "bart-base", "marian",
    "transformer-base", "annotated-transformer",
)  # fmt: skip


def windowed_latent() -> ModelConfig:
    config = decoder()
    assert config.decoder is not None
    return replace(config, decoder=stack(latent(pattern=SlidingWindow(size=3))))


def speech() -> ModelConfig:
    config = shrink_sizes(preset("whisper-tiny"))
    assert config.encoder is not None
    audio = AudioEmbedding(num_mel_bands=5, num_positions=7)  # make_workload has a source of 7 tokens
    return replace(config, encoder=replace(config.encoder, embedding=audio))


CASES: dict[str, ModelConfig] = {name: shrink_sizes(preset(name)) for name in PRESETS} | {
    "other value width": decoder(value_width=3),
    "chunks": decoder(pattern=Chunked(size=5)),
    "windowed latent": windowed_latent(),
    "transformer-xl": decoder(RelativeSinusoid()),
    "encoder": encoder(),
    "encoder with distances": encoder(RelativeSinusoid()),
    "translator": translator(),
    "speech": speech(),
}


def make_workload(config: ModelConfig, phase: Phase, context: int, **changes: object) -> Workload:
    """Return a workload of two sequences in float32 on a CPU, with a source of 7 tokens."""
    sizes = {"batch": 2, "context": context, "source": 7, "dtype": "float32", "device_type": "cpu"}
    return Workload(config=config, phase=phase, **(sizes | changes))
