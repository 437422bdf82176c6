"""Implementations of the components."""

from __future__ import annotations

import torch

from trainer.callbacks import Callback
from trainer.data.source import Batch, DataSource, EvaluationSet
from trainer.optim.schedules import Schedule


class Parity(DataSource):
    """Bits and their running parity; a sequence depends only on its position and the seed."""

    def __init__(self, spec, *, seed, vocab_size):
        self.spec, self.seed = spec, seed

    vocab_size = 2
    samples = None

    @property
    def length(self):
        return self.spec.seq_len

    def batch(self, position, count):
        rows = []
        for row in range(position, position + count):
            generator = torch.Generator().manual_seed(self.seed * 7919 + row % self.spec.period)
            rows.append(torch.randint(2, (self.length,), generator=generator))
        bits = torch.stack(rows)
        return Batch(inputs=bits, labels=bits.cumsum(1) % 2)

    def evaluation_sets(self, evaluation):
        return {"parity": EvaluationSet(name="parity", source=self, sequences=evaluation.sequences)}


class Sign(torch.optim.Optimizer):
    def __init__(self, parameters, *, lr, beta):
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 1 - group["beta"])
                parameter.sub_(state["mean"].sign(), alpha=group["lr"])


def build_sign(spec, *, model):
    return Sign(list(model.parameters()), lr=spec.learning_rate, beta=spec.beta)


class Halving(Schedule):
    def __init__(self, spec, *, total_steps):
        self.spec = spec

    def rate(self, step, *, peak):
        return peak / 2 ** (step // self.spec.every)


class Diary(Callback):
    """Stores the number of written lines as its state in checkpoints."""

    def __init__(self, spec):
        self.spec, self.lines, self.saved = spec, 0, {}

    def _write(self, run, text):
        self.lines += 1
        with (run.folder / self.spec.file).open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def on_start(self, run, *, step, checkpoint):
        if checkpoint is not None:
            self.lines = int((checkpoint / self.spec.file).read_text())
        self._write(run, f"start {step} {self.lines}")

    def on_phase(self, run, *, step, phase):
        self._write(run, f"phase {step} {phase.name}")

    def on_step(self, run, *, row):
        self._write(run, f"step {row['step']}")

    def on_evaluation(self, run, *, step, results):
        self._write(run, f"evaluation {step} {' '.join(result.name for result in results)}")

    def on_save(self, run, *, step):
        self._write(run, f"save {step}")
        self.saved[step] = self.lines

    def on_checkpoint(self, run, *, step, path):
        (path / self.spec.file).write_text(str(self.saved.pop(step)))

    def on_end(self, run, *, step, finished):
        assert not self.saved, "a checkpoint was never reported whole"
        self._write(run, f"end {step} {finished}")


class Fragile(Callback):
    def __init__(self, spec):
        self.spec = spec

    def on_step(self, run, *, row):
        if row["step"] > self.spec.after:
            raise RuntimeError("the line is dead")
