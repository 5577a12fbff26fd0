"""The recurrent baseline against its formulas, torch.nn, the book's numbers and released weights."""

import subprocess
import sys
import zipfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clearhead.config import from_json, from_toml, to_json, to_toml
from clearhead.errors import ClearheadError
from clearhead.model.recurrent import DecoderState, RecurrentConfig, RecurrentEncoderOutput, RecurrentTranslator

SMALL = RecurrentConfig(
    source_vocab_size=11, target_vocab_size=13, embedding_width=5, width=6, cell="gru", attention="none", context=16
)
CONFIGS = [
    replace(SMALL, cell=cell, attention=attention, num_layers=num_layers, bidirectional=bidirectional)
    for cell, attention, (num_layers, bidirectional) in product(
        ("tanh", "gru", "lstm"), ("none", "dot_product"), ((1, False), (2, False), (2, True))
    )
]
every_config = pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.cell}-{c.attention}-{c.num_layers}{'-bidirectional' * c.bidirectional}"
)


def random_network(config: RecurrentConfig) -> RecurrentTranslator:
    """Return a network in float64 with weights large enough to move every gate."""
    generator = torch.Generator().manual_seed(3)
    network = RecurrentTranslator(config).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.6)
    return network


def some_tokens(vocab_size: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


# --- the config


@every_config
def test_config_round_trips_through_json_and_toml(config: RecurrentConfig) -> None:
    assert from_json(RecurrentConfig, to_json(config)) == config
    assert from_toml(RecurrentConfig, to_toml(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cell": "grru"}, "unknown RecurrentConfig.cell 'grru'; did you mean 'gru'"),
        ({"attention": "dot"}, "unknown RecurrentConfig.attention 'dot'"),
        ({"width": 0}, "width is 0"),
        ({"width": 7, "bidirectional": True}, "width is 7; it must be even if bidirectional"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"dropout": 1.0}, r"dropout is 1\.0"),
    ],
)
def test_invalid_configs_are_rejected(change: dict[str, object], message: str) -> None:
    with pytest.raises(ClearheadError, match=message):
        replace(SMALL, **change)


# --- the computation


