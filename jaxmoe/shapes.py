# SPDX-License-Identifier: Apache-2.0
"""The letters of array dimensions, used in the whole project, and three aliases for trees of
arrays.

An array's name ends in its shape, and einsum strings use the same letters:

    B sequences        T query / token time   S key time        M tokens flattened (B*T)
    D model width      N query heads          K kv heads        G query heads per kv head (N = K*G)
    H head size        E experts              A active experts  F expert hidden width
    V vocabulary       L layers               P prompts         R samples per prompt
    J turns of an episode                     K of a teacher: the words that it lists
    W window (keys a query may read, itself included)           C cache slots

Scalars and trees have no suffix. A lower-case letter is one device's shard of that
dimension, inside `shard_map` bodies only. Log-probs always have these names, in this
order: `logp` (current parameters, has a gradient), `old_logp` (the trainer before the update),
`rollout_logp` (reported by the engine), `ref_logp` (a frozen reference). `logp_BT[b, t]` is the
log-prob OF `tokens_BT[b, t]`, so column 0 is never trained on.

Next: jaxmoe/records.py, the host-side data that the parts exchange.
"""

from typing import Any, TypeAlias

Leaf: TypeAlias = Any  # an array, its abstract shape, its sharding or its spec
Params: TypeAlias = dict[str, Any]  # nested dicts with Leaf at the ends
Metrics: TypeAlias = dict[str, Any]  # "group/name" -> scalar; of a step also arrays by layer
