"""A task whose answers need attention: find one needle among many.

A needle is four tokens "a b c v": three key tokens and a value token. A question gives a needle's key and asks for its
value. Needles are one per four tokens with random neighbours, which is the worst case for methods that choose pages.

| question | context | what is decoded |
|---|---|---|
| last | needles, separator | ``a b c`` |
| first | ``slot a b c`` for each question, separator, needles, separator | ``slot`` |

Placed first, the question is far from the answer's place, so a method that watches the last tokens cannot know it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gpu_tier.errors import ConfigError

__all__ = ["KEYS", "SEPARATOR", "SLOTS", "VALUES", "VOCAB", "QuestionPosition", "RecallBatch", "recall_batch"]

KEYS = 64
VALUES = 64
SLOTS = 16
SEPARATOR = KEYS + VALUES
VOCAB = SEPARATOR + 1 + SLOTS

QuestionPosition = Literal["first", "last"]


@dataclass(frozen=True, slots=True)
class RecallBatch:
    """Contexts with questions about each.

    Attributes:
        context: ``int64 [B, C]`` tokens to prefill; the last is the separator.
        questions: ``int64 [B, Q, W]`` tokens to decode after the context, for each question on its own.
        answers: ``int64 [B, Q]`` the token that follows each question.
    """

    context: Tensor
    questions: Tensor
    answers: Tensor

    def joined(self) -> tuple[Tensor, Tensor]:
        """Return all questions behind the context, each after a separator, and the positions of their last tokens.

        Returns:
            ``int64 [B, C + Q·(W+1) - 1]`` tokens and ``int64 [Q]`` positions.
        """
        rows, asked, width = self.questions.shape
        separators = torch.full((rows, asked, 1), SEPARATOR)
        tail = torch.cat([self.questions, separators], -1).flatten(1)[:, :-1]
        ends = self.context.shape[1] + torch.arange(asked) * (width + 1) + width - 1
        return torch.cat([self.context, tail], 1), ends


def recall_batch(
    rows: int, needles: int, questions: int, generator: torch.Generator, question_position: QuestionPosition = "last"
) -> RecallBatch:
    """Return random contexts of `needles` needles; the keys of a context are distinct.

    Args:
        rows: contexts B.
        needles: of each context.
        questions: Q of each context, about needles drawn with replacement.
        generator: of the random numbers.
        question_position: first or last.

    Raises:
        ConfigError: more questions first than there are slots.
    """
    if question_position == "first" and questions > SLOTS:
        raise ConfigError("questions", questions, f"placed first, at most {SLOTS}")
    keys = torch.stack([_distinct_keys(needles, generator) for _ in range(rows)])
    values = KEYS + torch.randint(VALUES, (rows, needles, 1), generator=generator)
    asked = torch.randint(needles, (rows, questions), generator=generator)
    asked_keys = keys.gather(1, asked[..., None].expand(-1, -1, 3))
    answers = values[..., 0].gather(1, asked)
    body = torch.cat([keys, values], -1).flatten(1)
    separator = torch.full((rows, 1), SEPARATOR)
    if question_position == "last":
        return RecallBatch(torch.cat([body, separator], 1), asked_keys, answers)
    slots = SEPARATOR + 1 + torch.rand(rows, SLOTS, generator=generator).argsort(1)[:, :questions, None]
    head = torch.cat([slots, asked_keys], -1).flatten(1)
    return RecallBatch(torch.cat([head, separator, body, separator], 1), slots, answers)


def _distinct_keys(needles: int, generator: torch.Generator) -> Tensor:
    """Return ``int64 [needles, 3]`` distinct keys."""
    numbers = torch.randperm(KEYS**3, generator=generator)[:needles]
    return torch.stack([numbers // KEYS**2, numbers // KEYS % KEYS, numbers % KEYS], -1)
