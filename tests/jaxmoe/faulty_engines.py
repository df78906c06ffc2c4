# SPDX-License-Identifier: Apache-2.0
"""The native engine with one fault each; a config names them, as it names any engine."""

from dataclasses import replace

import numpy as np

from jaxmoe.config import EngineError
from jaxmoe.rollout.native_description import describe_native, open_native


class Wrapped:
    """An engine that answers as the native one, and reports other log-probs."""

    incidents = ()

    def __init__(self, inner, change_logp):
        self.inner, self.change_logp = inner, change_logp

    def load(self, params, version):
        self.inner.load(params, version)

    def generate(self, prompts, sampling, *, seed, samples=1, environment=None):
        rollouts = self.inner.generate(prompts, sampling, seed=seed, samples=samples)
        return [replace(r, rollout_logp=self.change_logp(r.rollout_logp)) for r in rollouts]

    def close(self):
        self.inner.close()


class Forgetful(Wrapped):
    def load(self, params, version):
        raise EngineError("received but not in the live model: lm_head.weight")


def scaled_logp(cfg):
    """Log-probs of another distribution, that no known fault explains."""
    return _wrap(cfg, lambda logp: logp * 0.9 - 0.1)


def nan_logp(cfg):
    return _wrap(cfg, lambda logp: np.where(logp < -5.0, np.nan, logp))


def forgets_weights(cfg):
    return _wrap(cfg, lambda logp: logp, Forgetful)


def narrow_window(cfg):
    def open_narrow(cfg, *arguments):
        return open_native(replace(cfg, model=replace(cfg.model, sliding_window=31)), *arguments)

    return replace(describe_native(cfg), open=open_narrow)


def _wrap(cfg, change_logp, kind=Wrapped):
    def open_wrapped(*arguments):
        return kind(open_native(*arguments), change_logp)

    return replace(describe_native(cfg), open=open_wrapped)
