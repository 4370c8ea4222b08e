"""What other libraries call a window, as ``Window(left, right)``: exact counts of keys before and after the query.

The same 8 means 8, 9 or 17 keys elsewhere. Each of these is tested against the library itself.
"""

from __future__ import annotations

from ..masks import Window

__all__ = ["flash_attn", "local_attention", "longformer", "mistral", "modernbert"]


def mistral(sliding_window: int) -> Window:
    """Hugging Face's causal ``config.sliding_window`` (Mistral, Qwen, Gemma): that many keys, the query's included."""
    _require("mistral", "sliding_window", sliding_window, sliding_window >= 1, ">= 1")
    return Window(sliding_window - 1, 0)


def modernbert(local_attention: int) -> Window:
    """ModernBERT's ``config.local_attention``: half of it on either side, and the query itself."""
    _require("modernbert", "local_attention", local_attention, local_attention >= 0, ">= 0")
    return Window(local_attention // 2, local_attention // 2)


def longformer(attention_window: int) -> Window:
    """Longformer's ``config.attention_window``, an even number: half of it on either side, and the query itself."""
    fits = attention_window >= 2 and attention_window % 2 == 0
    _require("longformer", "attention_window", attention_window, fits, "even and >= 2")
    return Window(attention_window // 2, attention_window // 2)


def flash_attn(window_size: tuple[int, int], causal: bool = False) -> Window:
    """flash-attn's ``window_size = (left, right)``: keys before and after besides the query's own, -1 for all."""
    for side in window_size:
        _require("flash_attn", "window_size", window_size, side >= -1, "two integers >= -1")
    left, right = (None if side == -1 else side for side in window_size)
    return Window(left, 0 if causal else right)


def local_attention(
    window_size: int,
    causal: bool = False,
    look_backward: int = 1,
    look_forward: int | None = None,
    exact_windowsize: bool = False,
) -> Window:
    """local-attention's ``LocalAttention(window_size, ...)``, named and with the defaults of that class.

    With ``exact_windowsize`` it is a band of ``look_backward`` and ``look_forward`` windows; without, whole blocks,
    where a query sees more or less by its place in its block.

    Raises ``ValueError`` without ``exact_windowsize``: no ``Window`` says that.
    """
    _require("local_attention", "window_size", window_size, window_size >= 1, ">= 1")
    if look_forward is None:
        look_forward = 0 if causal else 1
    if not exact_windowsize:
        raise ValueError(
            "local_attention: exact_windowsize must be True, got False: then it attends by whole blocks of "
            f"{window_size}, which is no window"
        )
    return Window(window_size * look_backward, 0 if causal else window_size * look_forward)


def _require(function: str, name: str, value: object, fits: bool, allowed: str) -> None:
    if not fits:
        raise ValueError(f"{function}: {name} must be {allowed}, got {value!r}")
