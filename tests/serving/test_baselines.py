"""Models of transformers, which have no slots: each text is that of their own ``generate``."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from implicit_blocks import registry
from implicit_blocks.decoding import Request, Sampling
from implicit_blocks.serving.baseline import TransformersDecoder
from implicit_blocks.serving.options import ServerOptions
from implicit_blocks.serving.server import load

pytest.importorskip("transformers", reason="transformers is not installed")

ATTENTION = {
    "architecture": "llama",
    "config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
}
RECURRENT = {
    "architecture": "rwkv",
    "config": {"hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2, "rescale_every": 1},
}
POSITIONS = {"architecture": "gpt2", "config": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}}


def build(changes: dict[str, Any], vocab_size: int = 257) -> Any:
    """Return a baseline whose greedy texts have several different characters."""
    torch.manual_seed(1)
    spec = registry.entry("model", "transformers").spec
    wrapper = registry.build(spec.model_validate({"vocab_size": vocab_size, **changes})).eval()
    with torch.no_grad():
        for parameter in wrapper.parameters():
            parameter.mul_(3)
    return wrapper


def alone(model: Any, prompt: list[int], count: int, seed: int = 0, **rule: Any) -> list[int]:
    """Return the tokens of transformers' own ``generate``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        rule = {"do_sample": True, "top_k": 0, **rule} if rule else {"do_sample": False}
        made = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            pad_token_id=0,
            **rule,
        )
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens


def text_of(reply: Any) -> str:
    assert reply.status == 200, reply.body
    text: str = reply.json["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def baseline(serve):
    with serve(build(ATTENTION).to_transformers(), max_batch_size=3) as found:
        yield found


@pytest.mark.parametrize("changes", [ATTENTION, RECURRENT, POSITIONS], ids=lambda c: c["architecture"])
def test_texts_that_take_turns_are_those_of_generate_alone(changes):
    model = build(changes).to_transformers()
    rules = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.5, "top_p": 0.8}]
    prompts = [[72, 105], [65], [1, 2, 3, 4], [200, 7]]
    decoder = TransformersDecoder(model, max_batch_size=3)
    for number, (prompt, rule) in enumerate(zip(prompts, rules, strict=True)):
        decoder.submit(
            Request(prompt=prompt, max_new_tokens=5 + number, sampling=Sampling(**rule), seed=10 + number)
        )
    made: list[list[int]] = [[] for _ in prompts]
    while decoder.busy:
        for new in decoder.step():
            made[new.request].append(new.token)
            assert new.last == (len(made[new.request]) == 5 + new.request)
    for number, (prompt, rule) in enumerate(zip(prompts, rules, strict=True)):
        assert made[number] == alone(model, prompt, 5 + number, 10 + number, **rule)
    assert not [thread for thread in threading.enumerate() if thread.name == "generate" and thread.is_alive()]


