"""A causal language model from a folder in Hugging Face's format; its forward pass sees BF16 weights.

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)  # both of transformers, where there is a network
    HuggingFaceModel(folder)  # opens no connection

The weights are FP32 masters; `experiments.models.model` says why and how the forward pass rounds them. Every
parameter is rounded, norms and biases too, and one that is used twice (an embedding that is also the
output layer) is rounded once. Buffers stay as they are.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call

from experiments.errors import ExperimentError
from experiments.models.model import bf16


class Past:
    """What is kept of a batch of sequences: keys and values, and the rounded weights that made them.

    The weights belong here: with other weights the keys and values would be wrong, and a large model is
    bearable to sample from only if its weights are rounded once per answer, not once per token.
    """

    def __init__(self, cache: Any, weights: dict[str, Tensor]) -> None:
        self.cache = cache
        self.weights = weights

    def take(self) -> Any:
        """The keys and values, once: whoever takes them changes them in place."""
        if self.cache is None:
            raise ValueError("this past is used up: go on with the one that extend or repeat returned")
        cache, self.cache = self.cache, None
        return cache


class HuggingFaceWords:
    """The tokenizer in the folder `path`. end: the token that ends an answer."""

    def __init__(self, path: Path) -> None:
        self._path, self._tokenizer = path, _tokenizer(path)
        if self._tokenizer.eos_token_id is None:
            _refuse(f"{path}: the tokenizer has no token that ends an answer; save it with an eos_token")
        self.end: int = self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def chat(self, messages: list[dict[str, Any]]) -> str:
        """The prompt for the assistant's answer to these messages, by the tokenizer's chat template."""
        if self._tokenizer.chat_template is None:
            _refuse(
                f"the tokenizer in {self._path} has no chat template, which messages need: save it with one, "
                "or let prompts.column name a column of texts"
            )
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`, special ones included."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class HuggingFaceModel(nn.Module):
    """The causal language model and the tokenizer in the folder `path`; always without dropout.

    context: the tokens of the longest sequence. vocabulary: how many logits there are, often more than
    the tokenizer has tokens. end: the token that ends an answer. is_rounded: set where the forward pass
    finds BF16 values in any case, and all pasts are renewed when they change: no past needs a copy of them.

    The sequences of one call have one length or are padded on the right, where causal attention never
    looks, so there are no attention masks. Raises ExperimentError where the package, the folder, the
    model or its tokenizer is missing or does not serve.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        words = HuggingFaceWords(path)
        self.words, self.model = words, _model(path)
        self.is_rounded = False
        text = self.model.config.get_text_config()  # a model that also reads images keeps its language apart
        self.context: int = getattr(text, "max_position_embeddings", None) or _refuse(
            f"{path}: config.json has to say the longest sequence as max_position_embeddings"
        )
        self.vocabulary: int = text.vocab_size
        if self.end >= self.vocabulary:
            _refuse(
                f"{path}: the tokenizer ends an answer with token {self.end}, but the model's last token is "
                f"{self.vocabulary - 1}; save the tokenizer that belongs to the model"
            )
        # Of a prompt only the last logits are wanted; all of them can outweigh the model.
        takes = inspect.signature(self.model.forward).parameters
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        if not self._predicts_from_the_past_alone():
            _refuse(
                f"{path} holds a {type(self.model).__name__} that does not predict each token from the ones "
                "before it, keeping their keys and values; choose a causal language model"
            )

    def _predicts_from_the_past_alone(self) -> bool:
        """False for an encoder, which transformers loads too when asked for a causal model."""
        tokens = torch.tensor([[0, 1]])
        alone, past = self.extend(tokens[:, :1], None)
        with torch.no_grad():
            followed = self(tokens)[:, 0]
        # FP32 sums over one token or two may take another order; an encoder is off by far more.
        return past.cache is not None and torch.allclose(alone, followed, rtol=1e-3, atol=1e-3)

    def train(self, mode: bool = True) -> HuggingFaceModel:
        super().train(mode)
        self.model.eval()  # with dropout a policy would differ from itself
        return self

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, time] int64 -> [batch, time, vocabulary] float32
        return self._run(tokens, self._rounded(), use_cache=False).logits.float()

    @torch.no_grad()
    def extend(self, tokens: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        """The logits after `tokens`, which follow `past` or (None) start, and the past with them in it.

        `past` is used up. The weights are those that its first tokens were read with.

        tokens: [batch, time] int64. Returns logits [batch, vocabulary] float32.
        """
        weights = self._rounded() if past is None else past.weights
        cache = None if past is None else past.take()
        output = self._run(tokens, weights, use_cache=True, past_key_values=cache, **self._only_last)
        kept = Past(output.get("past_key_values"), weights)
        return output.logits[:, -1].float(), kept

    @torch.no_grad()
    def select(self, past: Past, rows: Tensor) -> Past:
        """These sequences of the batch, each as often as it is named; `past` is used up."""
        cache = past.take()
        cache.reorder_cache(rows)
        return Past(cache, past.weights)

    @torch.no_grad()
    def renewed(self, past: Past) -> Past:
        """`past` with the weights as they are now; `past` is used up."""
        return Past(past.take(), self._rounded())

    @property
    def checkpoint(self) -> nn.Module:
        return self.model

    @property
    def end(self) -> int:
        return self.words.end

    def encode(self, text: str) -> list[int]:
        return self.words.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self.words.decode(tokens)

    def chat(self, messages: list[dict[str, Any]]) -> str:
        return self.words.chat(messages)

    def _rounded(self) -> dict[str, Tensor]:
        if self.is_rounded:
            return {}  # as they are
        # A tied weight comes once here; functional_call puts it in each of its places.
        return {name: bf16(weight) for name, weight in self.model.named_parameters()}

    def _run(self, tokens: Tensor, weights: dict[str, Tensor], **options: Any) -> Any:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
            return functional_call(self.model, weights, (tokens,), options)


# Code in the folder is not run: without a word on it transformers would ask at the terminal.
_OPTIONS: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


# What transformers raises depends on what is wrong in the folder, and can be of any type.
def _tokenizer(path: Path) -> Any:
    if not path.is_dir():
        _refuse(f"there is no folder {path}; name one that holds a Hugging Face model and its tokenizer")
    try:
        # Here, not above: the package is optional, and takes a second to import.
        from transformers import AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        _refuse(f"a Hugging Face model needs transformers: pip install transformers ({_first_line(error)})")
    logging.disable_progress_bar()  # the workers of a run share one terminal
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **_OPTIONS)
    except Exception as error:
        _refuse(
            f"{path} holds no tokenizer that transformers can load; save one there with "
            f"tokenizer.save_pretrained ({_first_line(error)})"
        )
    # Some kinds of tokenizer come without words, rather than not at all, from a folder without their files.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        _refuse(f"{path} holds no tokenizer with words in it; save one there with tokenizer.save_pretrained")
    return tokenizer


def _model(path: Path) -> Any:
    """In FP32."""
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True, **_OPTIONS
        )
    except Exception as error:
        _refuse(
            f"{path} holds no causal language model that transformers can load; save one there with "
            f"model.save_pretrained ({_first_line(error)})"
        )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):  # transformers starts these at random
        _refuse(
            f"{path} lacks {len(missing)} of the weights of a {type(model).__name__}, {missing[0]} for one; "
            "save the whole causal language model there"
        )
    return model


def _refuse(sentence: str) -> NoReturn:
    raise ExperimentError(sentence) from None  # the library's own traceback would bury the sentence


def _first_line(error: Exception) -> str:
    """What a library has to say may go on for pages."""
    return (str(error) or type(error).__name__).splitlines()[0].strip(" .:")
