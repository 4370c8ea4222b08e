"""Text from a causal language model: greedy or sampled, a batch at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .checks import check_positive
from .positions import LearnedPositions

if TYPE_CHECKING:
    from .gpt import GPTForCausalLM

__all__ = ["generate", "sample"]


@torch.no_grad()
def generate(
    model: GPTForCausalLM,
    input_ids: Int[Tensor, "batch prompt_len"],
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    use_cache: bool = True,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "batch prompt_and_new"]:
    """The prompts, each with up to ``max_new_tokens`` more.

    Args:
        input_ids: the prompts; shorter ones are padded on the left, which ``attention_mask`` marks with 0.
        temperature: 0 takes the likeliest token; otherwise tokens are drawn from the logits divided by it.
        top_k, top_p: draw from the k likeliest tokens, or from the fewest whose probabilities sum to ``top_p``.
        eos_token_id: a row that has it is finished, and is filled up with ``pad_token_id`` (None: with itself); the
            result is as long as the longest row.
        use_cache: keep keys and values instead of reading everything again for each token.
        generator: draws the tokens; None: the global one.

    Raises:
        ValueError: the model is in training mode, padding on the right, more tokens than the learned table has
            positions, or options that do not fit.
        UnsupportedError: the backend cannot serve single queries on many keys; ``use_cache=False`` then serves.
    """
    prompt_len = input_ids.shape[1]
    check_positive("generate", max_new_tokens=max_new_tokens, prompt_len=prompt_len)
    _check_options(model, temperature, top_k, top_p)
    if attention_mask is not None and not bool(attention_mask[:, -1].all()):
        raise ValueError("generate: prompts must be padded on the left, but attention_mask ends with 0 in some row")
    _check_positions(model, prompt_len, attention_mask, max_new_tokens)

    cache = model.new_cache() if use_cache else None
    pad = eos_token_id if pad_token_id is None else pad_token_id
    finished = torch.zeros(len(input_ids), 1, dtype=torch.bool, device=input_ids.device)
    tokens, unread = input_ids, input_ids
    for _ in range(max_new_tokens):
        logits = model(unread, attention_mask, cache=cache, last_only=True)[:, 0]
        new = sample(logits, temperature, top_k, top_p, generator)
        if eos_token_id is not None and pad is not None:
            new = new.masked_fill(finished, pad)
            finished = finished | (new == eos_token_id)
        tokens = torch.cat([tokens, new], dim=1)
        if attention_mask is not None:
            attention_mask = torch.cat([attention_mask, torch.ones_like(attention_mask[:, :1])], dim=1)
        unread = new if use_cache else tokens
        if eos_token_id is not None and bool(finished.all()):
            break
    return tokens


def sample(
    logits: Float[Tensor, "batch vocab"],
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "batch 1"]:
    """One token a row: the likeliest where ``temperature`` is 0, else drawn from what ``top_k`` and ``top_p`` leave."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    ordered, index = (logits.float() / temperature).sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    if top_k is not None:
        probabilities[:, top_k:] = 0
    if top_p is not None:
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0)
    return index.gather(1, torch.multinomial(probabilities, 1, generator=generator))


def _check_options(model: GPTForCausalLM, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if model.training:
        raise ValueError(
            "generate: the model is in training mode, so dropout would change the tokens; call model.eval()"
        )
    if not temperature >= 0:
        raise ValueError(f"generate: temperature must be >= 0, got {temperature}")
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise ValueError("generate: top_k and top_p choose what is drawn from, which needs temperature > 0")
    if top_k is not None:
        check_positive("generate", top_k=top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"generate: top_p must lie in 0..1 and not be 0, got {top_p}")


def _check_positions(
    model: GPTForCausalLM, prompt_len: int, attention_mask: Tensor | None, max_new_tokens: int
) -> None:
    """Before anything is computed, rather than at the token that has no position left; the last one is not read."""
    table = model.gpt.positions
    longest = prompt_len
    if attention_mask is not None and attention_mask.numel():
        longest = prompt_len - int(attention_mask.to(torch.int8).argmax(dim=1).min())
    needed = longest + max_new_tokens - 1
    if isinstance(table, LearnedPositions) and needed > table.max_len:
        raise ValueError(
            f"generate: {longest} tokens and {max_new_tokens} new ones need {needed} positions, "
            f"the learned table has {table.max_len}"
        )
