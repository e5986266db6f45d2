"""Prompts as ids: the division, chat templates, and what is refused."""

import pytest

from semkv.errors import ConfigError
from semkv.evaluation.tasks.prompts import Ask, Prompt, encode, prompt_tokens

CHAT = "{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
PROMPT = Prompt("A context.", (Ask("\n\nFirst?", ("x",), 5, " It is"), Ask("\nSecond, longer?", ("y",), 3)))


def test_context_and_question_are_the_ids_of_the_whole_text(real):
    encoded = encode(real, PROMPT, task="t")
    for ask, ids in zip(PROMPT.asks, encoded.questions):
        assert [*encoded.context, *ids] == real(PROMPT.context + ask.text + ask.prefix)["input_ids"]
    assert real.decode(encoded.context) in (PROMPT.context, PROMPT.context.removesuffix("."))


def test_tokens_are_those_of_the_longest_question_with_its_answer(bytes_only):
    assert prompt_tokens(bytes_only, PROMPT) == max(10 + 8 + 6 + 5, 10 + 16 + 3)


def test_a_chat_template_frames_context_and_question(make_bytes):
    tokenizer = make_bytes(CHAT, bos="<s>")
    encoded = encode(tokenizer, PROMPT, task="t", chat=True)
    assert tokenizer.decode(encoded.context) == "<u>A context."
    assert [tokenizer.decode(ids) for ids in encoded.questions] == [
        "\n\nFirst?</u><a> It is",
        "\nSecond, longer?</u><a>",
    ]
    assert tokenizer.decode(encode(tokenizer, PROMPT, task="t").context) == "<s>A context."


def test_chat_without_a_template_is_refused(bytes_only):
    with pytest.raises(ConfigError, match="--chat: this model's tokenizer has no chat template; leave --chat out"):
        encode(bytes_only, PROMPT, task="t", chat=True)


def test_unknown_words_are_tolerated_in_a_context_alone(tokenizer):
    words = "the code for calm lion is 12 . " * 200
    known = Prompt(words + "zebra", (Ask(" what is the code ?", ("12",), 5),))
    assert encode(tokenizer, known, task="t", tolerated=0.01).context
    with pytest.raises(ConfigError, match="task 't': this tokenizer has no token for 'zebra'; take a model whose"):
        encode(tokenizer, known, task="t")
    asked = Prompt(words, (Ask(" what is the zebra ?", ("12",), 5),))
    with pytest.raises(ConfigError, match="no token for 'zebra'"):
        encode(tokenizer, asked, task="t", tolerated=0.5)


def test_questions_that_cut_a_context_differently_are_refused(bytes_only):
    with pytest.raises(ConfigError, match="questions of different lengths cut one context differently"):
        encode(bytes_only, Prompt("x" * 100, (Ask("a", (), 1), Ask("b" * 20, (), 1))), task="t", length=50)
