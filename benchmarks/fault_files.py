# SPDX-License-Identifier: Apache-2.0
"""Files spoilt at random, read in a process of their own: a value is replaced, bytes are changed or
the end is missing.

Next: tests/jaxmoe/hostile_values.py has the values, faults.py the campaign.
"""

import contextlib
import io
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fault_process import meet_in_process

ROOT = Path(__file__).resolve().parents[1]
SOON_S = 60.0  # by a clock that stands still while it waits for a processor
CPU_S = 20.0  # of one file
MEMORY = 1 << 30  # bytes above what the process had before


def meet(count: int, dice: random.Random) -> list[dict]:
    """Spoil and read that many files in one process, or in more where one hangs or dies."""
    return meet_in_process(__file__, ["file"] * count, dice, SOON_S)


def spoilt(document: Any, dice: random.Random) -> bytes:
    """The document as JSON with one value replaced; then perhaps bytes changed, or the end cut."""
    from tests.jaxmoe.hostile_values import VALUES, places, replaced

    text = replaced(document, dice.choice(list(places(document))), dice.choice(VALUES))
    return (
        damaged(text.encode("utf-8", "surrogatepass"), dice)
        if dice.random() < 0.4
        else (text.encode("utf-8", "surrogatepass"))
    )


def damaged(content: bytes, dice: random.Random) -> bytes:
    """A few bytes changed, or the end cut off."""
    if dice.random() < 0.3:
        return content[: dice.randrange(len(content) + 1)]
    changed = bytearray(content)
    for _ in range(dice.randrange(1, 4)):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def readers(folder: Path) -> dict[str, Callable[[random.Random], None]]:
    """By the name of a file: spoil it in `folder` and read it as the commands do.

    Each raises AssertionError where something else in the folder was lost by it.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet_files
    from safetensors.numpy import save_file

    from jaxmoe import samples, train
    from jaxmoe.checkpoint.peft.read import read_adapter
    from jaxmoe.checkpoint.peft.write import CONFIG, save_adapter
    from jaxmoe.checkpoint.tensor_files import INDEX_FILE, find_tensors
    from jaxmoe.config import LoraConfig
    from jaxmoe.data.files import FileSource, read_task_rows
    from jaxmoe.data.tokenizer import HFTokenizer, write_byte_tokenizer
    from jaxmoe.model.config import read_hf_config, to_hf
    from jaxmoe.observe.metrics import MetricsLog, read_metrics
    from jaxmoe.observe.plots import plot_run
    from tests.jaxmoe.checkpoint.random_adapters import CFG, random_adapters
    from tests.jaxmoe.hostile_values import ANSWER, FIELDS, METRICS

    model = to_hf(CFG, dtype="float32")

    def config(dice):
        (folder / "config.json").write_bytes(spoilt(model, dice))
        read_hf_config(folder)

    def dry_run(dice):
        (folder / "config.json").write_bytes(spoilt(model, dice))
        changes = ["--set", "model=checkpoint", "--set", f"init.checkpoint={folder}", "--dry-run"]
        if train.main(["--config", "tiny.py", *changes]) not in (0, 2):
            raise AssertionError("a dry run must end with 0 or 2")

    def index(dice):
        save_file({"a": CFG_ARRAY}, folder / "one.safetensors")
        told = {"metadata": {"total_size": 12}, "weight_map": {"a": "one.safetensors"}}
        (folder / INDEX_FILE).write_bytes(spoilt(told, dice))
        find_tensors(folder)

    def tensors(dice):
        file = folder / "model.safetensors"
        save_file({"a": CFG_ARRAY}, file, metadata={"format": "pt"})
        file.write_bytes(damaged(file.read_bytes(), dice))
        find_tensors(folder)

    def adapter(dice):
        lora = LoraConfig(attention_rank=2, expert_rank=2)
        ranks: dict[str, int] = dict.fromkeys(("w_q", "w_v", "w_gate_up", "w_down"), 2)
        save_adapter(random_adapters(CFG, ranks), CFG, lora, folder / "a")
        file = folder / "a" / CONFIG
        told = json.loads(file.read_text()) | {"rank_pattern": {"q_proj": 2}}
        file.write_bytes(spoilt(told, dice))
        read_adapter(folder / "a", CFG)

    def tokenizer(dice):
        file = write_byte_tokenizer(folder)
        told = json.loads(file.read_text())
        told["model"]["vocab"] = {"a": 0, "b": 1}
        told["added_tokens"] = [told["added_tokens"][1] | {"id": 2}]
        file.write_bytes(spoilt(told, dice))
        read = HFTokenizer(file)
        read.encode("a b<|endoftext|>c", specials=True)
        read.decode([0, 1, 2, read.vocab_size - 1])

    def samples_file(dice):
        row = dice.choice(
            [
                FIELDS | {"kind": "group", "samples": [ANSWER]},
                FIELDS | {"kind": "held_out"} | ANSWER,
            ]
        )
        file, good = folder / "samples.jsonl", json.dumps(row).encode()
        file.write_bytes(spoilt(row, dice) + b"\n" + good + b"\n")
        samples.show_samples(folder)
        MetricsLog(folder, stage="rl", step=2).__exit__(None, None, None)  # as a resume does
        if good not in file.read_bytes().splitlines():
            raise AssertionError("a good line of samples.jsonl was lost")

    def metrics(dice):
        file = folder / "metrics.jsonl"
        file.write_bytes(spoilt(METRICS, dice) + b"\n" + json.dumps(METRICS).encode() + b"\n")
        plot_run(read_metrics(file), folder, panels=False)
        with MetricsLog(folder, stage="rl", step=3) as log:
            log.write("rl", 4, {"loss": 1.0})
        if METRICS not in (rows := read_metrics(file)) or rows[-1].get("step") != 4:
            raise AssertionError("a good line of metrics.jsonl was lost")

    def rows_of_questions(dice):
        row = {"question": "2 + 2 =", "answer": "4", "system": "s", "extra": {"a": [1]}}
        chat = {"prompt": [{"role": "user", "content": "2"}], "reward_model": {"ground_truth": "4"}}
        file = folder / "rows.jsonl"
        file.write_bytes(spoilt(dice.choice([row, chat]), dice) + b"\n")
        assert FileSource(read_task_rows(str(file))).digest

    def parquet(dice):
        file = folder / "rows.parquet"
        parquet_files.write_table(pa.table({"question": ["2 + 2 ="], "answer": ["4"]}), file)
        file.write_bytes(damaged(file.read_bytes(), dice))
        assert FileSource(read_task_rows(str(file))).digest

    return {
        "config.json": config,
        "config.json of a dry run": dry_run,
        "index of shards": index,
        "safetensors": tensors,
        "adapter_config.json": adapter,
        "tokenizer.json": tokenizer,
        "samples.jsonl": samples_file,
        "metrics.jsonl": metrics,
        "rows.jsonl": rows_of_questions,
        "rows.parquet": parquet,
    }


def main() -> None:
    """One line of JSON for each seed: what failed, and of which file."""
    from jaxmoe.config import ConfigError

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        seed = line.split()[1]
        dice = random.Random(int(seed))
        with tempfile.TemporaryDirectory() as folder:
            every = readers(Path(folder))
            name = dice.choice(list(every))
            before, begun, failure, what = peak_bytes(), time.process_time(), "", ""
            said = io.StringIO()
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    every[name](dice)
            except ConfigError as error:
                failure = "other" if len(str(error)) > 12_000 else ""
            except AssertionError as error:
                failure, what = "lost", str(error)
            except BaseException:
                failure, what = "traceback", traceback.format_exc()[-3000:]
            if "Traceback" in said.getvalue():
                failure, what = "traceback", said.getvalue()[-3000:]
            if not failure and peak_bytes() - before > MEMORY:
                failure, what = "other", "memory"
            if not failure and time.process_time() - begun > CPU_S:
                failure, what = "hang", f"{CPU_S:.0f} CPU-seconds"
        told = {"failure": failure, "what": f"{name}, seed {seed} {what}".strip()}
        print(json.dumps(told), file=answers, flush=True)


def peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    import numpy as np

    CFG_ARRAY = np.zeros(3, np.float32)
    main()
