"""Part D of the book, statement by statement, on the training code itself."""

import math

import torch
from torch.nn import functional

import clearhead
from clearhead.architecture.config import Embedding, Head, ModelConfig, XavierInitial
from clearhead.architecture.parts import Bidirectional, Causal, SinusoidalPositions
from clearhead.data.batch import Batch
from clearhead.data.synthetic import examples
from clearhead.generation.plain import decode_plainly
from clearhead.model.positions import sinusoids
from clearhead.model.recurrent import RecurrentConfig, RecurrentTranslator
from clearhead.model.transformer import Transformer
from clearhead.options import SamplingOptions
from clearhead.training.config import TrainConfig
from clearhead.training.distributed import World
from clearhead.training.learner import Learner
from clearhead.training.loop import accumulate
from clearhead.training.objective import Objective
from clearhead.training.optimizer import AdamW, set_rates
from tests.model.toys import CONTEXT, VOCAB, WIDTH, grouped, some_tokens, stack, toy, translator

CAUSAL = Causal()


def language_model(pattern=CAUSAL):
    embedding = Embedding(vocab_size=VOCAB, scale=WIDTH**0.5, positions=SinusoidalPositions())
    decoder = stack(grouped(pattern=pattern), embedding)
    return ModelConfig(width=WIDTH, context=CONTEXT, decoder=decoder, head=Head(), initial=XavierInitial())


def trained(what, batches, rate=5e-3):
    """A network, new where a config is given, after one update for each batch, and the loss of each."""
    torch.manual_seed(0)
    network = Transformer(what) if isinstance(what, ModelConfig) else what
    settings = TrainConfig(steps=len(batches), batch_size=4, optimizer=AdamW(learning_rate=rate))
    learner = Learner(network, settings, World.alone())
    losses = []
    for step, batch in enumerate(batches):
        set_rates(learner.optimizers, 1.0)
        losses.append(float(accumulate(learner, batch, torch.tensor(batch.num_targets)).detach()))
        learner.update(step)
    return network.eval(), losses


def test_d1_the_shift_and_one_loss_for_all_positions():
    """X = text[:, :-1], Y = text[:, 1:]; cross-entropy at each position, summed to one loss."""
    network, text = toy(language_model()), some_tokens(2, 9)
    batch = Batch(tokens=text[:, :-1], targets=text[:, 1:])
    loss = Objective(network, TrainConfig(steps=1, batch_size=2))(batch).total
    by_hand = torch.zeros((), dtype=torch.float64)
    logits = network(text[:, :-1])
    for row in range(2):
        for place in range(8):
            by_hand = by_hand - logits[row, place].log_softmax(-1)[text[row, place + 1]]
    torch.testing.assert_close(loss, by_hand)


