"""The tokens that a row has read."""

from __future__ import annotations

import torch

from semkv.runtime.text import Text


def test_a_text_and_its_newest_tokens():
    text = Text(torch.tensor([5, 6, 7]), torch.tensor([0.0, 0.5, 1.5]))
    copy = text.clone()
    text.add(torch.tensor([8, -1]), torch.tensor([2.0, 3.0]))
    assert (len(text), len(copy)) == (5, 3)
    assert text.ids.tolist() == [5, 6, 7, 8, -1]
    ids, surprisal = text.newest(4, 2)
    assert (ids.tolist(), surprisal.tolist()) == ([6, 7], [0.5, 1.5])
    assert (ids.dtype, surprisal.dtype) == (torch.int64, torch.float32)
    assert copy.surprisal.tolist() == [0.0, 0.5, 1.5]
    assert Text(torch.tensor([3, 4])).surprisal.tolist() == [0.0, 0.0]
