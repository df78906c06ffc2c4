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


def find_encoding_difference(tokenizer: Tokenizer, encode: Callable[[str], Sequence[int]]) -> str:
    """Return the first of SAMPLE_TEXTS that `encode` turns into other ids than the tokenizer, as a
    sentence's end; "" if there is none."""
    for text in SAMPLE_TEXTS:
        ids, compared = tokenizer.encode(text), list(encode(text))
        if ids != compared:
            return f"{text[:24]!r} is {compared[:6]}… there, and {ids[:6]}… here"
    return ""


def find_tokenizer_difference(tokenizer: Tokenizer, compared: Tokenizer) -> str:
    """Return how the second tokenizer differs from the first, as a sentence's end; "" if it does
    not.

    Compared are the number of ids, the text of each id, and the ids of SAMPLE_TEXTS.
    """
    if tokenizer.vocab_size != compared.vocab_size:
        return f"it has {compared.vocab_size} ids there, and {tokenizer.vocab_size} here"
    for i in range(tokenizer.vocab_size):
        text, compared_text = tokenizer.decode([i]), compared.decode([i])
        if text != compared_text:
            return f"id {i} is {compared_text!r:.40} there, and {text!r:.40} here"
    return find_encoding_difference(tokenizer, compared.encode)
