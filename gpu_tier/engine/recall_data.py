"""A task whose answers need attention: find one needle among many.

A needle is four tokens "a b c v": three key tokens and a value token. A question is a needle's key, and its answer the
needle's value. Needles are one per four tokens with random neighbours, which is the worst case for methods that choose
pages. Questions are always decoded; what differs is whether the prompt had them too, so that a method that watches the
prompt's last tokens could know what will be asked.

| questions in the prompt | prompt |
|---|---|
| none | needles, separator |
| first | separator, each question and a separator, needles, separator |
| last | needles, separator, each question and a separator |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["KEYS", "SEPARATOR", "VALUES", "VOCAB", "QuestionPosition", "RecallBatch", "recall_batch"]

KEYS = 64
VALUES = 64
SEPARATOR = KEYS + VALUES
VOCAB = SEPARATOR + 1

QuestionPosition = Literal["none", "first", "last"]


@dataclass(frozen=True, slots=True)
class RecallBatch:
    """Contexts with questions about each.

    Attributes:
        context: ``int64 [B, C]`` the prompt; its last token is a separator.
        questions: ``int64 [B, Q, 3]`` tokens to decode after the context, for each question on its own.
        answers: ``int64 [B, Q]`` the token that follows each question.
    """

    context: Tensor
    questions: Tensor
    answers: Tensor

    def joined(self) -> tuple[Tensor, Tensor]:
        """Return all questions behind the context, each after a separator, and the positions of their last tokens.

        Returns:
            ``int64 [B, C + 4·Q - 1]`` tokens and ``int64 [Q]`` positions.
        """
        tail = _separated(self.questions)[:, :-1]
        ends = self.context.shape[1] + 4 * torch.arange(self.questions.shape[1]) + 2
        return torch.cat([self.context, tail], 1), ends


def recall_batch(
    rows: int, needles: int, questions: int, generator: torch.Generator, position: QuestionPosition = "none"
) -> RecallBatch:
    """Return random contexts of `needles` needles; the keys of a context are distinct.

    Args:
        rows: contexts B.
        needles: of each context.
        questions: Q of each context, about needles drawn with replacement.
        generator: of the random numbers.
        position: where the prompt has the questions.
    """
    keys = torch.stack([_distinct_keys(needles, generator) for _ in range(rows)])
    values = KEYS + torch.randint(VALUES, (rows, needles, 1), generator=generator)
    asked = torch.randint(needles, (rows, questions), generator=generator)
    asked_keys = keys.gather(1, asked[..., None].expand(-1, -1, 3))
    body = torch.cat([keys, values], -1).flatten(1)
    separator = torch.full((rows, 1), SEPARATOR)
    pieces = [body, separator]
    if position == "first":
        pieces = [separator, _separated(asked_keys), *pieces]
    elif position == "last":
        pieces = [*pieces, _separated(asked_keys)]
    return RecallBatch(torch.cat(pieces, 1), asked_keys, values[..., 0].gather(1, asked))


def _separated(questions: Tensor) -> Tensor:
    """Return ``int64 [B, 4·Q]``: the questions, each with a separator behind it."""
    separators = torch.full_like(questions[..., :1], SEPARATOR)
    return torch.cat([questions, separators], -1).flatten(1)


def _distinct_keys(needles: int, generator: torch.Generator) -> Tensor:
    """Return ``int64 [needles, 3]`` distinct keys."""
    numbers = torch.randperm(KEYS**3, generator=generator)[:needles]
    return torch.stack([numbers // KEYS**2, numbers // KEYS % KEYS, numbers % KEYS], -1)
