# SPDX-License-Identifier: Apache-2.0
"""Trees are those of `ast`, and threads do not disturb each other."""

import ast
import gc
import threading
import time

import pytest

from jaxmoe.answers.python_syntax import parse_expression, parse_program

TEXTS = (
    "((1 + 2) * (3 - 4)) / 5 + " + " + ".join(map(str, range(30))),
    "[1, 2, (3, 4), {'a': [1, 2, 3]}]",
)


def test_trees_are_those_of_ast():
    assert ast.dump(parse_program("x = 1\nprint(x)")) == ast.dump(ast.parse("x = 1\nprint(x)"))
    for text in TEXTS:
        assert ast.dump(parse_expression(text)) == ast.dump(ast.parse(text, mode="eval"))
    for text in ("1 +", "x = 1"):
        with pytest.raises(SyntaxError):
            parse_expression(text)


@pytest.mark.slow
def test_threads_can_parse_at_the_same_time():
    """A garbage collection in the midst of a parse changes threads, if it has a callback."""
    wrong, end = [], time.monotonic() + 4

    def parse_often():
        trees = []  # many objects, so that garbage is collected
        while time.monotonic() < end:
            for text in TEXTS:
                try:
                    trees.append(parse_expression(text))
                except Exception as error:
                    wrong.append(repr(error))
            if len(trees) > 50:
                trees.clear()

    def callback(phase, info):
        return None

    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # those of a program, which the tests raise
    gc.callbacks.append(callback)
    try:
        threads = [threading.Thread(target=parse_often) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.callbacks.remove(callback)
        gc.set_threshold(*thresholds)
    assert wrong == []
