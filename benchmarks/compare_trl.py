# SPDX-License-Identifier: Apache-2.0
"""CPU-seconds of one tiny GRPO step: jaxmoe against TRL, same weights, same core, in turn.

    python benchmarks/compare_trl.py --peer-python PATH [--rounds 7] [--stock-malloc]
        [--prompts 8] [--samples 8] [--prompt-tokens 16] [--new-tokens 64] [--peer-parts 1]

Next: README.md says what is equal on both sides; peer_trl.py and ours.py are the two workers.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-4  # nats, between the two sides' log-probs
ROWS, VOCAB = 16, 512
SIZES = ("prompts", "samples", "prompt-tokens", "new-tokens", "peer-parts")


class Worker:
    """One side: a process that answers each line with one line of JSON."""

    def __init__(self, python: str, script: str, model: Path, log: Path, *options: str) -> None:
        self.name, self.log = script, log
        command = [python, str(HERE / script), str(model), *options]
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment(),
            )
        assert self.answer() == "ready"

    def answer(self):
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            tail = self.log.read_text()[-3000:]
            raise SystemExit(f"{self.name} must answer every command; it ended:\n{tail}")
        return json.loads(line)

    def ask(self, command: str):
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def quit(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("quit\n")
        self.process.stdin.close()
        self.process.wait(timeout=60)


def environment() -> dict[str, str]:
    """One thread, the C library's own malloc settings, no flags from outside, nothing fetched."""
    dropped = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "XLA_", "JAX_", "OMP_", "MKL_", "TORCH_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def largest_difference(ours: Worker, peer: Worker, length: int) -> float:
    """max |log-prob ours - theirs| on random rows; leaves where the models are not the same."""
    dice = random.Random(1)
    rows = [[dice.randrange(VOCAB) for _ in range(length)] for _ in range(ROWS)]
    command = "logprobs " + json.dumps(rows)
    pairs = zip(ours.ask(command), peer.ask(command), strict=True)
    worst = max(abs(a - b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))
    if not worst <= TOLERANCE:
        raise SystemExit(f"log-probs must agree within {TOLERANCE} nats; they differ by {worst}.")
    return worst


def measure(ours: Worker, peer: Worker, rounds: int) -> dict[str, dict[str, list[float]]]:
    """CPU-seconds of every round: figure -> side -> list."""
    found: dict[str, dict[str, list[float]]] = {}

    def note(figure: str, side: str, seconds: float) -> None:
        found.setdefault(figure, {"ours": [], "peer": []})[side].append(seconds)

    for done in range(rounds):
        for side, worker in (("ours", ours), ("peer", peer)):
            for name, seconds in worker.ask("step").items():
                note(name.removesuffix("_cpu_s"), side, seconds)
        for side, worker in (("ours", ours), ("peer", peer)):
            note("attention", side, worker.ask("attention"))
        print(f"round {done + 1} of {rounds}", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Prints min and median of each figure; returns them."""
    print(
        f"{'CPU-seconds':<12}{'ours min':>10}{'median':>9}{'peer min':>10}{'median':>9}"
        f"{'ratio min':>11}{'median':>9}"
    )
    result = {}
    for figure in ("generate", "train", "step", "attention"):
        ours, peer = found[figure]["ours"], found[figure]["peer"]
        row = {
            "ours_min": min(ours),
            "ours_median": median(ours),
            "peer_min": min(peer),
            "peer_median": median(peer),
            "ratio_min": min(peer) / min(ours),
            "ratio_median": median(peer) / median(ours),
        }
        result[figure] = row
        print(
            f"{figure:<12}{row['ours_min']:>10.3f}{row['ours_median']:>9.3f}"
            f"{row['peer_min']:>10.3f}{row['peer_median']:>9.3f}"
            f"{row['ratio_min']:>10.2f}x{row['ratio_median']:>8.2f}x"
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peer-python", required=True, help="a Python that has torch and trl")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="also write the JSON document here")
    parser.add_argument(
        "--stock-malloc", action="store_true", help="both sides with glibc's malloc as it comes"
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--peer-parts", type=int, default=1, help="in which it trains a batch")
    args = parser.parse_args()
    length = args.prompt_tokens + args.new_tokens
    options = ["--core", str(max(os.sched_getaffinity(0)))]
    options += ["--stock-malloc"] if args.stock_malloc else []
    for name in SIZES:
        options += [f"--{name}", str(getattr(args, name.replace("-", "_")))]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        made = subprocess.run(
            [args.peer_python, str(HERE / "peer_trl.py"), str(model), "--make"],
            env=environment(),
            capture_output=True,
            text=True,
        )
        if made.returncode:
            raise SystemExit(f"the peer must make the model; it failed:\n{made.stderr[-3000:]}")
        ours = Worker(sys.executable, "ours.py", model, Path(folder) / "ours.log", *options)
        peer = Worker(args.peer_python, "peer_trl.py", model, Path(folder) / "peer.log", *options)
        worst = largest_difference(ours, peer, length)
        print(f"log-probs agree: largest difference {worst:.1e} nats over {ROWS * length} tokens")
        found = measure(ours, peer, args.rounds)
        ours.quit()
        peer.quit()
    summary = table(found)
    optimizer = found["optimizer"]["peer"]
    print(f"ours includes clipping and AdamW; the peer's, not in its rows: {min(optimizer):.3f} s")
    document = {
        "parameters": int(made.stdout.split()[-1]),
        "sizes": {name: getattr(args, name.replace("-", "_")) for name in SIZES},
        "rounds": args.rounds,
        "malloc": "stock" if args.stock_malloc else "keeps freed memory",
        "largest_logprob_difference": worst,
        "cpu_seconds": summary,
        "peer_optimizer_cpu_s": {"min": min(optimizer), "median": median(optimizer)},
        "rounds_cpu_seconds": found,
    }
    line = json.dumps(document)
    if args.out:
        args.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
