"""``Solution``: joining windows, and its representation."""

from __future__ import annotations

import torch

import implicit_blocks as ib


def window(iterations, residual, converged, diverged):
    """Return the solution of one window of two tokens, for three rows."""
    return ib.Solution.of_tokens(
        torch.randn(3, 2, 4),
        iterations=torch.tensor(iterations),
        residual=torch.tensor(residual),
        converged=torch.tensor(converged),
        diverged=torch.tensor(diverged),
    )


def test_a_row_reports_its_worst_token_of_all_windows():
    yes, no = True, False
    first = window(
        [[3, 5], [2, 2], [1, 9]],
        [[0.1, 0.3], [0.1, 0.1], [0.1, 0.9]],
        [[yes, yes], [yes, yes], [yes, no]],
        [[no, no], [no, no], [no, yes]],
    )
    second = window(
        [[4, 4], [7, 1], [1, 1]],
        [[0.2, 0.2], [0.8, 0.1], [0.1, 0.1]],
        [[yes, yes], [no, yes], [yes, yes]],
        [[no, no], [no, no], [no, no]],
    )
    for windows in ([first, second], [second, first]):
        whole = ib.Solution.concatenate(windows)
        assert whole.z.shape == (3, 4, 4)
        assert whole.token_iterations.shape == whole.token_residual.shape == (3, 4)
        assert whole.iterations.tolist() == [5, 7, 9]
        torch.testing.assert_close(whole.residual, torch.tensor([0.3, 0.8, 0.9]))
        assert whole.converged.tolist() == [True, False, False]
        assert whole.diverged.tolist() == [False, False, True]
        assert whole.token_diverged.any(1).tolist() == [False, False, True]


def test_a_solution_is_represented_by_one_line_with_its_status():
    yes, no = True, False
    shown = repr(
        window(
            [[3, 5], [2, 2], [1, 9]],
            [[0.25, 0.5], [0.25, 0.25], [0.25, 0.75]],
            [[yes, yes], [yes, yes], [yes, no]],
            [[no, no], [no, no], [no, yes]],
        )
    )
    assert shown == (
        "Solution(z=(3, 2, 4), converged=2 of 3, diverged=1, iterations=2…9, residual=0.25…0.75, "
        "token_converged=5 of 6)"
    )


def test_a_model_output_is_represented_by_one_line():
    model = ib.build(ib.load_spec("word_problem_s3", ["model.d_model=32"]).model)
    tokens = torch.randint(6, (2, 5))
    out = model(tokens, labels=tokens)
    assert repr(out) == f"LMOutput(logits=(2, 5, 6), loss={out.loss.item():.4f}, solution={out.solution!r})"
    assert repr(model.eval()(tokens, return_state=True)).endswith("state=…)")
