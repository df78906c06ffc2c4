# SPDX-License-Identifier: Apache-2.0
"""Answers of a batch, and the same without the others."""

from dataclasses import replace

import numpy as np

from jaxmoe.reconcile.company import Company, company
from jaxmoe.reconcile.printed import show_company
from jaxmoe.records import Prompt, Rollout, StopReason


def answer(tokens, logp):
    n = len(tokens)
    return Rollout(
        Prompt(0, "", (1,), None), np.array(tokens, np.int32), np.array(logp, np.float32),
        StopReason.STOP_TOKEN, np.zeros(n, np.int32),
    )  # fmt: skip


def test_what_is_compared_ends_where_another_token_was_drawn(capsys):
    among = [answer([3, 4, 5], [-1, -2, -3]), answer([7, 8], [-1, -1])]
    same = company(among, among)
    assert same == Company(2, 5, 5, 0.0)
    alone = [answer([3, 4, 9], [-1, -2.25, -9]), among[1]]
    assert company(among, alone) == Company(2, 5, 4, 0.25)
    longer = [replace(among[0], tokens=among[0].tokens[:2]), among[1]]
    assert company(among, longer) == Company(2, 5, 4, 0.0)
    show_company(same)
    show_company(company(among, alone))
    show_company(company(among[:1], [answer([9], [-1])]))
    out = capsys.readouterr().out
    assert "5 of 5 tokens the same, their log-probs the same to the bit" in out
    assert "4 of 5" in out and "2.5e-01" in out and "not compared" in out
