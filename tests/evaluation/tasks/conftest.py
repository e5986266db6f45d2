"""Data beside the repository where it is there, real tokenizers, and a tokenizer of single bytes."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3].parent / "shared" / "data"


def shared(*parts):
    """A path in the data folder beside the repository; skips where it is absent."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no shared/data/{'/'.join(parts)} beside the repository")
    return path


@pytest.fixture
def data():
    """Finds files of the data folder."""
    return shared


def byte_tokenizer(chat_template=None, bos=None):
    """A token per byte, an end token, and a beginning token where `bos` names one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if bos is not None:
        from tokenizers.processors import TemplateProcessing

        core.add_special_tokens([bos])
        core.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", bos_token=bos)
    made.chat_template = chat_template
    return made


@pytest.fixture(scope="session")
def bytes_only():
    """A tokenizer that writes any text, a token per byte."""
    return byte_tokenizer()


@pytest.fixture(scope="session")
def make_bytes():
    """Makes byte tokenizers with a chat template or a beginning token."""
    return byte_tokenizer


@pytest.fixture(scope="session", params=["neox", "dolma2", "gpt2"])
def real(request):
    """The real tokenizers, one after the other."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(shared("tokenizers", request.param)))


@pytest.fixture(scope="session")
def neox():
    """The tokenizer that the reference rows were made with."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(shared("tokenizers", "neox")))


@pytest.fixture
def make():
    """Makes one sample of a task."""
    from semkv.evaluation.tasks import build_tasks

    def made(name, tokenizer, length, index=0, *, seed=0, questions=1, sources=None, options=None, chat=False):
        built = build_tasks([name], sources=sources, options={name: options} if options else None, chat=chat)
        return built[name].make(tokenizer, length, index, seed=seed, questions=questions)

    return made
