# SPDX-License-Identifier: Apache-2.0
"""Verdicts on kernels, and a judge that gives them without a check."""

from pallas_kernels.check.verdicts import KernelVerdict

RIGHT, WRONG = (
    KernelVerdict("right", "4 cases"),
    KernelVerdict("wrong", "case ragged: o: relative error 1"),
)
REFUSES = KernelVerdict("refuses", "it needs a Hopper GPU")


def judged(asked=None, **verdicts):
    """A judge with a verdict for each implementation, which notes what it is asked."""

    def judge(operation, impl):
        if asked is not None:
            asked.append((operation, impl))
        return verdicts[impl]

    return judge