def gates(layers: nn.RNNBase, suffix: str, x: Tensor, s: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return W x + b_ih and U s + b_hh of each gate."""
    weights = {name.removesuffix(suffix): value for name, value in layers.named_parameters() if name.endswith(suffix)}
    from_input = x @ weights["weight_ih_l"].T + weights["bias_ih_l"]
    from_state = s @ weights["weight_hh_l"].T + weights["bias_hh_l"]
    return from_input.split(s.shape[-1], dim=-1), from_state.split(s.shape[-1], dim=-1)


def formula_step(kind: str, layers: nn.RNNBase, suffix: str, x: Tensor, s: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one step by the formulas in the docstring of RecurrentConfig. suffix names the layer and direction."""
    from_input, from_state = gates(layers, suffix, x, s)
    if kind == "gru":
        r, z = (torch.sigmoid(a + b) for a, b in zip(from_input[:2], from_state[:2], strict=True))
        n = torch.tanh(from_input[2] + r * from_state[2])
        return (1 - z) * n + z * s, c
    summed = [a + b for a, b in zip(from_input, from_state, strict=True)]
    if kind == "tanh":
        return torch.tanh(summed[0]), c
    i, f, g, o = torch.sigmoid(summed[0]), torch.sigmoid(summed[1]), torch.tanh(summed[2]), torch.sigmoid(summed[3])
    c = f * c + i * g
    return o * torch.tanh(c), c


def formula_logits(network: RecurrentTranslator, source: list[int], target: list[int]) -> tuple[Tensor, Tensor]:
    """Return the logits (T, V) and attention weights (T, S) of one pair, computed by the formulas."""
    config = network.config
    num_directions = 2 if config.bidirectional else 1
    xs = [network.source_embedding.weight[token] for token in source]
    finals = []
    for layer in range(config.num_layers):
        runs, ends = [], []
        for direction in range(num_directions):
            s = c = torch.zeros(config.width // num_directions, dtype=torch.float64)
            states = []
            for x in reversed(xs) if direction else xs:
                suffix = f"{layer}_reverse" if direction else f"{layer}"
                s, c = formula_step(config.cell, network.encoder, suffix, x, s, c)
                states.append(s)
            runs.append(states[::-1] if direction else states)
            ends.append((s, c))
        xs = [torch.cat(states) for states in zip(*runs, strict=True)]
        finals.append((torch.cat([s for s, _ in ends]), torch.cat([c for _, c in ends])))
    h = torch.stack(xs)
    logits, attention = [], []
    for token in target:
        weights = (h @ finals[-1][0]).softmax(dim=0)
        x = network.target_embedding.weight[token]
        x = torch.cat((x, weights @ h)) if config.attention == "dot_product" else x
        for layer in range(config.num_layers):
            finals[layer] = formula_step(config.cell, network.decoder, f"{layer}", x, *finals[layer])
            x = finals[layer][0]
        logits.append(network.head.weight @ x + network.head.bias)
        attention.append(weights)
    return torch.stack(logits), torch.stack(attention)


@every_config
@torch.no_grad()
def test_logits_and_attention_weights_equal_the_formulas(config: RecurrentConfig) -> None:
    network = random_network(config)
    source, target = some_tokens(11, 3, 7), some_tokens(13, 3, 5)
    logits = network(source, target)
    for row in range(3):
        expected, attention = formula_logits(network, source[row].tolist(), target[row].tolist())
        assert_same(logits[row], expected)
        if config.attention == "dot_product":
            assert_same(network.attention_weights(target, network.encode(source))[row], attention)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize(("cell", "layers"), [("tanh", nn.RNN), ("gru", nn.GRU), ("lstm", nn.LSTM)])
@torch.no_grad()
def test_a_decoder_without_attention_equals_torch_nn_on_the_full_target(
    cell: str, layers: type[nn.RNNBase], num_layers: int
) -> None:
    network = random_network(replace(SMALL, cell=cell, num_layers=num_layers))
    source, target = some_tokens(11, 4, 9), some_tokens(13, 4, 8)
    encoder, decoder = (layers(5, 6, num_layers=num_layers, batch_first=True).double() for _ in range(2))
    encoder.load_state_dict(network.encoder.state_dict())
    decoder.load_state_dict(network.decoder.state_dict())
    states, final = encoder(network.source_embedding(source))
    hidden, _ = decoder(network.target_embedding(target), final)
    assert_same(network.encode(source).states, states)
    assert_same(network(source, target), network.head(hidden))


@every_config
@torch.no_grad()
def test_decode_equals_a_loop_over_step(config: RecurrentConfig) -> None:
    network = random_network(config)
    target = some_tokens(13, 3, 6)
    encoder_output = network.encode(some_tokens(11, 3, 7))
    state, stepped = network.initial_state(encoder_output), []
    for column in target.unbind(dim=1):
        logits, state = network.step(column, state, encoder_output)
        stepped.append(logits)
    assert_same(network.decode(target, encoder_output), torch.stack(stepped, dim=1))


@torch.no_grad()
def test_step_does_not_change_its_state() -> None:
    network = random_network(replace(SMALL, cell="lstm", attention="dot_product"))
    encoder_output = network.encode(some_tokens(11, 2, 4))
    state = network.initial_state(encoder_output)
    first, _ = network.step(torch.tensor([1, 2]), state, encoder_output)
    network.step(torch.tensor([3, 4]), state, encoder_output)
    again, _ = network.step(torch.tensor([1, 2]), state, encoder_output)
    assert torch.equal(first, again)


@every_config
@torch.no_grad()
def test_padding_changes_nothing(config: RecurrentConfig) -> None:
    """Each sequence of a padded batch equals the sequence alone, whatever ids the padding has."""
    network = random_network(config)
    source_lengths, target_lengths = torch.tensor([4, 9, 1, 6]), torch.tensor([5, 2, 7, 1])
    source_mask = torch.arange(9) < source_lengths[:, None]
    target_mask = (torch.arange(7) < target_lengths[:, None]).long()
    alone_source, alone_target = some_tokens(11, 4, 9), some_tokens(13, 4, 7)
    for seed in (1, 2):
        source = alone_source.where(source_mask, some_tokens(11, 4, 9, seed=seed))
        target = alone_target.where(target_mask.bool(), some_tokens(13, 4, 7, seed=seed))
        encoder_output = network.encode(source, source_mask)
        logits = network(source, target, source_mask, target_mask)
        for row, (num_source, num_target) in enumerate(zip(source_lengths, target_lengths, strict=True)):
            row_source, row_target = alone_source[row : row + 1, :num_source], alone_target[row : row + 1, :num_target]
            row_output = network.encode(row_source)
            assert_same(logits[row : row + 1, :num_target], network(row_source, row_target))
            assert_same(encoder_output.states[row : row + 1, :num_source], row_output.states)
            assert_same(encoder_output.final.hidden[:, row : row + 1], row_output.final.hidden)
            if config.attention == "dot_product":
                weights = network.attention_weights(target, encoder_output, target_mask)[row, :num_target]
                assert_same(weights[:, :num_source], network.attention_weights(row_target, row_output)[0])
                assert not weights[:, num_source:].any()


@every_config
def test_gradients_reach_every_parameter(config: RecurrentConfig) -> None:
    network = random_network(config)
    network(some_tokens(11, 3, 5), some_tokens(13, 3, 4)).logsumexp(dim=-1).sum().backward()
    without_gradient = [
        name for name, value in network.named_parameters() if value.grad is None or not value.grad.any()
    ]
    assert without_gradient == []


@pytest.mark.parametrize(("num_layers", "places"), [(1, "inputs and outputs"), (2, "between layers")])
@torch.no_grad()
def test_dropout_acts_in_training_only(num_layers: int, places: str) -> None:
    network = random_network(replace(SMALL, dropout=0.5, num_layers=num_layers, attention="dot_product"))
    source, column = some_tokens(11, 2, 5), some_tokens(13, 2)
    encoder_output = network.encode(source)
    runs = [
        lambda: network.encode(source).states,
        lambda: network.next_state(column, encoder_output.final, encoder_output).last_layer,
    ]
    if places == "between layers":
        network.dropout = nn.Identity()
    else:
        runs.append(lambda: network.compute_logits(encoder_output.final.last_layer))
    assert all(torch.equal(run(), run()) for run in runs)
    network.train()
    torch.manual_seed(0)
    assert not any(torch.allclose(run(), run()) for run in runs)


# --- the book


WEIGHTS = [0.33758453779871644, 0.2500887766217052, 0.41232668557957836]
CONTEXT = [0.7499112233782947, 0.6624154622012836]


def worked_example() -> tuple[RecurrentTranslator, RecurrentEncoderOutput]:
    """Return encoder states (1,0), (0,1), (1,1), the decoder state (0.5, 0.2), and a network with a tanh cell."""
    network = random_network(replace(SMALL, width=2, cell="tanh", attention="dot_product"))
    states = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]], dtype=torch.float64)
    return network, RecurrentEncoderOutput(states, DecoderState(torch.tensor([[[0.5, 0.2]]], dtype=torch.float64)))


