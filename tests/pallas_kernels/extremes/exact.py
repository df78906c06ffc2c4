# SPDX-License-Identifier: Apache-2.0
"""Every operation and its gradients in float64, and beside each number what one ulp is worth in it:
that of Σ|term|, the terms rounded to the operands' dtype, the exponents of a softmax to float32."""

import numpy as np

EPS = float(np.finfo(np.float32).eps)
ANYTHING = 1e30  # for what no float32 arithmetic can tell: it need only be finite


def wide(x):
    return np.asarray(x).astype(np.float64)


def of_exponents(weight, exponent, eps):
    """An ulp, over eps, of weight = e^x where |x|'s terms add up to `exponent`, in float32."""
    error = exponent * EPS
    return np.where(error > 0.02, ANYTHING, weight * (1 + error / eps))


def with_ulp(sized, eps, exactly=()):
    """{name: (value, size)} to {name: (value, ulp)}; `exactly` are those of float32 throughout."""
    return {k: (x, size * (EPS if k in exactly else eps)) for k, (x, size) in sized.items()}


def visible_mask(window, q_pos, k_pos, q_seg, k_seg):
    distance = q_pos[:, :, None] - k_pos[:, None, :]
    is_same_segment = (q_seg[:, :, None] == k_seg[:, None, :]) & (k_seg[:, None, :] > 0)
    return is_same_segment & (distance >= 0) & ((distance < window) | (window == 0))