def test_d1_gradients_reach_all_weights_and_not_the_sinusoids():
    network, text = toy(language_model(), torch.float32).train(), some_tokens(4, 12)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    learner = Learner(network, TrainConfig(steps=1, batch_size=4), World.alone())
    batch = Batch(tokens=text[:, :-1], targets=text[:, 1:])
    accumulate(learner, batch, torch.tensor(batch.num_targets))
    reached = {name for name, parameter in network.named_parameters() if parameter.grad.abs().sum() > 0}
    for part in ("attention.query", "attention.key", "attention.value", "attention.output"):  # W_q, W_k, W_v, W_o
        assert f"decoder.layers.0.{part}.weight" in reached
    for part in ("feed_forward.up", "feed_forward.down"):  # W_1, W_2
        assert f"decoder.layers.1.{part}.weight" in reached
    assert "decoder.embedding.tokens.weight" in reached
    places = torch.arange(12)[None]
    fixed = sinusoids(places, WIDTH, SinusoidalPositions(), torch.float32)
    learner.update(0)
    moved = {name for name, parameter in network.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved >= reached
    assert not any("position" in name for name in before)  # the sinusoids are no weights at all
    torch.testing.assert_close(sinusoids(places, WIDTH, SinusoidalPositions(), torch.float32), fixed, rtol=0, atol=0)


def random_text(seed, num_rows=24):
    """Of four letters: nothing in it can be foretold, except by looking."""
    text = torch.randint(0, 4, (num_rows, 9), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens=text[:, :-1], targets=text[:, 1:])


def test_d2_without_the_mask_the_loss_collapses_and_generation_fails():
    batches = [random_text(seed) for seed in range(300)]
    masked, masked_losses = trained(language_model(), batches, rate=2e-2)
    leaking, leaking_losses = trained(language_model(Bidirectional()), batches, rate=2e-2)
    chance = math.log(4)
    assert masked_losses[-1] > 0.95 * chance
    assert leaking_losses[-1] < 0.3 * chance
    # Where the next token is not yet there to be looked at, as in generation, the copier has nothing to copy.
    unseen = random_text(seed=1000, num_rows=512)
    said = [network(unseen.tokens[:, :5])[:, -1] for network in (masked, leaking)]
    honest, surprise = (float(functional.cross_entropy(logits, unseen.targets[:, 4]).detach()) for logits in said)
    assert honest < 1.1 * chance < 1.5 * chance < surprise


def counting(num_batches, stride=1):
    """Numbers that go up by `stride`, from another beginning in each batch."""
    start = torch.arange(4)[:, None] * 3
    texts = [(start + step + torch.arange(13) * stride) % VOCAB for step in range(num_batches)]
    return [Batch(tokens=text[:, :-1], targets=text[:, 1:]) for text in texts]


def test_d2_with_the_mask_generation_goes_on_as_the_text_did():
    network, losses = trained(language_model(), counting(200))
    assert losses[-1] < 0.3
    made = list(decode_plainly(network, [2, 3, 4, 5, 6], SamplingOptions(max_new_tokens=6)))
    assert made == [7, 8, 9, 10, 11, 12]


def test_d3_teacher_forcing_reads_the_right_answer_whatever_was_said():
    """Logits at t depend on the answer given before t alone, and are those of one step after another."""
    network, source, answer = toy(translator()), some_tokens(2, 6), some_tokens(2, 5, seed=4)
    forced = network(source, answer)
    encoder_output = network.encode(source)
    for length in range(1, 6):
        alone = network.decode(answer[:, :length], encoder_output)[:, -1]
        torch.testing.assert_close(forced[:, length - 1], alone)
    changed = answer.clone()
    changed[:, 3] = (changed[:, 3] + 1) % VOCAB
    torch.testing.assert_close(network(source, changed)[:, :3], forced[:, :3])
    assert not torch.allclose(network(source, changed)[:, 3], forced[:, 3])


def test_d3_what_was_trained_before_is_adapted_sooner():
    """Pre-train, then fine-tune: counting by ones helps to count by threes."""
    before, _ = trained(language_model(), counting(200))
    _, tuned = trained(before.train(), counting(60, stride=3))
    _, anew = trained(language_model(), counting(60, stride=3))
    assert tuned[-1] < 0.6 * anew[-1]


def sentences(seed, length, num_rows=32):
    """To be said again letter by letter, as by `<L>` of the book's task."""
    text = torch.randint(0, 8, (num_rows, length), generator=torch.Generator().manual_seed(seed))
    return Batch(source=text, tokens=functional.pad(text[:, :-1], (1, 0), value=8), targets=text)


def test_d4_without_attention_a_recurrent_network_meets_its_bottleneck():
    """Short sentences pass through one state, long ones do not; with attention they do."""
    sizes = {"source_vocab_size": 9, "target_vocab_size": 9, "embedding_width": 16, "width": 32, "context": 32}
    right = {}
    for attention, length in (("none", 3), ("none", 20), ("dot_product", 20)):
        torch.manual_seed(0)
        network = RecurrentTranslator(RecurrentConfig(cell="gru", attention=attention, **sizes))
        trained(network, [sentences(seed, length) for seed in range(200)], rate=1e-2)
        unseen = sentences(10**6, length, num_rows=256)
        said = network(unseen.source, unseen.tokens).argmax(dim=-1)
        right[attention, length] = float((said == unseen.targets).float().mean())
    assert right["none", 3] > 0.95
    assert right["none", 20] < 0.5
    assert right["dot_product", 20] > 0.75


def test_d4_the_transformer_writes_capitals_whatever_the_length():
    asked = list(examples("capitals", 48, 48, num_examples=20, seed=2, held_out=True))
    made = clearhead.load("capitals").generate_many([source for source, _ in asked], max_new_tokens=64)
    assert [generation.text for generation in made] == [target for _, target in asked]
    assert clearhead.load("capitals").generate("<U> I am a student").text == "I AM A STUDENT"