@torch.no_grad()
def test_book_a4_attention_between_decoder_and_encoder() -> None:
    network, encoder_output = worked_example()
    weights = network.attention_weights(torch.tensor([[3]]), encoder_output)[0, 0]
    assert_same(
        encoder_output.states[0] @ encoder_output.final.last_layer[0],
        torch.tensor([0.5, 0.2, 0.7], dtype=torch.float64),
    )
    torch.testing.assert_close(weights.tolist(), WEIGHTS, rtol=0, atol=1e-15)
    torch.testing.assert_close((weights @ encoder_output.states[0]).tolist(), CONTEXT, rtol=0, atol=1e-15)


@torch.no_grad()
def test_book_a4_next_state_is_tanh_of_state_and_context() -> None:
    """s_t = tanh(W [s_{t-1}; c_t; y_t] + b)."""
    network, encoder_output = worked_example()
    _, state = network.step(torch.tensor([3]), network.initial_state(encoder_output), encoder_output)
    cell = dict(network.decoder.named_parameters())
    W = torch.cat((cell["weight_hh_l0"], cell["weight_ih_l0"][:, 5:], cell["weight_ih_l0"][:, :5]), dim=1)
    joined = torch.cat((torch.tensor([0.5, 0.2, *CONTEXT], dtype=torch.float64), network.target_embedding.weight[3]))
    assert_same(state.last_layer[0], torch.tanh(W @ joined + cell["bias_ih_l0"] + cell["bias_hh_l0"]))