def test_the_random_numbers_of_others_are_not_changed():
    model = build(ATTENTION).to_transformers()
    decoder = TransformersDecoder(model, max_batch_size=1)
    decoder.submit(Request(prompt=[5], max_new_tokens=3, sampling=Sampling(temperature=1.0), seed=3))
    before = torch.get_rng_state()
    while decoder.busy:
        decoder.step()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_completion_is_the_text_of_generate_streamed_or_not(baseline):
    tokens = alone(baseline.model, list(b"Hello"), 9)
    tokens = tokens[: tokens.index(256)] if 256 in tokens else tokens
    expected = baseline.language.decode(tokens)
    whole = baseline.complete("Hello", max_tokens=9)
    assert text_of(whole) == expected
    assert set(whole.json["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
    events = baseline.complete("Hello", max_tokens=9, stream=True).events
    assert "".join(event["choices"][0]["text"] for event in events) == expected


def test_more_requests_than_turns_are_all_answered(baseline):
    expected = {prompt: text_of(baseline.complete(prompt, max_tokens=6)) for prompt in ("one", "z")}
    with ThreadPoolExecutor(8) as pool:
        prompts = ["one", "z"] * 4
        replies = list(pool.map(lambda prompt: baseline.complete(prompt, max_tokens=6), prompts))
    assert [text_of(reply) for reply in replies] == [expected[prompt] for prompt in prompts]
    assert baseline.idle()


def test_a_stop_string_ends_the_turns_of_a_text(baseline):
    whole = text_of(baseline.complete("Hello", max_tokens=30))
    reply = baseline.complete("Hello", max_tokens=30, stop=whole[2:4])
    assert text_of(reply) == whole[: whole.index(whole[2:4])]
    assert reply.json["usage"]["completion_tokens"] < 30
    assert baseline.idle()


def test_a_repetition_penalty_is_that_of_generate(baseline):
    tokens = alone(baseline.model, list(b"Hello"), 9, repetition_penalty=1.9, do_sample=False)
    tokens = tokens[: tokens.index(256)] if 256 in tokens else tokens
    reply = baseline.complete("Hello", max_tokens=9, repetition_penalty=1.9)
    assert text_of(reply) == baseline.language.decode(tokens)


def test_log_probabilities_are_those_of_the_model(baseline):
    reply = baseline.complete("Hello", max_tokens=3, echo=True, logprobs=2)
    tokens = [*b"Hello", *alone(baseline.model, list(b"Hello"), 3)]
    with torch.no_grad():
        logits = baseline.model(input_ids=torch.tensor([tokens[:-1]])).logits[0].float()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
    found = reply.json["choices"][0]["logprobs"]["token_logprobs"]
    torch.testing.assert_close(torch.tensor(found[1:]), expected, atol=1e-4, rtol=0)


def test_limits_of_searches_are_refused(baseline):
    reply = baseline.complete("Hello", tolerance=0.1)
    assert (reply.status, reply.error["param"]) == (400, "tolerance")
    assert baseline.request("GET", "/v1/models").json["data"][0]["kind"] == "transformers"


def test_a_generate_that_fails_ends_its_requests_by_name_and_the_next_is_answered(baseline, monkeypatch):
    expected = text_of(baseline.complete("Hello", max_tokens=4))

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory at /secret/path")

    with monkeypatch.context() as patched:
        patched.setattr(baseline.model, "generate", broken)
        reply = baseline.complete("Hello", max_tokens=4)
        assert reply.status == 500
        assert "RuntimeError" in reply.error["message"]
        assert "/secret" not in reply.error["message"]
    assert text_of(baseline.complete("Hello", max_tokens=4)) == expected


RUN: dict[str, Any] = {
    "model": {"kind": "transformers", **POSITIONS},
    "data": {"kind": "word_problem", "group": "S3", "identity_probability": 0.5, "seq_len": 12},
    "training": {
        "max_steps": 1,
        "batch_size": 4,
        "threads": 1,
        "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
        "schedule": {"kind": "warmup_linear"},
    },
    "evaluation": {"lengths": [12], "identity_probabilities": [0.5], "sequences": 2, "batch_size": 2},
}


def test_runs_of_baselines_their_checkpoints_and_exported_folders_are_served(tmp_path: Path):
    from implicit_blocks.hf.convert import export
    from trainer.run.build import build as build_run
    from trainer.specs.run import RunSpec

    run = tmp_path / "baseline"
    build_run(RunSpec.model_validate(RUN), output=run, device="cpu").train()
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    export(str(run), tmp_path / "exported")
    options = ServerOptions(max_batch_size=2, max_seq_len=100)
    found = [load(source, options)[0] for source in (run, checkpoint, tmp_path / "exported")]
    texts = [alone(one.model, [0, 3, 2], 6) for one in found]
    assert texts[0] == texts[1] == texts[2]
    assert [one.options.max_seq_len for one in found] == [64] * 3  # the model has no more positions
    assert {one.setup.description.kind for one in found} == {"transformers"}


def test_the_end_token_of_a_folder_ends_its_texts(tmp_path: Path):
    wrapper = build({**POSITIONS, "config": {**POSITIONS["config"], "eos_token_id": 7}}, vocab_size=20)
    wrapper.to_transformers().save_pretrained(tmp_path / "folder")
    (host,) = load(tmp_path / "folder", ServerOptions(max_batch_size=1))
    assert host.setup.language.stop_token_ids == (7,)
    assert host.setup.description.vocab_size == 20
