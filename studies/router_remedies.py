# SPDX-License-Identifier: Apache-2.0
"""The remedies for top-k routing that are estimators of the policy gradient, by scenario.

Next: studies/router_exact.py measures them.
"""

from functools import partial

from jaxtyping import Array, Bool

from jaxmoe.losses import (
    cispo,
    erpo,
    gspo,
    length_scaled_clip,
    mask_switched,
    ppo_clip,
    rspo,
    sequence_is,
    switch_aware_clip,
    token_icepop,
    token_is,
)
from jaxmoe.losses.rollout_correction import Correction
from studies.estimators import Estimator

UNBOUNDED = float("inf")
surrogate = partial(ppo_clip, clip_low=UNBOUNDED, clip_high=UNBOUNDED)
dual_clip_3 = partial(ppo_clip, dual_clip=3.0)
tight_clip = partial(switch_aware_clip, tight=0.75)
# The range of answers of one token is that of ppo_clip, so this is the range times 1/T².
squared_length_clip = partial(length_scaled_clip, length=1)
# The defaults, 3e-4 and 4e-4, are for thousands of tokens of a large model's small updates.
wide_gspo = partial(gspo, clip_low=3e-2, clip_high=4e-2)
sequence_is_unbounded = partial(sequence_is, high=UNBOUNDED)


def mask_old_switched(old_switched_BT: Bool[Array, "B T"]) -> Correction:
    """Drop tokens whose experts are other ones than in the forward of the old log-probs."""
    return Correction(keep_BT=~old_switched_BT)


# One update; what a trainer makes of answers that an engine with another router sampled.
ENGINE_ESTIMATORS = (
    Estimator("no correction"),
    Estimator("token_is(2)", corrections=(token_is,)),
    Estimator("sequence_is(2)", corrections=(sequence_is,)),
    Estimator("sequence_is(inf)", corrections=(sequence_is_unbounded,)),
    Estimator("token_icepop(0.5, 5)", corrections=(token_icepop,)),
    Estimator("ratio to the engine, ppo_clip", old_logp="rollout"),
    Estimator("ratio to the engine, dual clip 3", dual_clip_3, old_logp="rollout"),
    Estimator("ratio to the engine, gspo(3e-2, 4e-2)", wide_gspo, old_logp="rollout"),
    Estimator("ratio to the engine, cispo", cispo, old_logp="rollout"),
    Estimator("ratio to the engine, switch_aware_clip(0.75)", tight_clip, old_logp="rollout"),
    Estimator("ratio to the engine, clip / T²", squared_length_clip, old_logp="rollout"),
    Estimator("ratio to the engine, rspo", rspo, old_logp="rollout"),
    Estimator("ratio to the engine, erpo", erpo, old_logp="rollout"),
    Estimator("mask_switched", corrections=(mask_switched,)),
    Estimator("mask_switched + token_is(2)", corrections=(mask_switched, token_is)),
    Estimator("R3", forward="replayed"),
    Estimator("R3 + token_is(2)", corrections=(token_is,), forward="replayed"),
    Estimator("R3 + sequence_is(2)", corrections=(sequence_is,), forward="replayed"),
    Estimator("R3 + sequence_is(inf)", corrections=(sequence_is_unbounded,), forward="replayed"),
    Estimator("R3, ratio to the engine, ppo_clip", old_logp="rollout", forward="replayed"),
    Estimator("straight-through", forward="straight_through"),
    Estimator(
        "straight-through + token_is(2)", corrections=(token_is,), forward="straight_through"
    ),
    Estimator("router.freeze", forward="frozen"),
    Estimator("router.freeze + token_is(2)", corrections=(token_is,), forward="frozen"),
)
# Routers whose policy is another one than that of top-k; "annealed" is halfway from soft to top-k.
SOFT_ROUTERS = {"soft": "soft routing", "annealed": "annealed, halfway"}
SOFT_ENGINE_ESTIMATORS = {
    router: (Estimator(name), Estimator(f"{name} + token_is(2)", corrections=(token_is,)))
    for router, name in SOFT_ROUTERS.items()
}

# One update, on-policy; only the old log-probs are those of a forward that routes otherwise.
FORWARD_ESTIMATORS = (
    Estimator("old_logp=detached"),
    Estimator("surrogate, no clip", surrogate, old_logp="recomputed"),
    Estimator("ppo_clip", old_logp="recomputed"),
    Estimator("dual clip 3", dual_clip_3, old_logp="recomputed"),
    Estimator("gspo(3e-2, 4e-2)", wide_gspo, old_logp="recomputed"),
    Estimator("cispo", cispo, old_logp="recomputed"),
    Estimator("switch_aware_clip(0.75)", tight_clip, old_logp="recomputed"),
    Estimator("clip / T²", squared_length_clip, old_logp="recomputed"),
    Estimator("rspo", rspo, old_logp="recomputed"),
    Estimator("erpo", erpo, old_logp="recomputed"),
    Estimator("token_is(2), ppo_clip", corrections=(token_is,), old_logp="recomputed"),
    Estimator("sequence_is(2), ppo_clip", corrections=(sequence_is,), old_logp="recomputed"),
    Estimator(
        "switched tokens masked, ppo_clip", corrections=(mask_old_switched,), old_logp="recomputed"
    ),
    Estimator("R2, ppo_clip", old_logp="recomputed", forward="replayed"),
    Estimator("straight-through, ppo_clip", old_logp="recomputed", forward="straight_through"),
    Estimator("router.freeze, ppo_clip", old_logp="recomputed", forward="frozen"),
)

# Several updates on answers of the old policy.
UPDATE_ESTIMATORS = (
    Estimator("no ratio (REINFORCE)"),
    Estimator("surrogate, no clip", surrogate, old_logp="recomputed"),
    Estimator("sequence_is(inf)", corrections=(sequence_is_unbounded,)),
    Estimator("sequence_is(2)", corrections=(sequence_is,)),
    Estimator("token_is(2)", corrections=(token_is,)),
    Estimator("ppo_clip", old_logp="recomputed"),
    Estimator("dual clip 3", dual_clip_3, old_logp="recomputed"),
    Estimator("gspo(3e-2, 4e-2)", wide_gspo, old_logp="recomputed"),
    Estimator("cispo", cispo, old_logp="recomputed"),
    Estimator("switch_aware_clip(0.75)", tight_clip, old_logp="recomputed"),
    Estimator("clip / T²", squared_length_clip, old_logp="recomputed"),
    Estimator("rspo", rspo, old_logp="recomputed"),
    Estimator("erpo", erpo, old_logp="recomputed"),
    Estimator(
        "switched tokens masked, ppo_clip", corrections=(mask_old_switched,), old_logp="recomputed"
    ),
    Estimator("R2, surrogate, no clip", surrogate, old_logp="recomputed", forward="replayed"),
    Estimator("R2, ppo_clip", old_logp="recomputed", forward="replayed"),
    Estimator("R2, gspo(3e-2, 4e-2)", wide_gspo, old_logp="recomputed", forward="replayed"),
    Estimator("straight-through, ppo_clip", old_logp="recomputed", forward="straight_through"),
)
# With a frozen router a straight-through gradient of it has nothing to train.
FROZEN_UPDATE_ESTIMATORS = tuple(x for x in UPDATE_ESTIMATORS if x.forward != "straight_through")
SOFT_UPDATE_ESTIMATORS = {
    router: (
        Estimator(f"{name}, surrogate, no clip", surrogate, old_logp="recomputed"),
        Estimator(f"{name}, ppo_clip", old_logp="recomputed"),
    )
    for router, name in SOFT_ROUTERS.items()
}
