"""Options of one call: loops, start, trajectory and exit criterion are validated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder
from implicit_blocks.search.options import SearchOptions

START, TOKENS = torch.zeros(2, 3, 4), torch.ones(1, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    "options",
    [
        {"loops": 4},
        {"loops": (4, 4)},
        {"loops": (4, 0)},
        {"loops": SimpleNamespace(total=torch.tensor([1, 2]))},
        {"start": START},
        {"trajectory": [1, 2, 4]},
        {"exit": ib.KLExitSpec(tolerance=1e-3)},
    ],
    ids=lambda options: "-".join(options),
)
def test_an_option_in_range_is_kept(options):
    ((name, value),) = options.items()
    found = getattr(SearchOptions(**options), name)
    assert found is value or found == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loops": 0}, "loops is 0; choose at least 1"),
        ({"loops": True}, "loops is True.*integer"),
        ({"loops": 2.0}, r"loops is 2\.0.*integer"),
        ({"loops": (4,)}, r"loops is \(4,\).*\(n, k\)"),
        ({"loops": (0, 1)}, r"loops\[0\] is 0"),
        ({"loops": (4, -1)}, r"loops\[1\] is -1"),
        ({"loops": (2, 4)}, r"loops is \(2, 4\).*at most 2"),
        ({"start": torch.zeros(2, 3)}, r"start is \(2, 3\).*batch, tokens, width"),
        ({"start": torch.zeros(2, 3, 4, dtype=torch.int64)}, "start is .*floating-point"),
        ({"start": "zeros"}, "start is str.*tensor"),
        ({"start": START, "warm_start": True}, "start and warm_start"),
        ({"trajectory": 3}, "trajectory is 3.*numbers of calls"),
        ({"trajectory": "last"}, "trajectory is 'last'.*numbers of calls"),
        ({"trajectory": (1, 0)}, "trajectory is 0.*at least 1"),
        ({"exit": "kl"}, "exit is 'kl'.*ExitSpec such as KLExitSpec"),
        ({"exit": ib.ResidualExitSpec(), "loops": 3}, "exit is .*loops.*leave one"),
    ],
)
def test_an_option_out_of_range_is_refused_with_its_value(options, message):
    with pytest.raises(ValueError, match=message):
        SearchOptions(**options)


def test_options_compare_and_print_without_their_start():
    options = SearchOptions(start=START, tolerance=0.1)
    assert options == SearchOptions(start=START + 1, tolerance=0.1)
    assert "start" not in repr(options).replace("warm_start", "")
    assert hash(options) == hash(SearchOptions(tolerance=0.1))


@pytest.mark.parametrize(
    ("call", "nearest"),
    [
        (lambda model: model(TOKENS, tolerence=1e-3), "tolerance"),
        (lambda model: model(TOKENS, window_lenght=2), "window_length"),
        (lambda model: ib.generate(model, TOKENS, max_new_tokens=2, temprature=1.0), "temperature"),
        (lambda model: ib.stream(model, TOKENS, max_new_token=2), "max_new_tokens"),
        (lambda model: ib.score(model, TOKENS, TOKENS, max_iteration=2), "max_iterations"),
        (lambda model: ContinuousDecoder(model, max_batch_size=1, max_seq_len=8, buckts=[1]), "buckets"),
    ],
    ids=["option", "argument", "generate", "stream", "score", "decoder"],
)
@pytest.mark.parametrize("spec", [ib.ImplicitLMSpec, ib.ExplicitLMSpec])
def test_a_misspelled_keyword_argument_is_answered_with_the_nearest_one(spec, call, nearest):
    mixer = ib.AttentionSpec(n_heads=2)
    model = ib.build(spec(vocab_size=5, d_model=8, n_layers=1, mixer=mixer)).eval()
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '\w+'; did you mean '{nearest}'"):
        call(model)
