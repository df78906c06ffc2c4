# SPDX-License-Identifier: Apache-2.0
"""A small training that is killed, asked to stop, or finds its disk full, again and again, and is
then compared to the bit with one that nothing happened to.

Next: faults.py, the campaign.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.patience import ends_in_time

ROOT = Path(__file__).resolve().parents[1]
_ALWAYS = (
    "warmup.sequences_per_step=8",
    "rollout.sequences_per_step=16",
    "rollout.samples_per_prompt=4",
    "rollout.max_gen_batches=1",
    "data.train_rows=64",
    "data.held_out_rows=4",
    "data.rewards=odd_rewards:odd_sum",
    "eval.every_steps=4",
    "eval.samples_per_prompt=1",
    "model.n_layers=2",
    "model.d_model=32",
)
SETTINGS = {
    "answers": (
        "tiny.py",
        "warmup.steps=2",
        "steps=4",
        "rollout.max_new_tokens=5",
        "save.every_steps=1",
    ),
    # long enough a warm start that the policy calls its tool, which is a sandbox
    "episodes": (
        "tiny_tool.py",
        "warmup.steps=24",
        "warmup.lr=1e-2",
        "steps=3",
        "save.every_steps=2",
        "warmup.demonstrations=jaxmoe.configs.tiny_tool:demonstrate_calculator(share=1.0)",
        "data.tools=python_sandbox",
        "sandbox.warm=1",
        "sandbox.call_s=60",
        "rollout.reply_timeout_s=600",
        "model.d_expert=24",
        "model.n_experts=4",
        "optim.tokens_per_microbatch=0",
        "rollout.max_context=192",
        "rollout.max_turn_tokens=40",
    ),
}
TRAININGS = tuple(SETTINGS)
REWARDS = '''"""A reward that differs within a group, or no step would change a weight."""


def odd_sum(prompt, response, row):
    return float(sum(map(ord, response)) % 2)
'''
XLA_FLAGS = (  # compiling is most of the time, and nobody looks at the speed here
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_multi_thread_eigen=false"
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
DISK_BYTES = 256 << 20
START_S = 25.0  # while it starts, and on an idle machine until it ends
HANG_S = 120.0  # after the fault, by a clock that stands still while it waits for a processor
TRIES = 40  # starts of one training, which may be done before its fault comes


def make_reference(out: Path, training: str) -> None:
    """Train without a fault; what was compiled is kept for the others."""
    (out / "odd_rewards.py").write_text(REWARDS)
    reference = reference_folder(out, training)
    if (reference / "done").exists():
        return
    shutil.rmtree(reference, ignore_errors=True)
    done = start(out, reference, training, keep_programs=True)
    errors = done.communicate()[1]
    if done.returncode:
        raise SystemExit(f"the training without a fault must end well:\n{errors}")
    (reference / "done").touch()


def reference_folder(out: Path, training: str) -> Path:
    return out / f"reference-{training}"


def start(
    out: Path, work: Path, training: str, *, keep_programs: bool = False
) -> subprocess.Popen[str]:
    """The command as a user types it."""
    config, *settings = SETTINGS[training]
    changes = [text for change in (*_ALWAYS, *settings) for text in ("--set", change)]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jaxmoe.train",
            "--config",
            config,
            "--workdir",
            str(work),
            *changes,
        ],
        cwd=out,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{out}",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": XLA_FLAGS,
            "JAX_COMPILATION_CACHE_DIR": str(out / "programs"),
            # a program that is half written when the fault comes would be read by the others
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0" if keep_programs else "1e9",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        },
    )


def meet(kinds: list[str], dice: random.Random, out: Path, training: str) -> list[dict]:
    """One training with these faults in turn, then to its end; one answer for each fault."""
    place = out / "trainings" / f"{dice.randrange(2**48):012x}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    work = place / "run"
    mounted = "disk" in kinds and _mount(place)
    faults, todo = list[dict](), list(kinds)
    try:
        for _ in range(TRIES):
            fault = _one_run(out, work, training, todo[0] if todo else "", dice, mounted)
            if fault["met"]:
                todo.pop(0)
                faults.append(fault)
            elif fault["failure"]:
                faults.append({**fault, "kind": kinds[-1]})
                break
            if fault["ended"] and todo:  # it was done first: another training for the others
                compare(work, reference_folder(out, training), faults)
                shutil.rmtree(work, ignore_errors=True)
            elif fault["ended"] or (fault["failure"] and fault["failure"] == "hang"):
                break
        if not any(f["failure"] == "hang" for f in faults):
            compare(work, reference_folder(out, training), faults)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=False)
    if not any(f["failure"] for f in faults):
        shutil.rmtree(place, ignore_errors=True)
    return [{name: f[name] for name in ("kind", "failure", "what")} for f in faults]


def _one_run(
    out: Path, work: Path, training: str, kind: str, dice: random.Random, mounted: bool
) -> dict:
    """Start or resume a training, let a fault of this kind happen, and judge how it ends."""
    process = start(out, work, training)
    begun = time.monotonic()
    # a training inherits what nohup or a background job ignores, and then rightly goes on
    number = dice.choice([n for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN])
    # half of them at any time, half soon after a step, where files are written
    lines_more, after_s = (
        (0, dice.uniform(0, START_S))
        if dice.random() < 0.5
        else (dice.randrange(1, 3), dice.uniform(0, 0.5))
    )
    room = dice.randrange(0, 2_500_000)
    limited = kind == "disk" and (not mounted or dice.random() < 0.3)
    what = {
        "kill": "kill -9",
        "signal": number.name,
        "": "no fault",
        "disk": f"{'files' if limited else 'a disk'} of {room} bytes more",
    }[kind]
    errors = list[str]()
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: errors.extend(process.stderr))  # type: ignore[arg-type]
    reader.start()
    met = False
    if kind:
        until_lines = _lines(work) + lines_more
        while process.poll() is None and _lines(work) < until_lines:
            time.sleep(0.02)
        deadline = time.monotonic() + after_s
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if process.poll() is None:
            met = True
            what += f" after {time.monotonic() - begun:.1f} s and {_lines(work)} lines"
            if kind == "kill":
                process.kill()
            elif kind == "signal":
                process.send_signal(number)
            elif limited:
                room = max(room // 25, 100)  # of one file
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room, -1))
            else:
                _resize(work.parent, _used(work.parent) + room)
    failure = ""
    if not ends_in_time(lambda: process.poll() is not None, process.pid, HANG_S):
        failure = "hang"
        process.kill()
        process.wait()
    reader.join()
    process.stderr.close()
    if mounted:
        _resize(work.parent, DISK_BYTES)
    status, told = process.returncode, "".join(errors)
    if kind == "disk" and status == 0:
        met = False  # what was left to write fitted
    if not failure and "Traceback" in told:
        failure = "traceback"
    if not failure and not expected(kind if met else "", status, number, told):
        failure = "other"
    if failure:
        what += f"; status {status}: {told[-3000:]}"
    return {"kind": kind, "failure": failure, "what": what, "met": met, "ended": status == 0}


def expected(kind: str, status: int, number: signal.Signals, told: str) -> bool:
    """Whether a run may end so."""
    if kind == "kill":
        return status == -signal.SIGKILL
    if kind == "signal":  # before the handler is there nothing is lost by ending at once
        return status in (0, 128 + number, -number)
    if kind == "disk":
        lines = [line for line in told.splitlines() if line and not line.startswith("! ")]
        return status == 2 and len(lines) == 1 and lines[0].startswith("error: ")
    return status == 0


def compare(work: Path, reference: Path, faults: list[dict]) -> None:
    """Mark the faults of a training whose files are not those of the reference."""
    try:
        differs = [name for name, read in FILES.items() if read(work) != read(reference)]
    except (OSError, ValueError) as error:
        differs = [repr(error)]
    for fault in faults:
        if differs and not fault["failure"] and "compared" not in fault:
            fault["failure"] = "lost"
            fault["what"] += f"; differs in {differs}, see {work}"
        fault["compared"] = True


def _metrics(work: Path) -> Any:
    """Each step's numbers without times; an evaluation may have a line of its own."""
    steps = dict[tuple, dict]()
    for line in (work / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        steps.setdefault((row["stage"], row["step"]), {}).update(
            {k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens_per_s"}
        )
    return steps


def _samples(work: Path) -> Any:
    return sorted((work / "samples.jsonl").read_text().splitlines())


def _checkpoint(work: Path) -> Any:
    """The digests of every array of the last checkpoint, and of the data position."""
    steps = [int(p.name) for p in (work / "checkpoints").iterdir() if p.name.isdigit()]
    newest = work / "checkpoints" / str(max(steps))
    position = json.loads((newest / "extra" / "metadata").read_text())
    arrays = json.loads((newest / "digests" / "metadata").read_text())["arrays"]
    return newest.name, arrays, [position[name] for name in ("stage", "step", "data")]


FILES = {"metrics.jsonl": _metrics, "samples.jsonl": _samples, "the last checkpoint": _checkpoint}


def _lines(work: Path) -> int:
    try:
        return (work / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def _mount(place: Path) -> bool:
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    return subprocess.run(command, capture_output=True).returncode == 0


def _resize(place: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=False)


def _used(place: Path) -> int:
    disk = os.statvfs(place)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize
