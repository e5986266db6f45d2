"""Task samples as token ids."""

import pytest

from semkv.errors import ConfigError
from semkv.evaluation.samples import context_ids, continuation_ids, families, make_sample, spread_depth


@pytest.mark.parametrize("family", families())
def test_question_and_answer_follow_the_context_in_the_tokenizers_own_words(tokenizer, family):
    sample = make_sample(tokenizer, family, 300, 2, seed=1, questions=3)
    assert sample.ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in sample.ids
    assert 280 <= len(sample.ids) <= 301
    assert len(sample.questions) == 3
    for question in sample.questions:
        joined = tokenizer.decode([*sample.ids[1:], *question.ids, *question.answer])
        assert joined.endswith(question.text + " " + question.answer_text)
        assert tokenizer.unk_token_id not in (*sample.ids, *question.ids, *question.answer)
        assert 0.0 <= question.depth <= 1.0
    assert sample.longest == len(sample.ids) + max(len(q.ids) + len(q.answer) for q in sample.questions)


def test_samples_depend_on_index_and_seed_alone(tokenizer):
    first = make_sample(tokenizer, "dense", 200, 5, seed=1, questions=2)
    assert make_sample(tokenizer, "dense", 200, 5, seed=1, questions=2) == first
    assert make_sample(tokenizer, "dense", 200, 6, seed=1, questions=2).ids != first.ids
    assert make_sample(tokenizer, "dense", 200, 5, seed=2, questions=2).ids != first.ids


def test_depths_cover_the_context_evenly():
    for count in (10, 25, 50):
        bins = [0] * 5
        for index in range(count):
            bins[int(5 * spread_depth(index))] += 1
        assert max(bins) - min(bins) <= 2


class PrefixSpace:
    """Like tokenizers that mark the start of any text: a lone word gets another id than the same word after others."""

    eos_token_id = 2

    def __call__(self, text, add_special_tokens=True):
        words = text.split()
        ids = [10 + len(word) + (100 if i == 0 else 0) for i, word in enumerate(words)]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}


def test_continuations_are_tokenised_with_what_stands_before_them():
    assert continuation_ids(PrefixSpace(), "the code is", " forty two") == (15, 13)
    assert PrefixSpace()(" forty two", add_special_tokens=False)["input_ids"] == [115, 13]


def test_contexts_start_as_the_tokenizer_starts_and_stay_open():
    assert context_ids(PrefixSpace(), "a bb") == (1, 111, 12)


def test_an_answer_without_tokens_of_its_own_is_refused():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    poor = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    with pytest.raises(ConfigError, match=r"answer '.*': the tokenizer has no token for a word of it"):
        make_sample(poor, "single", 64, 0, seed=0, questions=1)
