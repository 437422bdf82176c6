"""Texts from tokens: stop strings, and characters of several tokens, at every division into pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from implicit_blocks._utils.stop_strings import StopScanner
from implicit_blocks.serving.language import Bytes, Numbers, Words, language_of


def scanned(pieces, stops):
    scanner = StopScanner(stops)
    released = ""
    for piece in pieces:
        text, found = scanner.push(piece)
        released += text
        if found:
            return released, True
    return released + scanner.finish(), False


def reference(text, stops):
    """Cut the text where the first stop string is complete, character by character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_cut_a_text_wherever_its_pieces_are_divided(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert scanned(pieces, stops) == reference(text, stops)


def test_no_part_of_a_stop_string_is_released():
    scanner = StopScanner(["END"])
    assert [scanner.push(piece) for piece in ("aE", "N", "E", "ND")] == [
        ("a", False),
        ("", False),
        ("EN", False),
        ("", True),
    ]


CUTS = st.lists(st.integers(1, 4), max_size=30)


def pushed(stream, tokens, sizes):
    """Return the text of a stream that receives tokens by pieces of these sizes, the rest at once."""
    text, left = "", list(tokens)
    for size in sizes:
        text += stream.push(left[:size])
        left = left[size:]
    return text + stream.push(left) + stream.finish()


@given(st.lists(st.integers(0, 256), max_size=30), CUTS)
def test_a_stream_of_bytes_has_the_text_of_all_bytes(tokens, cuts):
    language = Bytes()
    assert pushed(language.stream([65]), tokens, cuts) == language.decode(tokens)


def test_text_of_bytes_returns_from_its_tokens():
    text = "Zürich 東京 🙂"
    assert Bytes().decode(Bytes().encode(text)) == text


def test_a_byte_that_is_no_character_has_a_name_of_its_own():
    names = [Bytes().token(token) for token in range(258)]
    assert len(set(names)) == 258


def test_numbers_continue_the_text_of_their_prompt():
    language = Numbers()
    stream = language.stream([0, 3])
    assert language.encode("0 3" + stream.push([2]) + stream.push([11, 7]) + stream.finish()) == [
        0,
        3,
        2,
        11,
        7,
    ]


@pytest.mark.parametrize("text", ["hello", "1.5", "-1", "²", "9" * 30])
def test_text_without_a_tokenizer_is_refused(text):
    with pytest.raises(ValueError, match="token IDs"):
        Numbers().encode(text)


@pytest.fixture(scope="module")
def words(tokenizer_file) -> Words:
    pytest.importorskip("transformers")
    return language_of(tokenizer_file, vocab_size=300)


def test_a_stream_of_words_has_the_text_after_the_prompt(words):
    whole = words.encode("the cat sat on the mat, naïve 🙂 東京 café.")
    assert len(whole) > 12
    for cut in range(1, len(whole)):
        prompt, rest = whole[:cut], whole[cut:]
        before = words.decode(prompt).rstrip("\ufffd")
        for sizes in ([1] * len(rest), [2] * len(rest), [3, 1, 2], []):
            assert before + pushed(words.stream(prompt), rest, sizes) == words.decode(whole)


@given(st.lists(st.integers(0, 299), min_size=1, max_size=24), CUTS)
def test_a_stream_of_any_words_has_their_text(words, tokens, cuts):
    assert pushed(words.stream([]), tokens, cuts) == words.decode(tokens)


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer_file):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="300 entries"):
        language_of(tokenizer_file, vocab_size=100)


def test_a_model_without_a_chat_template_refuses_conversations(words):
    for language in (words, Bytes(), Numbers()):
        with pytest.raises(ValueError, match="no chat template"):
            language.chat([{"role": "user", "content": "hello"}])
