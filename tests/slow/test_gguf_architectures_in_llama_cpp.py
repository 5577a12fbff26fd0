"""A small model of every GGUF architecture that we write: llama.cpp loads it and gives our logits and tokens."""

import numpy as np
import pytest
import torch

from clearhead.tokenization import train_tokenizer
from tests.checkpoint.gguf_toys import (
    CONTEXT,
    ENCODER_DECODERS,
    ENCODERS,
    PRESETS,
    STORED_AS_BERT,
    longrope_network,
    toy_network,
    write_toy,
)

pytestmark = pytest.mark.slow

TEXT = "The keeper counts 17 lamps. He writes the number down, and it's 3:45 in Zürich. " * 20
NUM_TOKENS, FLOAT32 = 40, 0  # number of the type in llama.cpp


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT], kind="bpe", vocab_size=300)


@pytest.mark.parametrize("architecture", [name for name in PRESETS if name not in (*ENCODERS, *ENCODER_DECODERS)])
def test_llama_cpp_computes_our_logits(tmp_path, tokenizer, architecture):
    """llama.cpp rounds the inputs of products to float16: by 1e-3 of their size, in every layer."""
    llama_cpp = pytest.importorskip("llama_cpp")
    network, path = toy_network(architecture), tmp_path / "toy.gguf"
    write_toy(path, network, architecture, tokenizer)
    tokens = tokenizer.encode(TEXT)[:NUM_TOKENS]
    theirs = llama_cpp.Llama(
        str(path), n_ctx=CONTEXT, n_threads=1, logits_all=True, verbose=False, type_k=FLOAT32, type_v=FLOAT32
    )
    theirs.eval(tokens)
    expected = torch.tensor(np.asarray(theirs.scores[:NUM_TOKENS]))
    theirs.close()
    with torch.no_grad():
        actual = network(torch.tensor([tokens]))[0]
    # the median over tokens: at a tie, the router of a mixture may send a token to another expert
    difference = float((actual - expected).square().mean(-1).sqrt().median() / actual.std())
    equal = int((actual.argmax(-1) == expected.argmax(-1)).sum())
    print(f"{architecture}: {difference:.1e} of the logits' spread, {equal} of {NUM_TOKENS} tokens equal")
    assert difference < 0.02
    assert equal >= NUM_TOKENS - 1


@pytest.mark.parametrize(("memory", "length"), [(256, NUM_TOKENS), (512, 300)])
def test_llama_cpp_computes_our_logits_of_longrope(tmp_path, tokenizer, memory, length):
    """With memory for no more than the original context, llama.cpp takes the short factors, else the long ones."""
    llama_cpp = pytest.importorskip("llama_cpp")
    network, path = longrope_network(original_context=256, context=1024), tmp_path / "toy.gguf"
    write_toy(path, network, "phi3", tokenizer)
    tokens = tokenizer.encode(TEXT)[:length]
    theirs = llama_cpp.Llama(
        str(path), n_ctx=memory, n_threads=1, logits_all=True, verbose=False, type_k=FLOAT32, type_v=FLOAT32
    )
    theirs.eval(tokens)
    expected = torch.tensor(np.asarray(theirs.scores[:length]))
    theirs.close()
    with torch.no_grad():
        actual = network(torch.tensor([tokens]))[0]
    difference = float((actual - expected).square().mean().sqrt() / actual.std())
    print(f"{length} tokens: {difference:.1e} of the logits' spread")
    assert len(tokens) == length
    assert difference < 0.005


@pytest.mark.parametrize("architecture", [*ENCODERS, *STORED_AS_BERT])
def test_llama_cpp_computes_our_hidden_states(tmp_path, tokenizer, architecture):
    llama_cpp = pytest.importorskip("llama_cpp")
    network, path = toy_network(architecture), tmp_path / "toy.gguf"
    write_toy(path, network, architecture, tokenizer)
    tokens = tokenizer.encode(TEXT)[:NUM_TOKENS]
    theirs = llama_cpp.Llama(
        str(path), n_ctx=CONTEXT, n_threads=1, embedding=True, verbose=False,
        pooling_type=llama_cpp.LLAMA_POOLING_TYPE_NONE,
    )  # fmt: skip
    theirs._batch.set_batch(tokens, n_past=0, logits_all=True)
    theirs._ctx.decode(theirs._batch)
    pointer = llama_cpp.llama_get_embeddings(theirs._ctx.ctx)
    expected = torch.tensor(np.ctypeslib.as_array(pointer, (NUM_TOKENS, network.config.width)).copy())
    theirs.close()
    with torch.no_grad():
        actual = network.encode(torch.tensor([tokens])).states[0]
    difference = float((actual - expected).square().mean().sqrt() / actual.std())
    print(f"{architecture}: {difference:.1e} of the hidden states' spread")
    assert difference < 0.005


@pytest.mark.parametrize("architecture", ENCODER_DECODERS)
def test_llama_cpp_computes_our_logits_of_an_encoder_decoder(tmp_path, tokenizer, architecture):
    """llama.cpp never multiplies the logits by width^-0.5, as UMT5 does."""
    llama_cpp = pytest.importorskip("llama_cpp")
    network, path = toy_network(architecture), tmp_path / "toy.gguf"
    write_toy(path, network, architecture, tokenizer)
    source, target = tokenizer.encode(TEXT)[:NUM_TOKENS], [0, *tokenizer.encode(TEXT)[3:20]]
    theirs = llama_cpp.Llama(
        str(path), n_ctx=CONTEXT, n_threads=1, logits_all=True, verbose=False, type_k=FLOAT32, type_v=FLOAT32
    )
    theirs._batch.set_batch(source, n_past=0, logits_all=True)
    assert llama_cpp.llama_encode(theirs._ctx.ctx, theirs._batch.batch) == 0
    theirs._batch.set_batch(target, n_past=0, logits_all=True)
    theirs._ctx.decode(theirs._batch)
    pointer = llama_cpp.llama_get_logits(theirs._ctx.ctx)
    expected = torch.tensor(np.ctypeslib.as_array(pointer, (len(target), network.config.vocab_size)).copy())
    theirs.close()
    with torch.no_grad():
        actual = (
            network.encode_and_decode(torch.tensor([source]), torch.tensor([target]))[0] / network.config.head.scale
        )
    difference = float((actual - expected).square().mean().sqrt() / actual.std())
    print(f"{architecture}: {difference:.1e} of the logits' spread")
    assert difference < 0.005