@torch.no_grad()
def test_book_erratum_2_printed_weights_and_context_are_rounded_wrongly() -> None:
    network, encoder_output = worked_example()
    weights = network.attention_weights(torch.tensor([[3]]), encoder_output)[0, 0]
    exact = [*weights.tolist(), *(weights @ encoder_output.states[0]).tolist()]
    printed = [0.3374, 0.2501, 0.4125, 0.7499, 0.6626]
    assert all(abs(a - b) < 3e-4 for a, b in zip(exact, printed, strict=True))
    assert [round(a, 4) == b for a, b in zip(exact, printed, strict=True)] == [False, True, False, True, False]


@pytest.mark.parametrize("cell", ["tanh", "gru", "lstm"])
@torch.no_grad()
def test_book_c4_without_attention_the_decoder_depends_on_the_final_state_only(cell: str) -> None:
    source, target = some_tokens(11, 2, 6), some_tokens(13, 2, 5)
    for attention, is_equal in (("none", True), ("dot_product", False)):
        network = random_network(replace(SMALL, cell=cell, attention=attention))
        encoder_output = network.encode(source)
        other_states = replace(encoder_output, states=network.encode(source.flip(1)).states)
        assert torch.equal(network.decode(target, encoder_output), network.decode(target, other_states)) == is_equal
        other_final = replace(encoder_output, final=network.encode(source.flip(1)).final)
        assert not torch.allclose(network.decode(target, encoder_output), network.decode(target, other_final))


# --- invalid inputs


SOURCE, TARGET = some_tokens(11, 2, 4), some_tokens(13, 2, 3)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((SOURCE.clamp(10, 10) + 11, TARGET), "source token id 21 is out of range: this model has 11, from 0 to 10"),
        ((SOURCE, TARGET.clamp(1, 1) - 2), "target token id -1 is out of range: this model has 13"),
        ((SOURCE.float(), TARGET), "source must be int64 or int32"),
        ((SOURCE, TARGET.double()), "target must be int64 or int32"),
        ((SOURCE[0], TARGET), r"source has shape \(4,\); it must be \(batch, length\), and not empty"),
        ((SOURCE, TARGET[:, :0]), r"target has shape \(2, 0\); it must be \(batch, length\), and not empty"),
        ((SOURCE, TARGET[:1]), "there are 1 targets and 2 encoded sources"),
        ((SOURCE, TARGET, torch.ones(2, 3)), r"source_mask has shape \(2, 3\); it must have that of source, \(2, 4\)"),
        ((SOURCE, TARGET, None, torch.ones(2)), r"target_mask has shape \(2,\); it must have that of target, \(2, 3\)"),
        ((SOURCE, TARGET, torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])), "source_mask must have real tokens first"),
        ((SOURCE, TARGET, torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])), "source_mask must have real tokens first"),
        ((SOURCE, TARGET, torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])), "no sequence may be empty"),
        ((SOURCE, TARGET, None, torch.tensor([[1, 1, 1], [0, 1, 1]])), "target_mask must have real tokens first"),
    ],
)
def test_invalid_inputs_raise_a_clear_error(inputs: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(ClearheadError, match=message):
        RecurrentTranslator(SMALL)(*inputs)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (torch.tensor([[1, 2]]), r"tokens has shape \(1, 2\); it must be \(batch,\), one token per sequence"),
        (torch.tensor([1, 13]), "target token id 13 is out of range"),
        (torch.tensor([1.0, 2.0]), "must be int64 or int32"),
        (torch.tensor([1, 2, 3]), "there are 3 targets and 2 encoded sources"),
    ],
)
def test_invalid_steps_raise_a_clear_error(column: Tensor, message: str) -> None:
    network = RecurrentTranslator(SMALL)
    encoder_output = network.encode(SOURCE)
    with pytest.raises(ClearheadError, match=message):
        network.step(column, network.initial_state(encoder_output), encoder_output)


