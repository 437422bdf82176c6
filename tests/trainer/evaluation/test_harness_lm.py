"""The lm-eval adapter: equal to lm-eval's own backend, independent of batch and padding."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from implicit_blocks import registry
from implicit_blocks.hf import from_library
from trainer.distributed import Ranks

KINDS = ("lambada", "hellaswag", "piqa", "arc_easy", "winogrande", "openbookqa", "boolq")


def asked(kinds, data) -> list[Any]:
    from trainer.evaluation.scores import EvalTask

    specs = [registry.entry("evaluation_task", kind).spec() for kind in kinds]
    return [
        EvalTask(name=spec.kind, spec=spec, task=registry.build(spec, data=data), file=spec.locate(data))
        for spec in specs
    ]


def harness(model: Any, tokenizer: Any, **options: Any) -> Any:
    from trainer.evaluation.harness import HarnessLM

    return HarnessLM(from_library(model), tokenizer, **{"max_length": 48, **options})


def answers(lm: Any, tasks: list[Any]) -> list[tuple[float, bool]]:
    """Return log-likelihood and greediness of every request of every task."""
    found = []
    for task in tasks:
        task.task.build_all_requests(limit=None, rank=0, world_size=1)
        found += lm.loglikelihood(task.task.instances, disable_tqdm=True)
    return found


def assert_equal(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert len(found) == len(expected) > 35
    ours, theirs = (torch.tensor([v for v, _ in rows], dtype=torch.float64) for rows in (found, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]


def test_log_likelihoods_are_those_of_lm_eval_s_own_backend(
    family, small_model, tokenizer, benchmarks, tmp_path
):
    from lm_eval.models.huggingface import HFLM

    model, tasks = small_model(family), asked(KINDS, benchmarks)
    from_library(model).save_pretrained(tmp_path / "exported")
    tokenizer.save_pretrained(tmp_path / "exported")
    theirs = HFLM(pretrained=str(tmp_path / "exported"), device="cpu", batch_size=3, max_length=48)
    expected = answers(theirs, tasks)
    assert min(value for value, _ in expected) < -10
    ours = harness(model, tokenizer)
    assert_equal(answers(ours, tasks), expected)
    assert ours.truncated > 0  # both truncate requests longer than the maximum


def test_scores_depend_on_neither_batch_nor_padding(family, small_model, tokenizer, benchmarks):
    model, tasks = small_model(family), asked(("hellaswag", "piqa", "openbookqa", "winogrande"), benchmarks)
    expected = answers(harness(model, tokenizer, batch_size=1), tasks)
    for size, padding in ((3, "right"), (16, "left")):  # a batch of one has no padding
        assert_equal(answers(harness(model, tokenizer, batch_size=size, padding=padding), tasks), expected)


def test_scores_equal_those_of_lm_eval(small_model, tokenizer, benchmarks):
    """Accuracies and the perplexity are recomputed from the log-likelihoods."""
    from trainer.evaluation.scores import run_tasks

    lm = harness(small_model(), tokenizer)
    (scores,) = run_tasks(lm, asked(("lambada", "hellaswag"), benchmarks))
    lambada, hellaswag = scores.tasks
    answered = [sample["filtered_resps"][0] for sample in lambada.samples]
    mean = sum(value for value, _ in answered) / len(answered)
    assert lambada.metrics["perplexity"] == pytest.approx(math.exp(-mean))
    assert lambada.metrics["acc"] == sum(is_greedy for _, is_greedy in answered) / len(answered)
    right, right_by_length = 0, 0
    for sample in hellaswag.samples:
        values = [value for value, _ in sample["filtered_resps"]]
        by_length = [v / len(c) for v, c in zip(values, sample["doc"]["choices"], strict=True)]
        right += values.index(max(values)) == sample["doc"]["gold"]
        right_by_length += by_length.index(max(by_length)) == sample["doc"]["gold"]
    assert hellaswag.metrics == {"acc": right / 4, "acc_norm": right_by_length / 4}
    assert hellaswag.items == 4
    assert set(hellaswag.errors) == {"acc", "acc_norm"}


def test_limit_takes_the_first_items(small_model, tokenizer, benchmarks):
    from trainer.evaluation.scores import run_tasks

    (scores,) = run_tasks(harness(small_model(), tokenizer), asked(("piqa",), benchmarks), limit=2)
    (task,) = scores.tasks
    assert task.items == 2
    assert [sample["doc_id"] for sample in task.samples] == [0, 1]


def test_self_iterations_bound_the_search(small_model, tokenizer, benchmarks):
    from trainer.evaluation.scores import run_tasks

    lm, tasks = harness(small_model(), tokenizer), asked(("piqa", "winogrande"), benchmarks)
    found = run_tasks(lm, tasks, budgets=(1, 3, None))
    one, three, spec = ([task.search for task in scores.tasks] for scores in found)
    assert all(tally.iterations == 1.0 and tally.non_converged == 1.0 for tally in one)
    assert all(tally.iterations_max == 3 for tally in three)
    assert all(tally.non_converged == 0.0 and tally.iterations > 3.0 for tally in spec)
    assert all(tally.residual < before.residual for tally, before in zip(spec, three, strict=True))
    assert all(1.0 < tally.token_iterations <= tally.iterations for tally in spec)
    # Each text is read once: the tally counts sequences, not requests.
    assert spec[0].sequences == 6
    lls = [[sample["filtered_resps"] for sample in scores.tasks[0].samples] for scores in found]
    assert lls[0] != lls[1] != lls[2]


def test_search_options_change_the_tolerance(small_model, tokenizer, benchmarks):
    from trainer.evaluation.scores import run_tasks

    lm, tasks = harness(small_model(), tokenizer), asked(("piqa",), benchmarks)
    (tight,), (loose,) = run_tasks(lm, tasks), run_tasks(lm, tasks, search={"tolerance": 0.1})
    assert loose.tasks[0].search.iterations < tight.tasks[0].search.iterations


def test_explicit_models_have_no_searches(tokenizer, benchmarks):
    import implicit_blocks as ib
    from trainer.evaluation.scores import run_tasks
    from trainer.evaluation.tables import paper_table, task_table

    spec = ib.ExplicitLMSpec(vocab_size=300, d_model=16, n_layers=1, mixer=ib.AttentionSpec(n_heads=2))
    found = run_tasks(harness(ib.build(spec).eval(), tokenizer), asked(("piqa",), benchmarks))
    assert found[0].tasks[0].search is None
    assert found[0].as_row()["tasks"]["piqa"]["search"] is None
    assert "iterations" not in paper_table(found).replace("self-iterations", "")
    assert "piqa" in task_table(found)


def test_equal_requests_share_a_forward_pass(small_model, tokenizer):
    """One-token answers to the same question, and a repeated request, share a forward pass."""
    from lm_eval.api.instance import Instance

    lm = harness(small_model(), tokenizer)
    pairs = [("One two", "a"), ("One two", "b"), ("One two", "a"), ("One", " two"), ("One tw", "oa")]
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=n) for n, pair in enumerate(pairs)
    ]
    found = lm.loglikelihood(requests, disable_tqdm=True)
    assert found[0] == found[2]
    alone = [lm.loglikelihood([request], disable_tqdm=True)[0] for request in requests]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in alone], abs=1e-5)


def test_rolling_log_likelihoods_and_generation_work_too(family, small_model, tokenizer):
    from lm_eval.api.instance import Instance

    lm = harness(small_model(family), tokenizer, batch_size=2)
    texts = ["The sun and the water and the wind, over and over and over and over again." * 2, "One"]
    rolling = [Instance(request_type="loglikelihood_rolling", doc={}, arguments=(t,), idx=0) for t in texts]
    found = lm.loglikelihood_rolling(rolling, disable_tqdm=True)
    tokens = tokenizer.encode(texts[1])
    with torch.no_grad():
        logits = lm.model(torch.tensor([[0, *tokens[:-1]]])).logits.log_softmax(-1)
    expected = sum(float(logits[0, at, token]) for at, token in enumerate(tokens))
    assert found[1] == pytest.approx(expected, abs=1e-4)
    assert found[0] < found[1]
    options = {"until": ["zzz"], "max_gen_toks": 3, "do_sample": False}
    generate = [Instance(request_type="generate_until", doc={}, arguments=(t, options), idx=0) for t in texts]
    lm.restart(search={"max_iterations": 2})
    together = lm.generate_until(generate, disable_tqdm=True)
    assert together == [lm.generate_until([request], disable_tqdm=True)[0] for request in generate]


def test_requests_that_just_fit_are_not_counted_as_cut(small_model, tokenizer):
    lm = harness(small_model(), tokenizer)  # a model reads all tokens but the last
    for length, cut in ((48, 0), (49, 0), (50, 1)):
        lm.restart()
        lm._loglikelihood_tokens([(None, [5] * (length - 2), [6, 7])], disable_tqdm=True)
        assert lm.truncated == cut, length


def test_iterations_of_padding_do_not_count():
    from trainer.evaluation.harness import HarnessLM

    of_row = torch.tensor([3, 2])
    yes = torch.tensor([True, True])
    solution: Any = SimpleNamespace(
        iterations=of_row, residual=of_row / 10, converged=yes, diverged=~yes,
        token_iterations=torch.tensor([[1, 3, 9], [2, 9, 9]]),
    )  # fmt: skip
    lm: Any = SimpleNamespace(_solutions=[], ranks=Ranks(torch.device("cpu")))
    HarnessLM._note(lm, solution, torch.tensor([[1, 1, 0], [1, 0, 0]]))
    tally = HarnessLM.tally(lm)
    assert tally is not None
    assert (tally.token_iterations, tally.iterations, tally.iterations_max) == (2.0, 2.5, 3)


def test_a_continuation_longer_than_the_maximum_is_refused(small_model, tokenizer):
    from lm_eval.api.instance import Instance

    request = Instance(request_type="loglikelihood", doc={}, arguments=("One", " x" * 60), idx=0)
    with pytest.raises(ValueError, match="more than the model's maximum of 48"):
        harness(small_model(), tokenizer).loglikelihood([request], disable_tqdm=True)


def test_bfloat16_is_autocast(small_model, tokenizer, benchmarks):
    tasks = asked(("piqa",), benchmarks)
    exact = answers(harness(small_model(), tokenizer), tasks)
    rough = answers(harness(small_model(), tokenizer, precision="bfloat16"), tasks)
    assert exact != rough
    assert [v for v, _ in rough] == pytest.approx([v for v, _ in exact], rel=0.05)


@pytest.mark.slow
def test_real_items_score_as_in_lm_eval_s_own_backend(family, small_model, tokenizer, shared_data, tmp_path):
    """All tasks of the paper's table on the real files: equal log-likelihoods (1e-4), equal metrics."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    from trainer.evaluation.command import PAPER_TASKS
    from trainer.evaluation.scores import run_tasks

    model, tasks = small_model(family), asked(PAPER_TASKS, shared_data)
    from_library(model, max_position_embeddings=640).save_pretrained(tmp_path / "exported")
    tokenizer.save_pretrained(tmp_path / "exported")
    ours = harness(model, tokenizer, batch_size=5, max_length=640)
    (scores,) = run_tasks(ours, tasks, limit=12)
    theirs = HFLM(pretrained=str(tmp_path / "exported"), device="cpu", batch_size=2)
    assert theirs.max_length == 640
    for task, score in zip(tasks, scores.tasks, strict=True):
        found = lm_eval.evaluate(
            theirs, {"tasks": {task.name: task.task}}, limit=12, bootstrap_iters=0, log_samples=True
        )
        for our, their in zip(score.samples, found["samples"][task.name], strict=True):
            assert our["arguments"] == their["arguments"]
            values = [[value for value, _ in sample["filtered_resps"]] for sample in (our, their)]
            assert values[0] == pytest.approx(values[1], abs=1e-4)
        for metric, value in score.metrics.items():
            expected = found["results"][task.name][f"{metric},none"]
            assert value == pytest.approx(expected, rel=1e-4)
            if metric.startswith("acc"):
                assert value == expected
