"""The recall task (find one needle among many), and a transformer of 266 K parameters that was trained for it.

Its attention is learned, so errors of a selection cost answers as they do in a large model, and it runs on a CPU. Two
layers of width 128, four query and two KV heads (GQA), head dim 32 of which 8 are rotated (the rest has no position, so
that it extrapolates), and a causal depth-wise convolution of width 4 before queries, keys and values.

`benchmarks/gpu/train_recall.py` made the checkpoint beside this file; it is loaded only if its hash is the known one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors.torch import load, save_file
from torch import Tensor, nn

from kvcm.gpu_tier.engine.interfaces import AttentionInputs, ModelState
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import KVKind

__all__ = [
    "CHECKPOINT",
    "CHECKPOINT_SHA256",
    "KEYS",
    "SEPARATOR",
    "VALUES",
    "VOCAB",
    "QuestionPosition",
    "RecallBatch",
    "RecallModel",
    "load_recall_model",
    "recall_batch",
    "save_recall_model",
]

# A task whose answers need attention: find one needle among many.

KEYS = 64
VALUES = 64
SEPARATOR = KEYS + VALUES
VOCAB = SEPARATOR + 1
QuestionPosition = Literal["none", "first", "last"]


@dataclass(frozen=True, slots=True)
class RecallBatch:
    """Contexts with questions about each.

    A needle is four tokens "a b c v": three key tokens and a value token. A question is a needle's key, and its answer
    the needle's value. Needles are one per four tokens with random neighbours, which is the worst case for methods that
    choose pages. Questions are always decoded; what differs is whether the prompt had them too, so that a method that
    watches the prompt's last tokens could know what will be asked.

    | questions in the prompt | prompt |
    |---|---|
    | none | needles, separator |
    | first | separator, each question and a separator, needles, separator |
    | last | needles, separator, each question and a separator |

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


CHECKPOINT = Path(__file__).with_name("recall.safetensors")
CHECKPOINT_SHA256 = "e7ae410567d83a8ce2e8d2f421600e5ee202701b783c56cbc7978e7888698d3c"
_WIDTH, _Q_HEADS, _KV_HEADS, _HEAD_DIM, _ROPE_DIMS, _TAPS, _LAYERS = 128, 4, 2, 32, 8, 4, 2
_THETA = 10000.0


class QKV(NamedTuple):
    """Queries, keys and values, ``[..., T, heads, 32]``."""

    q: Tensor
    k: Tensor
    v: Tensor


class RecallLayer(nn.Module):
    """One decoder layer; attention is left to the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(_WIDTH)
        self.taps = nn.Parameter(0.5 + 0.1 * torch.randn(_TAPS, _WIDTH))
        self.query = nn.Linear(_WIDTH, _Q_HEADS * _HEAD_DIM, bias=False)
        self.key = nn.Linear(_WIDTH, _KV_HEADS * _HEAD_DIM, bias=False)
        self.value = nn.Linear(_WIDTH, _KV_HEADS * _HEAD_DIM, bias=False)
        self.out = nn.Linear(_Q_HEADS * _HEAD_DIM, _WIDTH, bias=False)
        self.mlp_norm = nn.RMSNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH, bias=False)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH, bias=False)
        # Like attracts like from the start (equal taps, queries as keys): otherwise training needs thousands of steps
        # before any head matches.
        nn.init.normal_(self.key.weight, std=0.1)
        heads = self.key.weight.detach().view(_KV_HEADS, 1, _HEAD_DIM, _WIDTH)
        self.query.weight.data = heads.expand(-1, _Q_HEADS // _KV_HEADS, -1, -1).reshape(-1, _WIDTH).clone()

    def qkv(self, normed: Tensor, tail: Tensor, positions: Tensor) -> QKV:
        """Return queries, keys and values.

        Args:
            normed: ``[..., T, 128]`` normed hidden states.
            tail: ``[..., 3, 128]`` those of the three tokens before.
            positions: ``int64 [T]``.
        """
        padded = torch.cat([tail, normed], -2)
        tokens = normed.shape[-2]
        mixed = sum(
            (padded[..., i : i + tokens, :] * self.taps[i] for i in range(1, _TAPS)),
            padded[..., :tokens, :] * self.taps[0],
        )
        q = self.query(mixed).unflatten(-1, (_Q_HEADS, _HEAD_DIM))
        k = self.key(mixed).unflatten(-1, (_KV_HEADS, _HEAD_DIM))
        v = self.value(mixed).unflatten(-1, (_KV_HEADS, _HEAD_DIM))
        return QKV(_rotated(q, positions), _rotated(k, positions), v)

    def output(self, hidden: Tensor, attention: Tensor) -> Tensor:
        """Return ``[..., T, 128]`` from the layer's input and ``attention [..., T, 4, 32]``."""
        hidden = hidden + self.out(attention.flatten(-2))
        added: Tensor = self.down(nn.functional.gelu(self.up(self.mlp_norm(hidden))))
        return hidden + added


