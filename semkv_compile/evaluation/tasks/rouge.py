"""ROUGE-L of a summary (Lin 2004, section 3), in the form that LongBench's scores have.

The summary-level form: per reference sentence the union of its longest common subsequences with all sentences of the
summary, over distinct words; sentences end at full stops. The score is F with equal weights.
"""

from __future__ import annotations

from collections.abc import Sequence


def _subsequence(first: Sequence[str], second: Sequence[str]) -> set[str]:
    """Words of a longest common subsequence; of several, the one that reading backwards meets first in `second`."""
    n, m = len(first), len(second)
    table = [[0] * (m + 1) for _ in range(n + 1)]
    for i in range(1, n + 1):
        row, above = table[i], table[i - 1]
        for j in range(1, m + 1):
            row[j] = above[j - 1] + 1 if first[i - 1] == second[j - 1] else max(above[j], row[j - 1])
    found: set[str] = set()
    i, j = n, m
    while i and j:
        if first[i - 1] == second[j - 1]:
            found.add(first[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def _sentences(text: str) -> list[list[str]]:
    """Sentences as lists of words; an empty one keeps an empty word, as splitting at spaces does."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def rouge_l(prediction: str, reference: str) -> float:
    """F of summary-level ROUGE-L; 0 where one of the texts has no sentence."""
    written, wanted = _sentences(prediction), _sentences(reference)
    if not written or not wanted:
        return 0.0
    union: set[str] = set()
    for sentence in wanted:
        for other in written:
            union |= _subsequence(sentence, other)
    recall = len(union) / len({word for sentence in wanted for word in sentence})
    precision = len(union) / len({word for sentence in written for word in sentence})
    return 2.0 * precision * recall / (precision + recall + 1e-8)
