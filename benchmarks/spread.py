# SPDX-License-Identifier: Apache-2.0
"""What it gains to spread prompts over servers by their length: a simulation, nothing is sampled.

    python benchmarks/spread.py

A server advances each of its rows by a token in a step of A + B·(tokens in its cache) seconds, and
reads a prompt at C seconds a token. Lengths are lognormal; an answer's is not known when its prompt
is sent. Seconds until the last answer, as a share of what requests in the given order to the server
with the fewest requests take: the mean over rounds, and the worst.
"""

import argparse
import heapq
from collections.abc import Callable

import numpy as np

A, B, C = 0.01, 2e-8, 2e-5  # s: a step, a cached token of it, a prompt's token
Request = tuple[int, np.ndarray]  # tokens of the prompt, of each of its answers


def seconds(
    requests: list[Request],
    order: list[int],
    cost: Callable[[Request], float],
    servers: int,
    width: int,
) -> float:
    """Until the last answer; `width` requests are under way at once."""
    waiting = list(reversed(order))
    load, ends = np.zeros(servers), np.zeros(servers)
    clock = [(0.0, s) for s in range(servers)]
    rows: list[list[list[float]]] = [[] for _ in range(servers)]  # [left, cached, request]
    left = [len(answers) for _, answers in requests]
    where, under_way = {}, 0

    def send() -> None:
        nonlocal under_way
        while waiting and under_way < width:
            i = waiting.pop()
            s = int(np.argmin(load))
            load[s] += cost(requests[i])
            where[i] = s
            under_way += 1
            prompt, answers = requests[i]
            read[s] += C * prompt
            rows[s] += [[float(n), float(prompt), float(i)] for n in answers]

    read = np.zeros(servers)
    send()
    while clock:
        now, s = heapq.heappop(clock)
        if not rows[s]:
            if waiting or any(rows):
                heapq.heappush(clock, (now + A, s))
            continue
        table = np.asarray(rows[s])
        steps = table[:, 0].min()
        now += read[s] + steps * (A + B * (table[:, 1].sum() + len(table) * steps / 2))
        read[s] = 0.0
        table[:, 0] -= steps
        table[:, 1] += steps
        for i in table[table[:, 0] <= 0, 2].astype(int):
            left[i] -= 1
            if left[i] == 0:
                load[where[i]] -= cost(requests[i])
                under_way -= 1
        rows[s] = table[table[:, 0] > 0].tolist()
        ends[s] = now
        send()
        heapq.heappush(clock, (now, s))
    return float(ends.max())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--samples", type=int, default=8)
    args = parser.parse_args()
    for servers, prompts, longest, width in (
        (2, 64, 2048, 64),
        (4, 256, 8192, 256),
        (4, 256, 8192, 64),
        (8, 256, 32768, 256),
    ):
        found: dict[str, list[float]] = {}
        for seed in range(args.rounds):
            rng = np.random.default_rng(seed)
            size = np.minimum(rng.lognormal(np.log(longest / 6), 1.0, prompts), longest).astype(int)
            requests = [
                (int(p), np.minimum(rng.lognormal(6.5, 0.7, args.samples), 4096).astype(int) + 1)
                for p in size
            ]
            given = list(range(prompts))
            by_length = sorted(given, key=lambda i: -requests[i][0])

            def one(_: Request) -> float:
                return 1.0

            def tokens(request: Request) -> float:
                return request[0] + args.samples * 4096.0

            base = seconds(requests, given, one, servers, width)
            for name, order, cost in (
                ("fewest tokens", given, tokens),
                ("longest first", by_length, one),
                ("both", by_length, tokens),
            ):
                share = seconds(requests, order, cost, servers, width) / base
                found.setdefault(name, []).append(share)
        told = "; ".join(f"{name} {np.mean(x):.3f} ({max(x):.3f})" for name, x in found.items())
        print(f"{servers} servers, {prompts} prompts of up to {longest}, {width} at once: {told}")


if __name__ == "__main__":
    main()