def attention(window, inputs, cotangents, eps):
    """{name: (value, ulp)} of o, lse and every gradient; `eps` of the dtype of q."""
    q, k, v, sink = map(wide, inputs[:4])
    do, dlse = map(wide, cotangents)
    (B, _, N, H), (S, K) = q.shape, k.shape[1:3]
    scale = H**-0.5
    wide_k, wide_v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    mask = visible_mask(window, *map(np.asarray, inputs[4:]))[:, None]
    z = np.einsum("btnh,bsnh->bnts", q, wide_k) * scale
    z_size = np.einsum("btnh,bsnh->bnts", abs(q), abs(wide_k)) * scale * mask
    z, sink = np.where(mask, z, -np.inf), np.broadcast_to(sink[None, :, None], z.shape[:3])
    top = np.maximum(z.max(-1), np.maximum(sink, -1e30))
    with np.errstate(divide="ignore"):
        lse = top + np.log(np.exp(z - top[..., None]).sum(-1) + np.exp(sink - top))
    is_row = np.isfinite(lse)
    safe = np.where(is_row, lse, 0)
    row = abs(safe) + z_size.max(-1, initial=0)  # all scores of a row are in its sum
    p, p_sink = np.exp(z - safe[..., None]), np.where(is_row, np.exp(sink - safe), 0)
    p_size = of_exponents(p, np.where(mask, row[..., None], 0), eps)
    p_sink_size = of_exponents(p_sink, row + np.where(np.isfinite(sink), abs(sink), 0), eps)
    o, o_size = (np.einsum("bnts,bsnh->btnh", *x) for x in ((p, wide_v), (p_size, abs(wide_v))))
    delta = np.einsum("btnh,btnh->bnt", do, o) - dlse.transpose(0, 2, 1)
    delta_size = np.einsum("btnh,btnh->bnt", abs(do), o_size) + abs(dlse).transpose(0, 2, 1)
    dp = np.einsum("btnh,bsnh->bnts", do, wide_v)
    dp_size = np.einsum("btnh,bsnh->bnts", abs(do), abs(wide_v))
    dz = p * (dp - delta[..., None]) * scale
    dz_size = p_size * (dp_size + delta_size[..., None]) * scale

    def contract(dims, factor, operand):
        def keyed(x):
            return x.reshape(B, S, K, N // K, H).sum(3) if dims.endswith("bsnh") else x

        value, size = factor
        return keyed(np.einsum(dims, value, operand)), keyed(np.einsum(dims, size, abs(operand)))

    sized = {
        "o": (o, o_size),
        "lse": (lse.transpose(0, 2, 1), (1 + row).transpose(0, 2, 1)),
        "dq": contract("bnts,bsnh->btnh", (dz, dz_size), wide_k),
        "dk": contract("bnts,btnh->bsnh", (dz, dz_size), q),
        "dv": contract("bnts,btnh->bsnh", (p, p_size), do),
        "dsink": (-(p_sink * delta).sum((0, 2)), (p_sink_size * delta_size).sum((0, 2))),
    }
    return with_ulp(sized, eps, ("lse",))


def logprobs(temperature, vocab_size, inputs, cotangents, eps):
    """{name: (value, ulp)} of logp, entropy, dhidden and dw_head."""
    hidden, w_head = map(wide, inputs[:2])
    w_head, targets = w_head[:, :vocab_size], np.asarray(inputs[2])
    dlogp, dent = (wide(x)[:, None] for x in cotangents)
    z, z_size = hidden @ w_head / temperature, abs(hidden) @ abs(w_head) / temperature
    log_p = z - z.max(1, keepdims=True)
    log_p = log_p - np.log(np.exp(log_p).sum(1, keepdims=True))
    p, row = np.exp(log_p), 1 + z_size.max(1, keepdims=True)
    p_size = of_exponents(p, np.broadcast_to(row, p.shape), eps)
    entropy = -(p * log_p).sum(1, keepdims=True)
    exact_p = of_exponents(p, np.broadcast_to(row, p.shape), EPS)
    entropy_size = (exact_p * (1 + abs(log_p))).sum(1, keepdims=True)
    is_target = np.arange(vocab_size)[None, :] == targets[:, None]
    dz = is_target * dlogp - p * (dlogp + dent * (log_p + entropy))
    dz_size = is_target * abs(dlogp) + p_size * (
        abs(dlogp) + abs(dent) * (abs(log_p) + (row + entropy_size) * EPS / eps + entropy)
    )
    sized = {
        "logp": (log_p[is_target], row[:, 0] * np.ones(len(targets))),
        "entropy": (entropy[:, 0], entropy_size[:, 0]),
        "dhidden": (dz @ w_head.T / temperature, dz_size @ abs(w_head).T / temperature),
        "dw_head": (hidden.T @ dz / temperature, abs(hidden).T @ dz_size / temperature),
    }
    return with_ulp(sized, eps, ("logp", "entropy"))


def _groups(sizes, n_rows):
    ends = np.cumsum(sizes)
    row = np.arange(n_rows)
    return ((row[:, None] < ends) & (row[:, None] >= ends - sizes)).astype(np.float64)


def _products(inputs):
    lhs, rhs, bias = map(wide, inputs[:3])
    groups = _groups(np.asarray(inputs[3]), len(lhs))

    def product(lhs, rhs, bias):
        return np.einsum("md,edf,me->mf", lhs, rhs, groups) + groups @ bias

    return product(lhs, rhs, bias), product(abs(lhs), abs(rhs), abs(bias)), groups


def _pulled(inputs, groups, dh, dh_size):
    lhs, rhs, _ = map(wide, inputs[:3])

    def contract(dims, *factors):
        return (np.einsum(dims, x, *y) for x, y in ((dh, factors), (dh_size, map(abs, factors))))

    return {
        "dlhs": tuple(contract("mf,edf,me->md", rhs, groups)),
        "drhs": tuple(contract("mf,md,me->edf", lhs, groups)),
        "dbias": tuple(contract("mf,me->ef", groups)),
    }


def matmul(inputs, cotangents, eps):
    """{name: (value, ulp)} of out, dlhs, drhs, dbias; inputs are lhs, rhs, bias, sizes."""
    h, h_size, groups = _products(inputs)
    dout = wide(cotangents[0])
    return with_ulp({"out": (h, h_size), **_pulled(inputs, groups, dout, abs(dout))}, eps)


def swiglu(alpha, limit, inputs, cotangents, eps):
    """As `matmul`. The second derivatives of the activation are below 8·α and 1.1·α."""
    h, h_size, groups = _products(inputs)
    (gate, up), (gate_size, up_size) = np.split(h, 2, 1), np.split(h_size, 2, 1)
    below, inside = gate < limit, abs(up) < limit
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    sigma = 1 / (1 + np.exp(-np.maximum(alpha * gate, -700)))
    slope = sigma * (1 + alpha * gate * (1 - sigma))
    dout = wide(cotangents[0])
    dgate, dup = dout * (up + 1) * slope * below, dout * gate * sigma * inside
    out = (up + 1) * gate * sigma
    size = abs(out) + 1.1 * (1 + abs(up)) * gate_size + abs(gate * sigma) * up_size
    to_kinks = [abs(h[:, : gate.shape[1]] - limit), abs(abs(h[:, gate.shape[1] :]) - limit)]
    kink = (to_kinks[0] <= 9 * eps * gate_size) | (to_kinks[1] <= 9 * eps * up_size)
    dgate_size = abs(dout) * ((1 + abs(up)) * (abs(slope) + 2 * alpha * gate_size) + 1.1 * up_size)
    dup_size = abs(dout) * (abs(gate * sigma) + 1.1 * gate_size)
    dh = np.concatenate([dgate, dup], 1)
    dh_size = np.concatenate([np.where(kink, ANYTHING, x) for x in (dgate_size, dup_size)], 1)
    return with_ulp({"out": (out, size), **_pulled(inputs, groups, dh, dh_size)}, eps)


def compare(name, actual_results, exact, ulps=8.0):
    """|ours − exact| ≤ ulps·ulp, number by number, and equal where exact is infinite.

    Stricter than the three-way rule, whose bound is that of the largest number.
    """
    for (part, (expected, ulp)), result in zip(exact.items(), actual_results, strict=False):
        actual = wide(result)
        assert actual.shape == expected.shape, (
            f"{name} {part}: {actual.shape} must be {expected.shape}"
        )
        finite = np.isfinite(actual) | (actual == expected)
        assert finite.all(), f"{name} {part}: {np.sum(~finite)} of {finite.size} are not finite"
        with np.errstate(invalid="ignore"):
            error = np.where(actual == expected, 0, abs(actual - expected))
        room = ulps * ulp + 1e-24  # σ is bounded below, see swiglu.py
        if (error > room).any():
            index = np.unravel_index(np.argmax(error / room), error.shape)
            raise AssertionError(
                f"{name} {part}{[int(i) for i in index]}: {actual[index]:.8g} must be "
                f"{expected[index]:.8g} to {room[index]:.2e}; "
                f"so must {np.sum(error > room) - 1} others"
            )
