"""OpenAI's own client works unchanged: completions, streams, conversations, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="openai is not installed")

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture
def client(server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as found:
        yield found
    assert server.idle()  # texts that were ended early no longer use the model, which tests call themselves


@pytest.fixture(scope="module")
def chat_client(make_model, serve, tokenizer_file) -> Iterator[Any]:
    """Return a client of a server whose tokenizer has a chat template, and the server."""
    pytest.importorskip("transformers")
    from implicit_blocks.serving.language import language_of

    language: Any = language_of(tokenizer_file, vocab_size=300)
    language.tokenizer.chat_template = TEMPLATE
    with (
        serve(make_model(vocab_size=300), language) as found,
        openai.OpenAI(base_url=f"{found.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client, found


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_completion_has_its_text_its_reason_and_its_usage(client, server):
    made = client.completions.create(model="tiny", prompt="Hello", max_tokens=7, temperature=0)
    assert made.choices[0].text == server.expected(list(b"Hello"), 7)
    assert made.choices[0].finish_reason == "length"
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (5, 7)
    assert made.usage.iterations > 7


def test_a_stream_has_the_text_of_the_completion(client, server):
    chunks = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=7, temperature=0, stream=True, logprobs=1
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == server.expected(list(b"Hello"), 7)


@pytest.mark.parametrize(("more", "reason"), [(-1, "length"), (0, "stop")])
@pytest.mark.parametrize("size", [1, 3])
def test_a_stop_string_at_the_last_token_ends_the_text_by_stop(client, size, more, reason):
    given = {"model": "tiny", "prompt": "Hello", "max_tokens": 7, "temperature": 0, "logprobs": 1}
    given["logit_bias"] = {str(byte): -100 for byte in range(128, 257)}  # one character per token
    whole = client.completions.create(**given).choices[0].text
    given |= {"max_tokens": 7 + more, "stop": (stop := whole[7 - size :])}
    assert whole.index(stop) == 7 - size
    made = client.completions.create(**given)
    text = whole[: 7 + more if reason == "length" else 7 - size]
    assert (made.choices[0].text, made.choices[0].finish_reason) == (text, reason)
    assert made.choices[0].logprobs.tokens == list(text)
    assert made.usage.completion_tokens == 7 + more
    choices = [chunk.choices[0] for chunk in client.completions.create(**given, stream=True)]
    assert "".join(choice.text for choice in choices) == text
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [reason]
    assert [token for choice in choices for token in choice.logprobs.tokens] == list(text)


@pytest.mark.parametrize("chat", [False, True])
def test_each_of_several_texts_has_its_own_reason_once(client, server, chat_client, chat):
    drawn = [server.expected(list(b"Hello"), 8, temperature=1.0, seed=7 + index) for index in range(4)]
    stop = drawn[2][4]
    expected = [text.partition(stop)[0] for text in drawn]
    reasons = ["stop" if stop in text else "length" for text in drawn]
    given = {"model": "tiny", "max_tokens": 8, "n": 4, "seed": 7, "stop": stop, "logprobs": True}
    if chat:
        client, _ = chat_client
        create = client.chat.completions.create
        given["messages"] = [{"role": "user", "content": "the cat"}]
    else:
        create = client.completions.create
        given |= {"prompt": "Hello", "echo": True, "logprobs": 0}
    whole = create(**given)
    found: dict[int, list[Any]] = {0: [], 1: [], 2: [], 3: []}
    for chunk in create(**given, stream=True):
        for choice in chunk.choices:
            found[choice.index].append(choice)
    for choice in whole.choices:
        parts = found[choice.index]
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        if not chat:
            assert choice.text == "".join(part.text for part in parts) == "Hello" + expected[choice.index]
            assert choice.finish_reason == reasons[choice.index]


def test_extensions_are_sent_as_extra_fields(client):
    made = client.completions.create(
        model="tiny",
        prompt="Hello",
        max_tokens=3,
        extra_body={"max_iterations": 2, "return_iterations": True, "top_k": 3, "seed": 5},
    )
    assert [report["iterations"] for report in made.choices[0].token_reports] == [2, 2, 2]


def test_a_conversation_is_answered_and_streamed(chat_client):
    client, server = chat_client
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    prompt = server.language.encode("the cat\nsat\n>")
    options = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == server.expected(prompt, 6)
    assert whole.usage.prompt_tokens == len(prompt)
    assert [len(entry.top_logprobs) for entry in whole.choices[0].logprobs.content] == [2] * 6
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_parts_of_a_message_are_joined(chat_client):
    client, server = chat_client
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    made = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}], max_completion_tokens=4, temperature=0
    )
    assert made.choices[0].message.content == server.expected(server.language.encode("the cat\n>"), 4)


def test_a_conversation_that_the_template_refuses_is_an_error(chat_client):
    client, _ = chat_client
    with pytest.raises(openai.BadRequestError, match="no system"):
        client.chat.completions.create(model="tiny", messages=[{"role": "system", "content": "x"}])


def test_errors_are_those_of_the_client(client):
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        client.completions.create(model="tinny", prompt="Hello")
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="tiny", prompt="Hello", suffix="end")
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
