# SPDX-License-Identifier: Apache-2.0
"""Escape untrusted text for a terminal: rows, answers and server messages may move the cursor.

Next: jaxmoe/cli.py prints errors with it.
"""


def escape_unprintable(text: str) -> str:
    """The text with unprintable characters escaped as in Python, such as "\\x1b".

    Line breaks and tabs stay. Characters that change the writing direction are escaped as well.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
