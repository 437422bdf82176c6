"""Registration of the trainer's components through the library's plugin hook. Imports no torch."""

from __future__ import annotations

from implicit_blocks.registry.hooks import Add, hookimpl
from trainer.specs import evaluation_tasks as tasks
from trainer.specs import run as spec

_STANDARD = "trainer.evaluation.standard:build_standard"


@hookimpl
def register_components(add: Add) -> None:
    """Register the run spec and the components of its sections."""
    add("run", spec.RunSpec, "trainer.run.build:build")
    add("model", spec.TransformersSpec, "trainer.baselines.transformers_model:TransformersLM")
    add("data", spec.WordProblemSpec, "trainer.data.word_problem:build")
    add("data", spec.StateTrackingSpec, "trainer.data.state_tracking:build")
    add("data", spec.SudokuSpec, "trainer.data.puzzles.pools:build_sudoku")
    add("data", spec.MazeSpec, "trainer.data.puzzles.pools:build_maze")
    add("data", spec.TokensSpec, "trainer.data.tokens:build")
    add("data", spec.ChatSpec, "trainer.data.chat:build")
    add("data", spec.CatbAbISpec, "trainer.data.babi:build")
    add("data", spec.MixtureSpec, "trainer.data.mixture:build")
    add("data", spec.StreamSpec, "trainer.data.stream:build")
    add("optimizer", spec.AdamWSpec, "trainer.optim.optimizers:build_adamw")
    add("optimizer", spec.MuonSpec, "trainer.optim.muon:build_muon")
    add("optimizer", spec.TorchOptimizerSpec, "trainer.optim.torch_classes:build_torch_optimizer")
    add("schedule", spec.CosineSpec, "trainer.optim.schedules:build_cosine")
    add("schedule", spec.LinearSpec, "trainer.optim.schedules:build_linear")
    add("schedule", spec.WSDSpec, "trainer.optim.schedules:build_wsd")
    add("schedule", spec.ConstantSpec, "trainer.optim.schedules:build_constant")
    add("schedule", spec.RewarmedSpec, "trainer.optim.schedules:Rewarmed")
    add("schedule", spec.WarmupConstantSqrtSpec, "trainer.optim.schedules:WarmupConstantSqrt")
    add("schedule", spec.WarmupLinearSpec, "trainer.optim.schedules:WarmupLinear")
    add("callback", spec.StopWhenSpec, "trainer.callbacks.stop_when:StopWhen")
    add("callback", spec.EarlyStoppingSpec, "trainer.callbacks.early_stopping:EarlyStopping")
    add("callback", spec.TensorBoardSpec, "trainer.callbacks.loggers:TensorBoard")
    add("callback", spec.WandbSpec, "trainer.callbacks.loggers:Wandb")
    add("callback", spec.ProfileSpec, "trainer.callbacks.profile:Profile")
    add("callback", spec.BenchmarksSpec, "trainer.callbacks.benchmarks:Benchmarks")
    add("evaluation_task", tasks.LambadaSpec, _STANDARD)
    add("evaluation_task", tasks.HellaSwagSpec, _STANDARD)
    add("evaluation_task", tasks.PIQASpec, _STANDARD)
    add("evaluation_task", tasks.ArcEasySpec, _STANDARD)
    add("evaluation_task", tasks.ArcChallengeSpec, _STANDARD)
    add("evaluation_task", tasks.WinoGrandeSpec, _STANDARD)
    add("evaluation_task", tasks.OpenBookQASpec, _STANDARD)
    add("evaluation_task", tasks.BoolQSpec, _STANDARD)
    add("evaluation_task", tasks.HarnessTaskSpec, "trainer.evaluation.standard:build_harness_task")
