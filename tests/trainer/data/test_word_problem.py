"""Word problems: labels, distribution, the published draw order, and streams at numbered positions."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from implicit_blocks.specs import SpecError
from trainer.data.source import rank_share
from trainer.data.word_problem import BLOCK, WordProblem, WordProblemStream, build
from trainer.specs.groups import group, monoid
from trainer.specs.run import EvaluationSpec, WordProblemSpec

PUBLISHED = {"group": "A5", "monoid": "EABX"}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def naive_labels(problem: WordProblem, inputs: torch.Tensor) -> torch.Tensor:
    """Return the prefix products, computed by a loop over the tokens."""
    size = 1 if problem.monoid is None else problem.monoid.order
    labels = []
    for row in inputs.tolist():
        products = []
        g, m = problem.group.identity, 0 if problem.monoid is None else problem.monoid.identity
        for token in row:
            g = problem.group.compose(g, token // size)
            m = 0 if problem.monoid is None else problem.monoid.compose(m, token % size)
            products.append(size * g + m)
        labels.append(products)
    return torch.tensor(labels)


@pytest.mark.parametrize("draw_order", ["fast", "published"])
@pytest.mark.parametrize(
    ("group", "monoid"),
    [("S3", None), ("A5", "EABX"), ("S5", "EABX"), ("Z7", [[1, 0], [0, 1]]), ("Z1", "EABX"), ("S6", "EABX")],
    ids=["S3", "A5xEABX", "S5xEABX", "Z7xtable", "EABX", "S6xEABX-two-tables"],
)
def test_labels_are_prefix_products(group: str, monoid: object, draw_order: str) -> None:
    problem = WordProblem(group=group, monoid=monoid, identity_probability=0.3, draw_order=draw_order)
    inputs, labels = problem.sample(150, 70, seeded(0))
    assert inputs.shape == labels.shape == (150, 70)
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.is_contiguous()
    assert labels.is_contiguous()
    assert inputs.min() >= 0
    assert inputs.max() < problem.vocab_size
    assert torch.equal(labels, naive_labels(problem, inputs))


@settings(max_examples=60)
@given(n=st.integers(1, 300), length=st.integers(1, 40), seed=st.integers(0, 2**40), p=st.floats(0, 1))
def test_labels_are_prefix_products_at_any_shape(n: int, length: int, seed: int, p: float) -> None:
    problem = WordProblem(group="S3", identity_probability=p)
    inputs, labels = problem.sample(n, length, seeded(seed))
    assert torch.equal(labels, naive_labels(problem, inputs))


def test_ids_are_within_the_vocabulary() -> None:
    assert WordProblem(group="S3", identity_probability=0).vocab_size == 6
    problem = WordProblem(**PUBLISHED, identity_probability=1)
    assert problem.vocab_size == 240
    inputs, _ = problem.sample(64, 64, seeded(0))
    assert inputs.max() == 3  # nothing but identities of the group, and every element of the monoid
    assert len(inputs.unique()) == 4


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_smaller_types_hold_the_same_numbers(dtype: torch.dtype) -> None:
    for order in ("fast", "published"):
        problem = WordProblem(**PUBLISHED, identity_probability=0.5, draw_order=order)
        small = problem.sample(200, 33, seeded(3), dtype=dtype)
        for a, b in zip(small, problem.sample(200, 33, seeded(3)), strict=True):
            assert a.dtype == dtype
            assert torch.equal(a.long(), b)


@pytest.mark.parametrize("draw_order", ["fast", "published"])
@pytest.mark.parametrize("p", [0.0, 0.25, 0.9])
def test_tokens_have_their_probabilities(draw_order: str, p: float) -> None:
    problem = WordProblem(**PUBLISHED, identity_probability=p, draw_order=draw_order)
    inputs, _ = problem.sample(4096, 256, seeded(11))
    counts = np.bincount(inputs.reshape(-1).numpy(), minlength=240)
    expected = np.full((60, 4), (1 - p) / 240)
    expected[0] += p / 4
    expected *= counts.sum()
    chi_square = ((counts - expected.reshape(-1)) ** 2 / expected.reshape(-1)).sum()
    # 239 degrees of freedom: mean 239, standard deviation 21.9; the bounds are five deviations.
    assert 130 < chi_square < 349


def test_neighbours_are_independent() -> None:
    problem = WordProblem(group="S3", identity_probability=0.5)
    inputs, _ = problem.sample(4096, 128, seeded(5))
    x = inputs.numpy()
    single = np.bincount(x.reshape(-1), minlength=6) / x.size
    for pairs in (6 * x[:, :-1] + x[:, 1:], 6 * x[:-1] + x[1:], 6 * x[:-BLOCK] + x[BLOCK:]):
        counts = np.bincount(pairs.reshape(-1), minlength=36)
        expected = np.outer(single, single).reshape(-1) * counts.sum()
        assert ((counts - expected) ** 2 / expected).sum() < 80  # 25 degrees of freedom


def test_the_identity_fraction_is_p_and_its_share_of_the_rest() -> None:
    problem = WordProblem(group="A5", identity_probability=0.9)
    inputs, _ = problem.sample(8192, 256, seeded(2))
    p, n = 0.9 + 0.1 / 60, inputs.numel()
    assert abs((inputs == 0).float().mean().item() - p) < 5 * (p * (1 - p) / n) ** 0.5


def test_a_large_group_is_uniform_too() -> None:
    # 720·4 elements: few whole cells of 65,536 each, so the second draw matters.
    problem = WordProblem(group="S6", monoid="EABX", identity_probability=0)
    inputs, _ = problem.sample(2048, 256, seeded(9))
    counts = np.bincount(inputs.reshape(-1).numpy(), minlength=2880)
    expected = inputs.numel() / 2880
    assert abs(((counts - expected) ** 2 / expected).sum() - 2879) < 5 * (2 * 2879) ** 0.5


@pytest.mark.parametrize("p", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("with_monoid", [True, False], ids=["A5xEABX", "A5"])
def test_the_published_order_bit_by_bit(p: float, with_monoid: bool) -> None:
    order = 4 if with_monoid else 1
    generator = seeded(42)
    a5, m = group("A5"), monoid("EABX")
    expected_inputs, expected_labels = [], []
    for _ in range(12):
        hard = torch.rand(50, generator=generator) > p
        g = torch.randint(60, (50,), generator=generator) * hard
        e = torch.randint(order, (50,), generator=generator)
        expected_inputs.append(order * g + e)
        total_g, total_m, labels = 0, 0, []
        for j in range(50):
            total_g = int(g[j]) if j == 0 else a5.compose(total_g, int(g[j]))
            total_m = int(e[j]) if j == 0 else m.compose(total_m, int(e[j]))
            labels.append(order * total_g + total_m)
        expected_labels.append(torch.tensor(labels))
    problem = WordProblem(
        group="A5", monoid="EABX" if with_monoid else None, identity_probability=p, draw_order="published"
    )
    generator_after = seeded(42)
    inputs, labels = problem.sample(12, 50, generator_after)
    assert torch.equal(inputs, torch.stack(expected_inputs))
    assert torch.equal(labels, torch.stack(expected_labels))
    assert torch.equal(generator.get_state(), generator_after.get_state())

    stream = WordProblemStream(problem, length=50, seed=42)
    for position, count in [(3, 4), (0, 2), (2, 10), (11, 1)]:
        assert torch.equal(stream.batch(position, count).inputs, inputs[position : position + count])
        assert torch.equal(stream.batch(position, count).labels, labels[position : position + count])


def test_the_published_order_without_a_generator_is_torchs_default_one() -> None:
    problem = WordProblem(**PUBLISHED, identity_probability=0.5, draw_order="published")
    with torch.random.fork_rng():
        torch.manual_seed(7)
        inputs, _ = problem.sample(3, 20)
    assert torch.equal(inputs, problem.sample(3, 20, seeded(7))[0])


def test_the_fast_order_is_pinned() -> None:
    # Checkpoints name positions in this stream: changing it would change what a resumed run sees.
    stream = WordProblemStream(WordProblem(**PUBLISHED, identity_probability=0.5), length=8, seed=1)
    assert stream.batch(127, 2).inputs.tolist() == PINNED


def test_sequences_do_not_depend_on_the_number_of_threads() -> None:
    problem = WordProblem(group="S5", identity_probability=0.5)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = problem.sample(500, 64, seeded(1))
        torch.set_num_threads(2)
        two = problem.sample(500, 64, seeded(1))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
    assert not torch.equal(one[0], problem.sample(500, 64, seeded(2))[0])


@settings(max_examples=40)
@given(position=st.integers(0, 700), count=st.integers(1, 300), order=st.sampled_from(["fast", "published"]))
def test_a_stream_does_not_depend_on_the_batch_size(position: int, count: int, order: str) -> None:
    problem = WordProblem(group="S3", identity_probability=0.5, draw_order=order)
    whole = WordProblemStream(problem, length=16, seed=3).batch(0, 1000)
    inputs, labels = whole.inputs, whole.labels
    part = WordProblemStream(problem, length=16, seed=3).batch(position, count)
    assert torch.equal(part.inputs, inputs[position : position + count])
    assert torch.equal(part.labels, labels[position : position + count])


@pytest.mark.parametrize("order", ["fast", "published"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_share_a_step(order: str, world_size: int) -> None:
    problem = WordProblem(group="S3", identity_probability=0.5, draw_order=order)
    stream = WordProblemStream(problem, length=16, seed=3)
    whole = stream.batch(4 * 100, 100)
    shares = [rank_share(100, rank=rank, world_size=world_size) for rank in range(world_size)]
    parts = [stream.batch(4 * 100 + first, count) for first, count in shares]
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)


def test_jumps_in_the_published_order_equal_sequential_reading() -> None:
    problem = WordProblem(group="A5", monoid="EABX", identity_probability=0.5, draw_order="published")
    far = 2 * (1 << 20) // (3 * 64) + 5  # numbers are discarded a million at a time
    jumped, walked = (WordProblemStream(problem, length=64, seed=3) for _ in range(2))
    for position in range(0, far, 1000):
        walked.batch(position, min(1000, far - position))
    assert torch.equal(jumped.batch(far, 2).inputs, walked.batch(far, 2).inputs)


def test_distant_positions_do_not_draw_earlier_ones() -> None:
    problem = WordProblem(group="S3", identity_probability=0.5)
    batch = WordProblemStream(problem, length=16, seed=2**64 - 1).batch(10**15, 4)
    assert batch.inputs.shape == (4, 16)


def test_streams_differ_by_seed_and_position() -> None:
    problem = WordProblem(group="S5", identity_probability=0)
    batches = [
        WordProblemStream(problem, length=32, seed=seed).batch(position, BLOCK).inputs
        for seed, position in itertools.product((0, 1, 2), (0, BLOCK, 2 * BLOCK))
    ]
    rows = torch.cat(batches)
    assert len(rows.unique(dim=0)) == len(rows)


def test_a_longer_stream_begins_like_a_shorter_one() -> None:
    problem = WordProblem(group="S5", identity_probability=0.5)
    short = WordProblemStream(problem, length=20, seed=0).batch(100, 60)
    long = WordProblemStream(problem, length=50, seed=0).batch(100, 60)
    assert torch.equal(short.inputs, long.inputs[:, :20])
    assert torch.equal(short.labels, long.labels[:, :20])


def evaluation(**changes: object) -> SimpleNamespace:
    fields = {"lengths": (8, 16), "identity_probabilities": (0.5, 0.0), "sequences": 10, "seed": 3}
    return SimpleNamespace(**(fields | changes))


def test_evaluation_sets_have_the_requested_lengths_and_probabilities() -> None:
    stream = WordProblemStream(WordProblem(**PUBLISHED, identity_probability=0.9), length=8, seed=3)
    sets = stream.evaluation_sets(evaluation())
    assert list(sets) == ["p0.5_L8", "p0.5_L16", "p0_L8", "p0_L16"]
    chosen = sets["p0_L16"]
    assert chosen.settings == {"identity_probability": 0.0, "length": 16}
    assert chosen.length == 16
    assert chosen.source.vocab_size == 240
    batches = list(chosen.batches(4))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    inputs = torch.cat([batch.inputs for batch in batches])
    by_rank = [batch for r in range(3) for batch in chosen.batches(4, rank=r, world_size=3)]
    assert torch.equal(torch.cat([batch.inputs for batch in by_rank]), inputs)
    assert torch.equal(torch.cat([batch.labels for batch in batches]), naive_labels(stream.problem, inputs))
    # The evaluation data differ from the training data despite equal seeds.
    assert not torch.equal(next(sets["p0.5_L8"].batches(10)).inputs, stream.batch(0, 10).inputs)


def test_evaluation_falls_back_to_the_training_settings() -> None:
    stream = WordProblemStream(WordProblem(group="S3", identity_probability=0.25), length=12, seed=0)
    sets = stream.evaluation_sets(evaluation(lengths=(), identity_probabilities=()))
    assert list(sets) == ["p0.25_L12"]


def test_the_published_order_is_not_evaluated_on_training_data() -> None:
    problem = WordProblem(group="S3", identity_probability=0.5, draw_order="published")
    stream = WordProblemStream(problem, length=8, seed=3)
    with pytest.raises(ValueError, match=r"with the training seed 3 would use training data"):
        stream.evaluation_sets(evaluation())
    assert stream.evaluation_sets(evaluation(seed=4))


def test_a_spec_builds_its_stream() -> None:
    spec = SimpleNamespace(group="A4", monoid=None, identity_probability=0.5, seq_len=32, draw_order="fast")
    stream = build(spec, seed=5, vocab_size=12)
    assert (stream.vocab_size, stream.length, stream.samples) == (12, 32, None)
    direct = WordProblemStream(WordProblem(group="A4", identity_probability=0.5), length=32, seed=5)
    assert torch.equal(stream.batch(9, 3).inputs, direct.batch(9, 3).inputs)
    with pytest.raises(ValueError, match=r"12 IDs, but the model has vocab_size 6; set model\.vocab_size=12"):
        build(spec, vocab_size=6)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_invalid_probabilities_are_refused(p: float) -> None:
    with pytest.raises(ValueError, match=rf"identity_probability must be from 0 to 1, got {p}"):
        WordProblem(group="S3", identity_probability=p)


def test_invalid_values_are_refused() -> None:
    problem = WordProblem(group="S5", monoid="EABX", identity_probability=0.5)
    with pytest.raises(ValueError, match="draw_order 'quick' is unknown"):
        WordProblem(group="S3", identity_probability=0, draw_order="quick")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        problem.sample(1, 0)
    with pytest.raises(ValueError, match="got position 0, count 0"):
        problem.sample(0, 1)
    with pytest.raises(ValueError, match=r"uint8 is too small for a vocabulary of 480; use torch\.int16"):
        problem.sample(1, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="float32"):
        problem.sample(1, 1, dtype=torch.float32)
    stream = WordProblemStream(problem, length=4, seed=0)
    with pytest.raises(ValueError, match="got position -1, count 2"):
        stream.batch(-1, 2)
    with pytest.raises(ValueError, match="rank must be from 0 to world_size - 1 = 1, got 2"):
        rank_share(4, rank=2, world_size=2)
    with pytest.raises(ValueError, match="seed -1 is out of range"):
        WordProblemStream(problem, length=4, seed=-1)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        WordProblemStream(problem, length=0, seed=0)


PINNED = [[103, 102, 2, 18, 3, 1, 2, 2], [3, 2, 0, 47, 2, 0, 1, 1]]


def test_several_identity_probabilities_alternate_from_sequence_to_sequence() -> None:
    ps = (0.9, 0.5, 0.0)
    mixed = build(WordProblemSpec(group="A5", identity_probability=ps, seq_len=32), seed=7).batch(100, 600)
    for number, p in enumerate(ps):
        alone = build(WordProblemSpec(group="A5", identity_probability=p, seq_len=32), seed=7).batch(100, 600)
        rows = [row for row in range(600) if (100 + row) % BLOCK % 3 == number]
        assert torch.equal(mixed.inputs[rows], alone.inputs[rows])
        assert torch.equal(mixed.labels[rows], alone.labels[rows])


def test_several_identity_probabilities_are_evaluated_apart() -> None:
    source = build(WordProblemSpec(group="S3", identity_probability=(0.9, 0.5), seq_len=8))
    assert list(source.evaluation_sets(EvaluationSpec())) == ["p0.9_L8", "p0.5_L8"]


def test_the_published_order_has_one_identity_probability() -> None:
    spec = WordProblemSpec(group="A5", identity_probability=(0.9, 0.5), seq_len=8, draw_order="published")
    with pytest.raises(
        ValueError, match=r"one identity_probability, got \[0.9, 0.5\]; use draw_order 'fast'"
    ):
        build(spec)


@pytest.mark.parametrize("p", [[], [0.5, 1.5]])
def test_identity_probabilities_out_of_range_are_refused(p: list[float]) -> None:
    with pytest.raises(SpecError, match="identity_probability"):
        WordProblemSpec.model_validate({"group": "S3", "seq_len": 8, "identity_probability": p})
    with pytest.raises(ValueError, match="identity_probability must be from 0 to 1"):
        WordProblem(group="S3", identity_probability=p)
