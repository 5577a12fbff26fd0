"""Test the statements of part D of the book on the training code."""

import math

import torch
from torch.nn import functional

import clearhead
from clearhead.architecture import (
    Bidirectional,
    Causal,
    Embedding,
    Head,
    ModelConfig,
    SinusoidalPositions,
    XavierInitial,
)
from clearhead.data.batch import Batch
from clearhead.data.synthetic import make_examples
from clearhead.generation.plain import decode_plainly
from clearhead.model.positions import sinusoids
from clearhead.model.recurrent import RecurrentConfig, RecurrentTranslator
from clearhead.model.transformer import Transformer
from clearhead.options import SamplingOptions
from clearhead.training.config import TrainConfig
from clearhead.training.distributed import World
from clearhead.training.learner import Learner
from clearhead.training.loop import accumulate_gradients
from clearhead.training.objective import Objective
from clearhead.training.optimizer import AdamW, set_learning_rates
from tests.model.toys import CONTEXT, VOCAB, WIDTH, grouped, some_tokens, stack, toy, translator

CAUSAL = Causal()


def language_model(pattern=CAUSAL):
    embedding = Embedding(vocab_size=VOCAB, scale=WIDTH**0.5, positions=SinusoidalPositions())
    decoder = stack(grouped(pattern=pattern), embedding)
    return ModelConfig(width=WIDTH, context=CONTEXT, decoder=decoder, head=Head(), initial=XavierInitial())


def train_on(model, batches, learning_rate=5e-3):
    """Train a network, or a new one if a config is given, on each batch once. Return it and the losses."""
    torch.manual_seed(0)
    network = Transformer(model) if isinstance(model, ModelConfig) else model
    settings = TrainConfig(steps=len(batches), batch_size=4, optimizer=AdamW(learning_rate=learning_rate))
    learner = Learner(network, settings, World.single_process())
    losses = []
    for step, batch in enumerate(batches):
        set_learning_rates(learner.optimizers, 1.0)
        losses.append(float(accumulate_gradients(learner, batch, torch.tensor(batch.num_targets)).detach()))
        learner.update(step)
    return network.eval(), losses


def test_d1_one_loss_sums_the_cross_entropy_of_all_shifted_positions():
    """X = text[:, :-1], Y = text[:, 1:]; the cross-entropies of all positions are summed into one loss."""
    network, text = toy(language_model()), some_tokens(2, 9)
    batch = Batch(tokens=text[:, :-1], targets=text[:, 1:])
    loss = Objective(network, TrainConfig(steps=1, batch_size=2))(batch).total
    expected = torch.zeros((), dtype=torch.float64)
    logits = network(text[:, :-1])
    for row in range(2):
        for position in range(8):
            expected = expected - logits[row, position].log_softmax(-1)[text[row, position + 1]]
    torch.testing.assert_close(loss, expected)