def _rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Return ``x [..., T, heads, 32]`` with its first dims rotated by the positions."""
    half = _ROPE_DIMS // 2
    frequency = _THETA ** (-torch.arange(half, device=x.device) / half)
    angle = positions[:, None, None] * frequency
    a, b, rest = x[..., :half], x[..., half:_ROPE_DIMS], x[..., _ROPE_DIMS:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class RecallModel(nn.Module):
    """The recall transformer: a `DecoderModel`, and for training and prefill a whole forward pass."""

    num_layers = _LAYERS
    num_q_heads = _Q_HEADS
    num_kv_heads = _KV_HEADS
    head_dim = _HEAD_DIM
    v_head_dim = _HEAD_DIM
    kind = KVKind.MHA
    sm_scale = _HEAD_DIM**-0.5

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, _WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.layers = nn.ModuleList(RecallLayer() for _ in range(_LAYERS))
        self.norm = nn.RMSNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, VOCAB, bias=False)

    def layer(self, layer_id: int) -> RecallLayer:
        """Return a layer."""
        layer = self.layers[layer_id]
        assert isinstance(layer, RecallLayer)
        return layer

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the last layer's output ``[B, T, 128]`` of ``tokens int64 [B, T]`` from position 0, all causal."""
        hidden: Tensor = self.embedding(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        for layer_id in range(_LAYERS):
            layer = self.layer(layer_id)
            normed = layer.norm(hidden)
            q, k, v = layer.qkv(normed, normed.new_zeros(len(normed), _TAPS - 1, _WIDTH), positions)
            attention = nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
            )
            hidden = layer.output(hidden, attention.transpose(1, 2))
        return hidden

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """See `DecoderModel`."""
        embedded: Tensor = self.embedding(token_ids)
        return embedded

    def attention_inputs(
        self,
        layer_id: int,
        hidden: Tensor,
        positions: Tensor,
        states: Sequence[ModelState],
        extend_lens: Sequence[int],
    ) -> AttentionInputs:
        """See `DecoderModel`."""
        layer = self.layer(layer_id)
        name = f"tail{layer_id}"
        pieces = []
        normed = layer.norm(hidden)
        for state, part, at in zip(
            states, normed.split(list(extend_lens)), positions.split(list(extend_lens)), strict=True
        ):
            tail = state.get(name)
            tail = part.new_zeros(_TAPS - 1, _WIDTH) if tail is None else tail
            pieces.append(layer.qkv(part, tail, at))
            state[name] = torch.cat([tail, part])[1 - _TAPS :]
        q, k, v = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return AttentionInputs(q, k, v)

    def attention_output(self, layer_id: int, hidden: Tensor, attention: Tensor) -> Tensor:
        """See `DecoderModel`."""
        return self.layer(layer_id).output(hidden, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DecoderModel`."""
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def save_recall_model(model: RecallModel, path: Path) -> str:
    """Write the weights and return the file's SHA-256."""
    save_file({name: weight.contiguous() for name, weight in model.state_dict().items()}, path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_recall_model(path: Path = CHECKPOINT, sha256: str = CHECKPOINT_SHA256) -> RecallModel:
    """Return the trained model, which needs no gradients.

    Args:
        path: the checkpoint.
        sha256: what its hash must be.

    Raises:
        ConfigError: the file is another one.
    """
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ConfigError("path", str(path), f"its SHA-256 must be {sha256}, and is {found}")
    model = RecallModel()
    model.load_state_dict(load(data))
    return model.requires_grad_(False).eval()
