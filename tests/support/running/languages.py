"""Language models without weights: their probabilities are known, and can be followed by hand."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

END = ord("\n")


class Scripted:
    """`logits_of(text so far)` are the next token's. It keeps all tokens as its past."""

    end, context = END, 1 << 20

    def __init__(self, logits_of: Callable[[tuple[int, ...]], Tensor]) -> None:
        self._logits_of = cache(logits_of)

    def __call__(self, tokens: Tensor) -> Tensor:
        rows = tokens.tolist()
        return torch.stack(
            [torch.stack([self._logits_of(tuple(row[: t + 1])) for t in range(len(row))]) for row in rows]
        )

    def extend(self, tokens: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens = tokens if past is None else torch.cat([past, tokens], dim=1)
        return torch.stack([self._logits_of(tuple(row)) for row in tokens.tolist()]), tokens

    def select(self, past: Tensor, rows: Tensor) -> Tensor:
        return past[rows]

    def renewed(self, past: Tensor) -> Tensor:
        return past

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()


def chance(vocabulary: int) -> Scripted:
    """Every text has its own, arbitrary probabilities."""
    return Scripted(lambda text: torch.randn(vocabulary, generator=_seeded(text)))


def parrot(answer: str) -> Scripted:
    """Says `answer` again and again, whatever it is asked; prompts end with an equals sign."""

    def logits(text: tuple[int, ...]) -> Tensor:
        said = bytes(text).decode().partition("=")[2]
        sure = torch.full((128,), -100.0)
        sure[ord(answer[len(said) % len(answer)])] = 100.0
        return sure

    return Scripted(logits)


def pupil(knows: float) -> Scripted:
    """Reckons with luck: noise over 128 tokens, with the right one raised by `knows`."""

    def logits(text: tuple[int, ...]) -> Tensor:
        question, _, said = bytes(text).decode(errors="replace").partition("=")
        noise = torch.randn(128, generator=_seeded(text))
        if "=" in bytes(text).decode(errors="replace"):
            answer = f"{eval(question)}\n"
            if len(said) < len(answer):
                noise[ord(answer[len(said)])] += knows
        return noise

    return Scripted(logits)


def _seeded(text: tuple[int, ...]) -> torch.Generator:
    return torch.Generator().manual_seed(random.Random(str(text)).getrandbits(32))


def save_tokenizer(folder: Path, *, end: str | None = "<end>") -> None:
    """In Hugging Face's format: a token per byte, then the one that ends an answer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)
