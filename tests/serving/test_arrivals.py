"""Texts that arrive in short succession enter the decoder together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from implicit_blocks.serving.arrivals import MOST_SECONDS, QUIET_SECONDS, Arrivals
from implicit_blocks.serving.jobs import Order


def order(number: int) -> Order:
    return Order(number=number, name="x", prompt=[1], max_tokens=2)


@pytest.fixture
def arrivals() -> Arrivals:
    """Return arrivals at a worker whose prompts take a second each."""
    found = Arrivals()
    for _ in range(60):
        found.took(1.0)
    return found


def test_a_text_waits_until_no_other_has_arrived_for_a_moment(arrivals):
    arrivals.add([order(0)], 10.0)
    assert arrivals.left(10.0, free=9) == pytest.approx(QUIET_SECONDS)
    arrivals.add([order(1)], 10.003)
    assert arrivals.left(10.004, free=9) == pytest.approx(QUIET_SECONDS - 0.001)
    assert arrivals.left(10.003 + QUIET_SECONDS, free=9) == 0
    assert [one.number for one in arrivals.take()] == [0, 1]
    assert not arrivals.orders


def test_a_text_waits_only_so_long_while_others_arrive(arrivals):
    for step in range(100):
        arrivals.add([order(step)], 10 + step * 0.001)
    assert arrivals.left(10 + MOST_SECONDS - 0.001, free=200) == pytest.approx(0.001)
    assert arrivals.left(10 + MOST_SECONDS, free=200) == 0


def test_texts_that_fill_the_free_slots_do_not_wait(arrivals):
    arrivals.add([order(0), order(1)], 10.0)
    assert arrivals.left(10.0, free=3) > 0
    assert arrivals.left(10.0, free=2) == arrivals.left(10.0, free=-1) == 0


def test_texts_do_not_wait_where_prompts_take_no_time():
    arrivals = Arrivals()
    arrivals.add([order(0)], 10.0)
    assert arrivals.left(10.0, free=9) == 0


def test_requests_that_arrive_together_enter_the_decoder_together(model, start, monkeypatch):
    monkeypatch.setattr(Arrivals, "left", lambda self, now, *, free: 0.0 if len(self.orders) == 3 else 5.0)
    taken: list[int] = []
    take = Arrivals.take

    def counted(self: Arrivals) -> list[Order]:
        taken.append(len(self.orders))
        return take(self)

    monkeypatch.setattr(Arrivals, "take", counted)
    server = start(model, max_batch_size=4)
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda _: server.complete("Hello", max_tokens=5), range(3)))
    expected = server.expected(list(b"Hello"), 5)
    assert [reply.json["choices"][0]["text"] for reply in replies] == [expected] * 3
    assert taken == [3]


def test_a_request_that_is_cancelled_while_it_waits_for_others_never_enters(model, start, monkeypatch):
    monkeypatch.setattr(Arrivals, "left", lambda self, now, *, free: 5.0)
    server = start(model, max_batch_size=4, timeout=0.2)
    assert server.complete("Hello", max_tokens=5).status == 504
    assert server.idle()
    assert server.worker.texts.seconds_to_gather() is None