def test_attention_weights_of_a_model_without_attention_raise() -> None:
    network = RecurrentTranslator(SMALL)
    with pytest.raises(ClearheadError, match="this model has no attention"):
        network.attention_weights(TARGET, network.encode(SOURCE))


# --- learning


def greedy(
    network: RecurrentTranslator, encoder_output: RecurrentEncoderOutput, start_token: int, num_tokens: int
) -> Tensor:
    """Return the most likely tokens (B, num_tokens)."""
    state, generated = network.initial_state(encoder_output), []
    column = torch.full((len(encoder_output.states),), start_token)
    for _ in range(num_tokens):
        logits, state = network.step(column, state, encoder_output)
        column = logits.argmax(dim=-1)
        generated.append(column)
    return torch.stack(generated, dim=1)


def test_gru_with_attention_learns_to_copy() -> None:
    """The data are four digits. Those whose sum is a multiple of five are held out from training."""
    torch.manual_seed(0)
    sizes = {"source_vocab_size": 10, "target_vocab_size": 11, "embedding_width": 32, "width": 64}
    network = RecurrentTranslator(replace(SMALL, attention="dot_product", **sizes))
    num_steps, start_token = 300, 10
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_steps)
    for step in range(num_steps):
        digits = some_tokens(10, 64, 4, seed=step)
        digits = digits[digits.sum(dim=1) % 5 != 0]
        logits = network(digits, torch.cat((torch.full_like(digits[:, :1], start_token), digits[:, :-1]), dim=1))
        optimizer.zero_grad()
        cross_entropy(logits.flatten(0, 1), digits.flatten()).backward()
        optimizer.step()
        schedule.step()
    unseen = torch.cartesian_prod(*[torch.arange(10)] * 4)
    unseen = unseen[unseen.sum(dim=1) % 5 == 0]
    with torch.no_grad():
        generated = greedy(network, network.encode(unseen), start_token, 4)
    assert (generated == unseen).all(dim=1).double().mean() > 0.98


# --- released weights


