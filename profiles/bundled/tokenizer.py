"""The bundled model's tokenizer: one token per word, built from the tasks' vocabulary."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from .tasks import vocabulary

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
PAD, BOS, EOS, UNK = range(4)
MAX_LENGTH = 16384


def vocabulary_ids() -> dict[str, int]:
    """Word to token id; the special tokens come first."""
    return {word: i for i, word in enumerate((*SPECIALS, *vocabulary()))}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A fast Hugging Face tokenizer that splits at whitespace and puts <s> in front."""
    core = Tokenizer(models.WordLevel(vocabulary_ids(), unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