def test_d1_gradients_reach_all_weights_but_not_the_sinusoids():
    network, text = toy(language_model(), torch.float32).train(), some_tokens(4, 12)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    learner = Learner(network, TrainConfig(steps=1, batch_size=4), World.single_process())
    batch = Batch(tokens=text[:, :-1], targets=text[:, 1:])
    accumulate_gradients(learner, batch, torch.tensor(batch.num_targets))
    reached = {name for name, parameter in network.named_parameters() if parameter.grad.abs().sum() > 0}
    for part in ("attention.query", "attention.key", "attention.value", "attention.output"):  # W_q, W_k, W_v, W_o
        assert f"decoder.layers.0.{part}.weight" in reached
    for part in ("feed_forward.up", "feed_forward.down"):  # W_1, W_2
        assert f"decoder.layers.1.{part}.weight" in reached
    assert "decoder.embedding.tokens.weight" in reached
    positions = torch.arange(12)[None]
    before_update = sinusoids(positions, WIDTH, SinusoidalPositions(), torch.float32)
    learner.update(0)
    changed = {name for name, parameter in network.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed >= reached
    assert not any("position" in name for name in before)  # the sinusoids are not weights
    after_update = sinusoids(positions, WIDTH, SinusoidalPositions(), torch.float32)
    torch.testing.assert_close(after_update, before_update, rtol=0, atol=0)


def random_text(seed, num_rows=24):
    """Return random text of four letters, which only a model that sees the next letter can predict."""
    text = torch.randint(0, 4, (num_rows, 9), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens=text[:, :-1], targets=text[:, 1:])


def test_d2_without_the_mask_the_loss_collapses_and_generation_fails():
    batches = [random_text(seed) for seed in range(300)]
    causal, causal_losses = train_on(language_model(), batches, learning_rate=2e-2)
    leaking, leaking_losses = train_on(language_model(Bidirectional()), batches, learning_rate=2e-2)
    chance = math.log(4)
    assert causal_losses[-1] > 0.95 * chance
    assert leaking_losses[-1] < 0.3 * chance
    # In generation the next token does not exist yet, so a model that has learned to copy it fails.
    unseen = random_text(seed=1000, num_rows=512)
    predictions = [network(unseen.tokens[:, :5])[:, -1] for network in (causal, leaking)]
    causal_loss, leaking_loss = (
        float(functional.cross_entropy(logits, unseen.targets[:, 4]).detach()) for logits in predictions
    )
    assert causal_loss < 1.1 * chance < 1.5 * chance < leaking_loss


def counting_batches(num_batches, stride=1):
    """Return batches of numbers that increase by `stride`, with another start in each batch."""
    start = torch.arange(4)[:, None] * 3
    texts = [(start + step + torch.arange(13) * stride) % VOCAB for step in range(num_batches)]
    return [Batch(tokens=text[:, :-1], targets=text[:, 1:]) for text in texts]


def test_d2_with_the_mask_generation_continues_the_pattern_of_the_text():
    network, losses = train_on(language_model(), counting_batches(200))
    assert losses[-1] < 0.3
    generated = list(decode_plainly(network, [2, 3, 4, 5, 6], SamplingOptions(max_new_tokens=6)))
    assert generated == [7, 8, 9, 10, 11, 12]


def test_d3_teacher_forcing_reads_the_correct_target_at_every_step():
    """The logits at t depend only on the target before t, and equal those of step-by-step decoding."""
    network, source, target = toy(translator()), some_tokens(2, 6), some_tokens(2, 5, seed=4)
    forced = network(source, target)
    encoder_output = network.encode(source)
    for length in range(1, 6):
        stepwise = network.decode(target[:, :length], encoder_output)[:, -1]
        torch.testing.assert_close(forced[:, length - 1], stepwise)
    changed = target.clone()
    changed[:, 3] = (changed[:, 3] + 1) % VOCAB
    torch.testing.assert_close(network(source, changed)[:, :3], forced[:, :3])
    assert not torch.allclose(network(source, changed)[:, 3], forced[:, 3])


def test_d3_fine_tuning_a_pretrained_model_converges_sooner():
    """Pre-training on counting by ones helps to learn to count by threes."""
    pretrained, _ = train_on(language_model(), counting_batches(200))
    _, tuned_losses = train_on(pretrained.train(), counting_batches(60, stride=3))
    _, new_losses = train_on(language_model(), counting_batches(60, stride=3))
    assert tuned_losses[-1] < 0.6 * new_losses[-1]


def sentences(seed, length, num_rows=32):
    """Return random sentences to copy letter by letter, like `<L>` in the book's task."""
    text = torch.randint(0, 8, (num_rows, length), generator=torch.Generator().manual_seed(seed))
    return Batch(source=text, tokens=functional.pad(text[:, :-1], (1, 0), value=8), targets=text)


def test_d4_a_recurrent_network_copies_long_sentences_only_with_attention():
    """Without attention, one state vector can hold short sentences but not long ones."""
    sizes = {"source_vocab_size": 9, "target_vocab_size": 9, "embedding_width": 16, "width": 32, "context": 32}
    accuracy = {}
    for attention, length in (("none", 3), ("none", 20), ("dot_product", 20)):
        torch.manual_seed(0)
        network = RecurrentTranslator(RecurrentConfig(cell="gru", attention=attention, **sizes))
        train_on(network, [sentences(seed, length) for seed in range(200)], learning_rate=1e-2)
        unseen = sentences(10**6, length, num_rows=256)
        predicted = network(unseen.source, unseen.tokens).argmax(dim=-1)
        accuracy[attention, length] = float((predicted == unseen.targets).float().mean())
    assert accuracy["none", 3] > 0.95
    assert accuracy["none", 20] < 0.5
    assert accuracy["dot_product", 20] > 0.75


def test_d4_the_transformer_changes_the_case_of_long_sentences():
    examples = list(make_examples("capitals", 48, 48, num_examples=20, seed=2, held_out=True))
    generations = clearhead.load("capitals").generate_many([source for source, _ in examples], max_new_tokens=64)
    assert [generation.text for generation in generations] == [target for _, target in examples]
    assert clearhead.load("capitals").generate("<U> I am a student").text == "I AM A STUDENT"
