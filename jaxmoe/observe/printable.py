# SPDX-License-Identifier: Apache-2.0
"""Text of others on a terminal: rows, answers, a server's words may hold what moves the cursor.

Next: jaxmoe/cli.py shows errors with it.
"""


def printable(text: str) -> str:
    """The text with all that is no letter, mark or space as Python writes it, "\\x1b" say.

    Lines and tabs stay. Escaped with the control characters: what turns the direction of writing.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
