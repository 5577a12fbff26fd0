"""Test preference tuning (DPO): the loss against the paper's formula, the reference, resuming, and growing margins."""

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import clearhead
from clearhead.api import Model
from clearhead.checkpoint import read_adapter
from clearhead.checkpoint.huggingface import save_folder
from clearhead.data.batch import IGNORED, PreferenceBatch
from clearhead.errors import ClearheadError
from clearhead.tokenization import byte_tokenizer
from clearhead.training import loop
from clearhead.training.config import TrainConfig
from clearhead.training.loop import train
from clearhead.training.lora import Lora, LoraLinear, add_lora
from clearhead.training.metrics import read_metrics
from clearhead.training.preference import Dpo, PreferenceObjective
from clearhead.training.recipe import resolve_recipe
from clearhead.training.setup import PAIR_SPECIAL_TOKENS
from tests.checkpoint.tiny import tiny_network
from tests.parity.harness import float32_as_float64
from tests.training.recipes import quiet_console

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def pairs_batch(num_pairs=3, length=9, num_tokens=31):
    """Return random pairs: the prompt has no targets, and answers end at different places."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, num_tokens, (2 * num_pairs, length), generator=generator)
    tokens[1::2, :4] = tokens[::2, :4]  # the same prompt
    lengths = torch.tensor([9, 7, 8, 9, 6, 5])[: 2 * num_pairs, None]
    targets = tokens.roll(-1, dims=1)
    place = torch.arange(length)
    targets = targets.masked_fill((place < 3) | (place >= lengths - 1), IGNORED)
    return PreferenceBatch(tokens=tokens, targets=targets, mask=place < lengths)


def settings(**changes):
    return TrainConfig(steps=1, batch_size=2, **changes)


def log_probabilities_of_transformers(network, batch, folder):
    """Return log p of the answers, computed by transformers in float64 one row at a time."""
    save_folder(network.float(), folder)
    weights = {name: weight.double() for name, weight in load_file(folder / "model.safetensors").items()}
    found = []
    with float32_as_float64():  # transformers computes norms and rotations in float32
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).eval()
        assert model.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]  # tied
        model.tie_weights()
        for tokens, targets, mask in zip(batch.tokens, batch.targets, batch.mask, strict=True):
            with torch.no_grad():
                log_p = model(tokens[mask][None]).logits[0].log_softmax(dim=-1)
            places = [place for place in range(len(targets)) if targets[place] != IGNORED]
            found.append(sum(log_p[place, targets[place]].item() for place in places))
    return np.array(found)


@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_the_loss_is_the_formula_of_the_paper(tmp_path, beta):
    """The log-probabilities come from transformers, the formula is written out here."""
    policy, reference, batch = tiny_network(seed=1), tiny_network(seed=2), pairs_batch()
    of_policy = log_probabilities_of_transformers(policy, batch, tmp_path / "policy")
    of_reference = log_probabilities_of_transformers(reference, batch, tmp_path / "reference")
    margins = [
        beta * ((of_policy[n] - of_reference[n]) - (of_policy[n + 1] - of_reference[n + 1])) for n in range(0, 6, 2)
    ]
    expected = sum(-np.log(1 / (1 + np.exp(-margin))) for margin in margins)
    objective = PreferenceObjective(policy.double(), settings(), Dpo(beta=beta), reference.double())
    losses = objective(batch)
    assert losses.total.item() == pytest.approx(expected, rel=1e-10)
    assert losses.margins.tolist() == pytest.approx(margins, rel=1e-8)
    assert losses.cross_entropy.item() == losses.total.item()


def test_the_gradient_is_that_of_the_paper():
    """Its equation for the gradient: beta * sigmoid(-margin) * (gradient of log p(y_l) - gradient of log p(y_w))."""
    policy, reference, batch = tiny_network(seed=1).double(), tiny_network(seed=2).double(), pairs_batch()
    objective = PreferenceObjective(policy, settings(), Dpo(beta=0.3), reference)
    losses = objective(batch)
    losses.total.backward()
    found = {name: weight.grad.clone() for name, weight in policy.named_parameters()}
    policy.zero_grad()
    signs = torch.tensor([-1.0, 1.0]).repeat(3).double()
    weights = 0.3 * torch.sigmoid(-losses.margins).repeat_interleave(2) * signs
    (weights * objective._log_probabilities(policy, batch)).sum().backward()
    for name, weight in policy.named_parameters():
        torch.testing.assert_close(found[name], weight.grad)
    assert all(weight.grad is None for weight in reference.parameters())


def test_an_untuned_model_has_a_margin_of_0():
    network = tiny_network()
    losses = PreferenceObjective(network, settings(), Dpo(), copy.deepcopy(network))(pairs_batch())
    assert losses.margins.tolist() == [0.0] * 3
    assert losses.total.item() == pytest.approx(3 * np.log(2))


def test_chunks_and_parts_give_the_same_loss_and_gradient():
    batch, gradients, totals = pairs_batch(), [], []
    for chunk_tokens, num_parts in ((None, 1), (4, 1), (None, 3)):
        network, reference = tiny_network(seed=1).double(), tiny_network(seed=2).double()
        objective = PreferenceObjective(network, settings(chunk_tokens=chunk_tokens), Dpo(), reference)
        parts = loop.split_batch(batch, num_parts)
        assert all(isinstance(part, PreferenceBatch) for part in parts)
        total = sum(objective(part).total for part in parts)
        total.backward()
        totals.append(total.item())
        gradients.append(network.decoder.embedding.tokens.weight.grad)
    assert totals == pytest.approx([totals[0]] * 3, rel=1e-12)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


def test_the_reference_of_a_model_with_adapters_is_the_model_without_them():
    network, batch = tiny_network(seed=1), pairs_batch()
    plain = copy.deepcopy(network)
    add_lora(network, Lora(rank=2, dropout=0.5))
    with torch.no_grad():
        for part in network.modules():
            if isinstance(part, LoraLinear):
                part.expand.normal_(std=0.1)
    objective = PreferenceObjective(network, settings(), Dpo()).train()
    expected = PreferenceObjective(plain, settings(), Dpo(), copy.deepcopy(plain)).eval()
    torch.testing.assert_close(objective._reference_log_probabilities(batch), expected._log_probabilities(plain, batch))
    assert network.training
    objective.eval()
    assert objective(batch).margins.abs().min() > 0


def test_the_reference_stays_in_evaluation_mode():
    network = tiny_network()
    objective = PreferenceObjective(network, settings(), Dpo(), copy.deepcopy(network)).train()
    assert network.training
    assert not objective.reference.training
    assert not any(weight.requires_grad for weight in objective.reference.parameters())


# --- whole runs


def preference_recipe(folder, *layers):
    """Write a small chat model and preferences for polite answers, and return the recipe that tunes it."""
    if not (folder / "base").exists():
        tokenizer = byte_tokenizer(PAIR_SPECIAL_TOKENS)
        tokenizer.chat_template = TEMPLATE
        Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer).save(folder / "base")
        lines = [{"prompt": f"Item {n}?", "chosen": f"Yes, {n}.", "rejected": f"No {n}!"} for n in range(40)]
        (folder / "preferences.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = {
        "model": {"kind": "loaded_model", "name": str(folder / "base")},
        "data": {"kind": "preference_data", "path": str(folder / "preferences.jsonl"), "context": 48},
        "dpo": {"beta": 0.2},
        "train": {
            "steps": 12,
            "batch_size": 8,
            "accumulation": 2,
            "log_every": 1,
            "validate_every": 6,
            "save_every": 3,
            "device": "cpu",
            "optimizer": {"kind": "adam_w", "learning_rate": 3e-3, "weight_decay": 0.0},
        },
    }
    return resolve_recipe([("test", layer) for layer in (table, *layers)]).recipe


def validations(folder):
    return [row for row in read_metrics(folder) if "validation_loss" in row]


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 4}}], ids=["full", "lora"])
def test_tuning_raises_the_margin_and_the_accuracy(tmp_path, lora):
    tuned = train(preference_recipe(tmp_path, lora, {"train": {"steps": 60}}), tmp_path / "run", quiet_console())
    rows = read_metrics(tmp_path / "run")
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)  # the network is still the reference
    first, last = validations(tmp_path / "run")[0], validations(tmp_path / "run")[-1]
    assert last["margin"] > first["margin"] > 0
    assert last["margin"] > 1
    assert last["accuracy"] == 1.0
    assert tuned.validation_loss < 0.3 < np.log(2)
    model, base = clearhead.load(tmp_path / "run" / "model"), clearhead.load(tmp_path / "base")
    chosen, rejected = (
        [sum(loaded.score(text).logprobs) for loaded in (model, base)] for text in ("a:Yes, 3.", "a:No 3!")
    )
    assert chosen[0] - chosen[1] > rejected[0] - rejected[1]
    assert bool(lora) == (tmp_path / "run" / "adapter").exists()
    if lora:
        assert read_adapter(tmp_path / "run" / "adapter").base == str(tmp_path / "base")


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 2, "dropout": 0.1}}], ids=["full", "lora"])
def test_a_resumed_run_is_bit_equal(tmp_path, monkeypatch, lora):
    train(preference_recipe(tmp_path, lora), tmp_path / "whole", quiet_console())
    validate = loop.validate

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "validate", die)  # at step 6; the last checkpoint is of step 3
    with pytest.raises(KeyboardInterrupt):
        train(preference_recipe(tmp_path, lora), tmp_path / "resumed", quiet_console())
    monkeypatch.setattr(loop, "validate", validate)
    train(preference_recipe(tmp_path, lora), tmp_path / "resumed", quiet_console())
    expected, found = (load_file(tmp_path / name / "model" / "weights.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert validations(tmp_path / "resumed") == validations(tmp_path / "whole")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"dpo": None}, r"preference_data and a \[dpo\] table need each other"),
        ({"data": {"kind": "chat_data", "path": "x", "context": 8}}, "need each other"),
        ({"train": {"smoothing": 0.1}}, r"train.smoothing is not supported with \[dpo\]"),
        ({"train": {"strategy": "tp"}}, r"train.strategy 'tp' is not supported with \[dpo\]"),
        ({"dpo": {"beta": -1.0}}, "beta is -1.0"),
        ({"model": {"kind": "preset_model", "name": "gpt2"}, "tokenizer": {"kind": "byte_tokenizer"}}, "loaded_model"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_rejected(tmp_path, layer, message):
    with pytest.raises(ClearheadError, match=message):
        preference_recipe(tmp_path, layer)
