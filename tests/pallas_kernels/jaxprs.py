# SPDX-License-Identifier: Apache-2.0
"""The equations of a traced program."""

import jax


def equations(jaxpr):
    """Every equation of a jaxpr, including those of the jaxprs in its parameters."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: x is None):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
