"""Prompts that enter slots: when they are solved, and how prompts of unequal lengths are solved together."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request
from implicit_blocks.decoding.slots import steps
from implicit_blocks.decoding.slots.admission import Admission
from implicit_blocks.decoding.slots.prompts import CAPTURED, SlotPrompts

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6] * 4, [3, 3, 1]]
COMPOSED = {"injection": {"kind": "residual"}, "prelude": {"n_layers": 1}, "coda": {"n_layers": 1}}


def decoder_of(model, **options):
    """Return a decoder that pads prompts as for graphs, and the numbers of texts solved together."""
    options = {"max_batch_size": 6, "max_seq_len": 24} | options
    decoder, together = ContinuousDecoder(model, **options), []
    decoder.prompts.captured = True
    # The map is searched without padding where it could be captured; on a CPU it is called directly.
    decoder.on_prompts = lambda numbers, solution: together.append(len(numbers))
    return decoder, together


def decoded(decoder, **fields):
    for prompt in PROMPTS:
        decoder.submit(Request(prompt=prompt, max_new_tokens=5, **fields))
    made = defaultdict(list)
    for new in decoder.run():
        made[new.request].append(new)
    return made


@pytest.mark.parametrize("changes", [{}, COMPOSED], ids=["core", "composed"])
def test_prompts_of_unequal_lengths_are_solved_together(family, tiny_model, changes):
    model = tiny_model(family, tolerance=1e-2, **changes)
    decoder, together = decoder_of(model)
    made = decoded(decoder)
    assert together == [len(PROMPTS)]
    assert list(made) == [*range(len(PROMPTS))]  # the first tokens come in the order of the texts
    for row, prompt in enumerate(PROMPTS):
        alone = ib.generate(model, [prompt], max_new_tokens=5, return_logits=True)
        assert [new.token for new in made[row]] == alone.tokens[0].tolist()
        assert [new.iterations for new in made[row]] == alone.iterations[0].tolist()
        logits = torch.stack([new.logits for new in made[row]])
        torch.testing.assert_close(logits, alone.logits[0], atol=1e-5, rtol=0)


def test_prompts_with_other_limits_are_solved_apart(tiny_model):
    decoder, together = decoder_of(tiny_model("attention"))
    decoder.submit(Request(prompt=[1, 2], max_new_tokens=2, tolerance=1e-3))
    decoded(decoder)
    assert together == [1, len(PROMPTS)]


def test_too_many_tokens_for_a_graph_are_solved_in_groups_of_equal_lengths(tiny_model):
    decoder, together = decoder_of(tiny_model("attention"), max_seq_len=CAPTURED + 1)
    for length in (CAPTURED - 1, 3, CAPTURED - 1, 5):
        decoder.submit(Request(prompt=[1] * length, max_new_tokens=1))
    groups = decoder.prompts.groups(list(enumerate(decoder.waiting)))
    assert [[text.length for _, text in group] for group in groups] == [[CAPTURED - 1] * 2, [3, 5]]
    assert not together


@pytest.mark.parametrize("mixer", [ib.AttentionSpec(n_heads=4), ib.Mamba2Spec(d_state=8, head_dim=8)])
def test_states_of_narrow_types_have_no_padding(tiny_model, mixer):
    model = tiny_model("attention", mixer=mixer)
    narrow = torch.int8 if isinstance(mixer, ib.AttentionSpec) else torch.bfloat16
    decoder = ContinuousDecoder(model, max_batch_size=2, max_seq_len=24, state_dtype=narrow)
    assert not all(states.windows for states in decoder.batch.every_states())
    assert not decoder.prompts.captured


class Clock:
    """A clock that shows the time it is set to."""

    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def admission():
    """Return the admission of texts whose prompts take 10 ms."""
    found = Admission(0.1)
    for _ in range(40):
        found.took(0.01)
    return found


def test_texts_wait_until_their_slots_have_lost_as_much_as_their_prompts_cost(admission):
    counts = {"waiting": 3, "free": 2, "running": 8}
    assert not admission.is_due(1.0, **counts)
    assert not admission.is_due(1.03, **counts)  # 2 slots have lost 60 ms, and 8 texts will lose 80
    assert admission.is_due(1.041, **counts)
    assert not admission.is_due(1.05, **counts)  # the next ones


def test_texts_wait_at_most_for_a_multiple_of_the_time_of_prompts(admission):
    counts = {"waiting": 1, "free": 1, "running": 100}
    assert not admission.is_due(1.0, **counts)
    assert not admission.is_due(1.079, **counts)
    assert admission.is_due(1.081, **counts)
    for _ in range(40):
        admission.took(5.0)
    assert not admission.is_due(2.0, **counts)
    assert admission.is_due(2.101, **counts)


def test_texts_do_not_wait_for_an_idle_decoder_or_without_a_limit(admission):
    assert admission.is_due(1.0, waiting=1, free=4, running=0)
    assert not admission.is_due(1.0, waiting=0, free=4, running=0)
    assert not admission.is_due(1.0, waiting=4, free=0, running=3)
    assert Admission(0.0).is_due(1.0, waiting=1, free=4, running=3)


def test_a_text_that_waits_enters_with_the_next_ones(tiny_model, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(steps, "time", clock)
    decoder = ContinuousDecoder(tiny_model("attention"), max_batch_size=4, max_seq_len=24, gather_seconds=0.1)
    calls, stops = [], []
    decoder.on_prompts = lambda numbers, solution: calls.append(numbers)
    decoder.before_prompts = lambda: stops.append(clock.now)
    decoder.admission.took(2.0)
    for number in range(3):
        decoder.submit(Request(prompt=[1, 2], max_new_tokens=15))
        decoder.step()
        clock.now += 0.04
        assert len(calls) == 1 if number < 2 else calls == [[0]]
    clock.now += 0.03
    decoder.step()
    assert calls == [[0], [1, 2]]
    assert len(stops) == 2
    assert not decoder.waiting


def test_the_solution_of_padded_prompts_has_their_tokens(tiny_model, monkeypatch):
    model = tiny_model("mamba2", tolerance=1e-2, stopping={"scope": "prefix"})
    expected = ib.generate(model, PROMPTS, max_new_tokens=2)
    build = SlotPrompts.__init__

    def captured(self, *arguments, **options):
        build(self, *arguments, **options)
        self.captured = True

    monkeypatch.setattr(SlotPrompts, "__init__", captured)
    found = ib.generate(model, PROMPTS, max_new_tokens=2)
    for one, other in ((found, expected), (found.prompt, expected.prompt)):
        assert torch.equal(one.iterations, other.iterations)
    assert found.prompt.token_iterations is not None
    assert torch.equal(found.prompt.token_iterations, expected.prompt.token_iterations)
    torch.testing.assert_close(found.prompt.z, expected.prompt.z, atol=1e-5, rtol=0)
