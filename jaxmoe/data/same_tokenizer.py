# SPDX-License-Identifier: Apache-2.0
"""Comparison of two tokenizers by what they do: log-probs of two models are of the same tokens."""

from collections.abc import Callable, Sequence

from jaxmoe.data.tokenizer import Tokenizer

# Words, case, digits, white space, code, accents, other scripts and an emoji of several bytes.
SAMPLE_TEXTS = (
    "The quick brown fox jumps over the lazy dog. I can't, you'll see!",
    "  1234567890 3.14159 1e-5\t$12,345.67\n\n\nUPPER lower CamelCase snake_case",
    "def f(x):\n    return {'a': [x ** 2, x // 3], \"b\": x != 0}  # comment",
    "naïve café Übergröße — “quotes” … ½ ²",
    "Привет мир 你好世界 こんにちは مرحبا 👩‍🔬",
)


def find_encoding_difference(
    tokenizer: Tokenizer,
    encode: Callable[[str], Sequence[int]],
    texts: Sequence[str] = SAMPLE_TEXTS,
) -> str:
    """Return the first text that `encode` turns into other ids than the tokenizer, as a sentence's
    end; "" if there is none."""
    for text in texts:
        ids, others = tokenizer.encode(text), list(encode(text))
        if ids != others:
            return f"{text[:24]!r} is {others[:6]}… there, and {ids[:6]}… here"
    return ""


def find_tokenizer_difference(tokenizer: Tokenizer, other: Tokenizer) -> str:
    """Return how another tokenizer differs from this one, as a sentence's end; "" if it does not.

    Compared are the number of ids, the text of each id, and the ids of SAMPLE_TEXTS.
    """
    if tokenizer.vocab_size != other.vocab_size:
        return f"it has {other.vocab_size} ids there, and {tokenizer.vocab_size} here"
    for i in range(tokenizer.vocab_size):
        text, other_text = tokenizer.decode([i]), other.decode([i])
        if text != other_text:
            return f"id {i} is {other_text!r:.40} there, and {text!r:.40} here"
    return find_encoding_difference(tokenizer, other.encode)
