"""The word-level tokenizer: round trip, special tokens, offsets."""

from transformers import AutoTokenizer

from semkv.profiles.bundled.tasks import make_haystack
from semkv.profiles.bundled.tokenizer import BOS, UNK, build_tokenizer


def test_round_trip_through_a_folder(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    haystack = make_haystack("confusable", 400, 0)
    ids = tokenizer(haystack.context)["input_ids"]
    assert ids[0] == BOS
    assert UNK not in ids
    assert len(ids) == len(haystack.context.split()) + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == haystack.context


def test_offsets_are_the_words():
    text = "the code for amber acorn is 48 17 93 ."
    encoded = build_tokenizer()(text, return_offsets_mapping=True)
    assert [text[a:b] for a, b in encoded["offset_mapping"][1:]] == text.split()


def test_unknown_words_are_unk():
    assert build_tokenizer()("the zeppelin", add_special_tokens=False)["input_ids"][1] == UNK
