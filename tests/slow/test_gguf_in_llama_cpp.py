"""SmolLM2 in GGUF files that we write: llama.cpp loads them, gives our tokens and our perplexity.

Both programs multiply packed weights by activations of 8 bits, each rounded in its own way, so that logits differ by
some hundredths. Greedy tokens may part where two tokens are about equally likely; the perplexity of a text may not.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead
from clearhead.api import save_gguf
from clearhead.checkpoint import open_model

pytestmark = [pytest.mark.slow, pytest.mark.download]

DOCUMENTS = Path(__file__).parents[2] / "docs"
PROMPT = "The history of the printing press begins"
NUM_TOKENS, WINDOW = 40, 512
TIE = 0.25  # difference of two logits that rounding may reverse
# file type -> the block types that the 576 and 1536 columns of SmolLM2 get
FILE_TYPES = {
    "bf16": {"BF16"},
    "q8_0": {"Q8_0"},
    "q6_k": {"Q6_K", "Q8_0"},
    "q5_k_m": {"Q5_K", "Q6_K", "Q5_1", "Q8_0"},
    "q4_k_m": {"Q4_K", "Q6_K", "Q5_0", "Q8_0"},
    "q4_0": {"Q4_0", "Q8_0"},
}


@pytest.fixture(scope="module")
def full_model(smollm2_gguf):
    return clearhead.load(smollm2_gguf, fast=False)


@pytest.fixture(scope="module")
def text():
    names = ("architecture.md", "fast-path.md", "models.md")
    return "\n".join((DOCUMENTS / name).read_text(encoding="utf-8") for name in names)


def log_likelihoods(logits, tokens):
    """Return the log-probability of each token but the first."""
    scores = torch.tensor(np.asarray(logits), dtype=torch.float64).log_softmax(-1)[:-1]
    return scores.gather(1, torch.tensor(tokens)[1:, None])[:, 0]


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_llama_cpp_reads_our_files_as_we_do(tmp_path, full_model, text, file_type):
    llama_cpp = pytest.importorskip("llama_cpp")
    path = save_gguf(full_model, tmp_path / "model.gguf", file_type)
    # llama.cpp keeps the residual stream in float32
    ours = clearhead.load(path, dtype="float32", weights="full" if file_type == "bf16" else "stored")
    theirs = llama_cpp.Llama(str(path), n_ctx=WINDOW, n_batch=WINDOW, n_threads=2, logits_all=True, verbose=False)
    try:
        prompt = ours.encode(PROMPT)
        assert theirs.tokenize(PROMPT.encode()) == prompt
        assert theirs.tokenize(text[:4000].encode()) == ours.encode(text[:4000])
        check_greedy_tokens(ours, theirs, prompt)
        tokens = ours.encode(text)[: 6 * WINDOW]
        expected, actual = [], []
        for start in range(0, len(tokens), WINDOW):
            window = tokens[start : start + WINDOW]
            theirs.reset()
            theirs.eval(window)
            expected.append(log_likelihoods(theirs.scores[: len(window)], window))
            with torch.no_grad():
                actual.append(log_likelihoods(ours.network(torch.tensor([window]))[0].float(), window))
        perplexities = [float(torch.cat(each).mean().neg().exp()) for each in (actual, expected)]
        print(f"{file_type}: perplexity {perplexities[0]:.4f}, of llama.cpp {perplexities[1]:.4f}")
        assert perplexities[0] == pytest.approx(perplexities[1], rel=0.005)
    finally:
        theirs.close()


def check_greedy_tokens(ours, theirs, prompt):
    """Compare the most likely token after each prefix of our text; their best may beat ours only within a tie."""
    generated = ours.generate(prompt, max_new_tokens=NUM_TOKENS).tokens
    theirs.reset()
    theirs.eval([*prompt, *generated])
    scores = np.asarray(theirs.scores[len(prompt) - 1 : len(prompt) + len(generated) - 1])
    behind = scores.max(axis=1) - scores[np.arange(len(generated)), generated]
    print(f"{int((behind == 0).sum())} of {len(generated)} tokens equal; at most {behind.max():.3f} behind")
    assert (behind == 0).sum() >= 0.9 * NUM_TOKENS
    assert behind.max() < TIE


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_the_file_has_the_blocks_of_its_type(tmp_path, full_model, file_type):
    import gguf

    path = save_gguf(full_model, tmp_path / "model.gguf", file_type)
    reader = gguf.GGUFReader(path)
    found = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) == 2}
    assert found == FILE_TYPES[file_type]
    assert open_model(path).network.config == full_model.network.config
