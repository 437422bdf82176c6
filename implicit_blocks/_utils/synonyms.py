"""Names of settings and kinds in other libraries, with their names here. Only hints read them."""

from __future__ import annotations

_SAME: dict[str, str] = {
    # training
    "learning_rate": "lr max_lr peak_lr base_lr step_size",
    "weight_decay": "wd l2 decay_rate",
    "max_grad_norm": "clip clip_norm grad_clip gradient_clip gradient_clip_val clip_grad max_norm",
    "batch_size": "bs batch global_batch_size train_batch_size n_batch",
    "micro_batch_size": "micro_batch device_batch_size per_device_train_batch_size grad_accum "
    "gradient_accumulation gradient_accumulation_steps accumulate_grad_batches accumulation_steps",
    "max_steps": "steps n_steps num_steps train_steps total_steps num_iterations max_iters n_iters",
    "max_tokens": "tokens n_tokens num_tokens total_tokens token_budget train_tokens",
    "epochs": "n_epochs num_epochs epoch num_train_epochs max_epochs",
    "precision": "dtype torch_dtype param_dtype amp mixed_precision half fp16 bf16 fp32 tf32",
    "bfloat16": "bf16 bf16_mixed half fp16 float16 amp",
    "float32": "fp32 f32 float full single 32",
    "optimizer": "optim opt",
    "schedule": "scheduler lr_scheduler lr_schedule lr_scheduler_type decay_type",
    "warmup": "warmup_steps warmup_ratio warmup_iters warmup_fraction lr_warmup_steps",
    "final_learning_rate": "min_lr lr_min end_lr final_lr",
    "final_fraction": "min_lr_ratio lr_min_ratio min_lr lr_min final_lr",
    "betas": "beta beta1 beta2 adam_beta1 adam_beta2",
    "eps": "epsilon adam_epsilon",
    "seed": "random_seed rng_seed manual_seed",
    "init_from": "from_pretrained pretrained finetune_from load_from resume_from resume_from_checkpoint",
    "checkpoint_every": "save_every save_steps save_interval checkpoint_interval ckpt_every",
    "evaluate_every": "eval_every eval_steps eval_interval val_every",
    "log_every": "log_interval logging_steps log_freq log_steps",
    "keep_checkpoints": "save_total_limit keep_latest_k",
    "checkpoint_activations": "gradient_checkpointing activation_checkpointing remat ac",
    "compile_layers": "compile torch_compile",
    "distributed": "parallelism parallel fsdp ddp",
    "loader_threads": "num_workers workers dataloader_num_workers",
    # data
    "seq_len": "sequence_length seq_length seqlen length context_length context_len ctx_len block_size n_ctx "
    "max_length max_seq_len max_seq_length train_length",
    "path": "data_dir dataset data_path train_data file",
    # models
    "d_model": "hidden_size hidden_dim n_embd embed_dim d_embed dim width model_dim",
    "d_ff": "intermediate_size ffn_dim ffn_hidden_size mlp_dim d_hidden d_inner",
    "n_layers": "n_layer num_layers num_hidden_layers depth layers",
    "n_heads": "n_head num_heads num_attention_heads heads",
    "n_kv_heads": "n_query_groups num_key_value_heads num_kv_heads kv_heads",
    "d_state": "state_size ssm_state_size n_state",
    "vocab_size": "vocab n_vocab vocabulary_size",
    "rope_theta": "rope_base theta",
    # search
    "tolerance": "tol f_tol b_tol atol rtol threshold",
    "damping": "tau lam relaxation",
    "max_iterations": "max_iter max_iters n_iter n_iters f_max_iter b_max_iter iterations num_iterations",
    "memory": "history history_size anderson_memory",
    "steps": "phantom_steps unroll_steps n_steps num_steps",
    "norm": "stop_mode f_stop_mode",
    "picard": "fixed_point fixed_point_iter forward_iteration banach simple_iteration",
    "anderson": "andersson aa anderson_acceleration",
    "broyden": "quasi_newton lbroyden",
    "implicit_function": "ift implicit implicit_differentiation implicit_diff adjoint deq",
    "phantom": "phantom_gradient pg",
    "unrolled": "bptt unroll backprop autograd",
    "one_step_adjoint": "one_step jfb jacobian_free",
    "last_loops": "tbptt truncated truncated_bptt",
    "mamba2": "mamba ssd ssm mamba_2",
    "attention": "transformer mha gqa self_attention softmax_attention",
    "swiglu": "gated_mlp glu llama_mlp",
    "adamw": "adam adamw_torch fused_adamw",
    "torch": "sgd rmsprop adagrad adafactor lion nadam adamw8bit adamw_8bit",
    "wsd": "warmup_stable_decay trapezoid trapezoidal",
    "cosine": "cosine_with_warmup cosine_annealing cosineannealinglr",
    "linear": "linear_with_warmup",
    "constant": "constant_with_warmup none flat",
    "implicit_lm": "implicit deq",
    "explicit_lm": "explicit baseline",
    "transformers": "hf huggingface",
    "early_stopping": "early_stop earlystopping",
    "tensorboard": "tb",
    "wandb": "weights_and_biases weights_biases",
    # options of programs
    "output": "out out_dir output_dir save_dir dest",
    "max_new_tokens": "n_tokens num_tokens length max_length max_tokens",
    "spec": "config cfg config_file",
}

PLACES: dict[str, str] = {
    "learning_rate": "training.optimizer.learning_rate",
    "weight_decay": "training.optimizer.weight_decay",
    "batch_size": "training.batch_size",
    "micro_batch_size": "training.micro_batch_size",
    "max_steps": "training.max_steps",
    "max_tokens": "training.max_tokens",
    "epochs": "training.epochs",
    "precision": "training.precision",
    "seed": "training.seed",
    "init_from": "training.init_from.path",
    "warmup": "training.schedule.warmup",
    "seq_len": "data.seq_len",
    "d_model": "model.d_model",
    "n_layers": "model.n_layers",
    "tolerance": "model.stopping.tolerance",
    "max_iterations": "model.stopping.max_iterations",
    "damping": "model.solver.damping",
}
"""Where the settings that users look for first are in the spec of a run."""


def _by_synonym() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for name, others in _SAME.items():
        for other in others.split():
            found[other] = (*found.get(other, ()), name)
    return found


SYNONYMS = _by_synonym()
"""From a name in another library to the names here that it may stand for, in the order above."""
