# SPDX-License-Identifier: Apache-2.0
"""The blocks of code in a text, as Markdown marks them. Next: jaxmoe/graders/code_scorer.py."""

import textwrap

# The words behind ``` that may follow text in the same line; at the start of a line any word may.
_PYTHON = ("", "python", "python3", "py")


def list_code_blocks(text: str) -> list[str]:
    """Return the contents of all blocks in ``` or ~~~, whatever their language, in order.

    A block ends at the next line that begins with as many marks, or at the end of the text. If its
    first line is indented, as in a list, its lines have less indentation by what they share.
    """
    blocks, lines = list[str](), list[str]()
    marks, is_indented = "", False

    def end_block() -> None:
        block = "\n".join(lines)
        blocks.append(textwrap.dedent(block) if is_indented else block)

    for line in text.split("\n"):
        before, fence, after = _split_fence(line)
        is_alone = bool(fence) and not before.strip()
        if marks and not (is_alone and fence[0] == marks[0] and len(fence) >= len(marks)):
            lines.append(line)
            continue
        if marks:
            end_block()
            marks = ""
            # "```python" before the end of a block is the start of another one.
            if not after or " " in after:
                continue
        opens = "`" not in after if is_alone else after.lower() in _PYTHON
        if fence and opens:
            marks, lines, is_indented = fence, [], is_alone and bool(before)
    if marks:
        end_block()
    return blocks


def _split_fence(line: str) -> tuple[str, str, str]:
    """The text before the first three marks of a line, the marks, and the text behind them."""
    starts = [start for start in (line.find("```"), line.find("~~~")) if start >= 0]
    if not starts:
        return line, "", ""
    start = end = min(starts)
    while end < len(line) and line[end] == line[start]:
        end += 1
    return line[:start], line[start:end], line[end:].strip()