GRAPHEMES = ["<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
VOWELS = ["AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW"]
CONSONANTS = [
    "B", "CH", "D", "DH", "F", "G", "HH", "JH", "K", "L", "M", "N", "NG", "P", "R", "S", "SH", "T", "TH", "V", "W",
    "Y", "Z", "ZH",
]  # fmt: skip
STRESSED = [vowel + stress for vowel in VOWELS for stress in "012"]
PHONEMES = ["<pad>", "<unk>", "<s>", "</s>", *sorted([*STRESSED, *CONSONANTS, "UW"])]


@pytest.fixture(scope="module")
def g2p_weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Download g2p-en 2.1.0 (Park & Kim 2019, Apache-2.0): English spelling to sound, with GRUs of width 256."""
    folder = tmp_path_factory.mktemp("g2p")
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check", "--retries=1"]
    package = ["--no-deps", "--only-binary=:all:", "--dest", str(folder), "g2p-en==2.1.0"]
    client = subprocess.run([*command, *package], capture_output=True, text=True, check=False)
    if client.returncode != 0:
        pytest.skip(f"g2p-en cannot be downloaded: {client.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        path = Path(wheel.extract("g2p_en/checkpoint20.npz", folder))
    with np.load(path, allow_pickle=False) as arrays:
        return {name: array.astype(np.float64) for name, array in arrays.items()}


def g2p_network(weights: dict[str, np.ndarray]) -> RecurrentTranslator:
    """Return our network with the weights of g2p-en."""
    names = {"source_embedding.weight": "enc_emb", "target_embedding.weight": "dec_emb"}
    names |= {"head.weight": "fc_w", "head.bias": "fc_b"}
    for side, part, place in product(("encoder", "decoder"), ("weight", "bias"), ("ih", "hh")):
        names[f"{side}.{part}_{place}_l0"] = f"{side[:3]}_{part[0]}_{place}"
    assert sorted(names.values()) == sorted(weights)
    config = replace(SMALL, source_vocab_size=29, target_vocab_size=74, embedding_width=256, width=256)
    network = RecurrentTranslator(config).double()
    network.load_state_dict({name: torch.from_numpy(weights[foreign]) for name, foreign in names.items()})
    return network.eval()


def g2p_reference(weights: dict[str, np.ndarray], word: str) -> tuple[list[int], np.ndarray]:
    """Return the phonemes and the logits of each step, computed as g2p-en's own numpy code does."""

    def advance(side: str, token: int, h: np.ndarray) -> np.ndarray:
        from_input = weights[f"{side}_w_ih"] @ weights[f"{side}_emb"][token] + weights[f"{side}_b_ih"]
        from_state = weights[f"{side}_w_hh"] @ h + weights[f"{side}_b_hh"]
        r, z = np.split(1 / (1 + np.exp(-from_input[:512] - from_state[:512])), 2)
        return (1 - z) * np.tanh(from_input[512:] + r * from_state[512:]) + z * h

    h = np.zeros(256)
    for token in grapheme_ids(word):
        h = advance("enc", token, h)
    phonemes, steps = [PHONEMES.index("<s>")], []
    while len(phonemes) <= 20 and phonemes[-1] != PHONEMES.index("</s>"):
        h = advance("dec", phonemes[-1], h)
        steps.append(weights["fc_w"] @ h + weights["fc_b"])
        phonemes.append(int(steps[-1].argmax()))
    return phonemes, np.stack(steps)


def grapheme_ids(word: str) -> list[int]:
    return [GRAPHEMES.index(letter) for letter in [*word, "</s>"]]


@pytest.mark.download
@pytest.mark.parametrize("word", ["transformer", "clearhead", "attention", "bottleneck", "antidisestablishmentarian"])
@torch.no_grad()
def test_released_weights_give_the_outputs_of_their_own_package(g2p_weights: dict[str, np.ndarray], word: str) -> None:
    network = g2p_network(g2p_weights)
    phonemes, steps = g2p_reference(g2p_weights, word)
    encoder_output = network.encode(torch.tensor([grapheme_ids(word)]))
    assert greedy(network, encoder_output, phonemes[0], len(steps)).tolist() == [phonemes[1:]]
    logits = network.decode(torch.tensor([phonemes[:-1]]), encoder_output)[0]
    assert_same(logits, torch.from_numpy(steps))


@pytest.mark.download
@torch.no_grad()
def test_released_weights_reproduce_the_published_example_in_a_padded_batch(g2p_weights: dict[str, np.ndarray]) -> None:
    """g2p-en's README gives these phonemes for `activationist`."""
    network = g2p_network(g2p_weights)
    words = [torch.tensor(grapheme_ids(word)) for word in ("ox", "activationist", "incomprehensibilities")]
    source = nn.utils.rnn.pad_sequence(words, batch_first=True)
    phonemes = greedy(network, network.encode(source, source != 0), PHONEMES.index("<s>"), 13)[1]
    published = ["AE2", "K", "T", "IH0", "V", "EY1", "SH", "AH0", "N", "IH0", "S", "T", "</s>"]
    assert [PHONEMES[phoneme] for phoneme in phonemes] == published
