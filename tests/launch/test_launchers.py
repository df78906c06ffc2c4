# SPDX-License-Identifier: Apache-2.0
"""The launchers, without their clusters: what they would start, by doubles of srun and gcloud."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = [*sorted(LAUNCH.glob("*.sh")), LAUNCH / "slurm.sbatch"]
TELL = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$TOLD"
env | grep -E '^(JAX|XLA)' > "$TOLD.env"
"""


def double(folder: Path, name: str, text: str = TELL) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


def started(tmp_path, script, *args, **env):
    told = tmp_path / "told"
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(script), *args], cwd=ROOT, text=True, capture_output=True, timeout=60,
        env={**os.environ, "PATH": path, "TOLD": str(told), **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "told.env").read_text().splitlines()
    return told.read_text().splitlines(), dict(row.split("=", 1) for row in rows)


def test_slurm_starts_a_task_a_node_that_knows_the_first_and_its_number(tmp_path):
    double(tmp_path, "scontrol", "#!/usr/bin/env bash\nprintf 'node7\\nnode8\\n'\n")
    # srun: the second of two tasks
    double(tmp_path, "srun", '#!/usr/bin/env bash\nshift\nSLURM_PROCID=1 exec "$@"\n')
    double(tmp_path, "python-double")
    typed, env = started(
        tmp_path, LAUNCH / "slurm.sbatch", "/runs/a b", "--config", "tiny.py",
        PYTHON=str(tmp_path / "python-double"), SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_ID="50123",
        SLURM_JOB_NODELIST="node[7-8]", SLURM_NTASKS="2",
    )  # fmt: skip
    assert typed == ["-m", "jaxmoe.train", "--config", "tiny.py", "--workdir", "/runs/a b"]
    assert env["JAX_COORDINATOR_ADDRESS"] == "node7:30123"
    assert env["JAX_NUM_PROCESSES"] == "2" and env["JAX_PROCESS_ID"] == "1"


def test_a_tpu_slice_gets_the_command_on_every_host(tmp_path):
    double(tmp_path, "gcloud")
    typed, _ = started(
        tmp_path, LAUNCH / "tpu_pod.sh", "pod", "zone", "/runs/a b", "--config", "tiny.py"
    )
    assert "--worker=all" in typed and "pod" in typed and "--zone=zone" in typed
    (command,) = [x for x in typed if x.startswith("--command=")]
    assert "JAXMOE_PROCESSES=auto exec .venv/bin/python -m jaxmoe.train" in command
    assert r"--workdir /runs/a\ b" in command


@pytest.mark.parametrize("script", ["slurm.sbatch", "tpu_pod.sh", "local.sh"])
def test_a_launcher_without_its_arguments_says_what_to_type(script):
    done = subprocess.run([str(LAUNCH / script)], text=True, capture_output=True)
    assert done.returncode != 0 and "--config" in done.stderr


def test_a_pod_of_kubernetes_knows_the_first_and_its_number():
    yaml = pytest.importorskip("yaml", reason="pip install pyyaml")
    made = yaml.safe_load((LAUNCH / "k8s" / "jobset.yaml").read_text())
    (job,) = made["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    env = {row["name"]: row for row in container["env"]}
    assert env["JAX_NUM_PROCESSES"]["value"] == str(spec["completions"] * job["replicas"])
    assert spec["completions"] == spec["parallelism"] and spec["completionMode"] == "Indexed"
    # the first pod's name is JOBSET-JOB-0-0, and the JobSet's own name its subdomain
    host = env["JAX_COORDINATOR_ADDRESS"]["value"].partition(":")[0]
    assert host == f"{made['metadata']['name']}-{job['name']}-0-0.{made['metadata']['name']}"
    assert "job-completion-index" in str(env["JAX_PROCESS_ID"])


def test_the_flags_are_known_to_xla(tmp_path):
    """A flag that it does not know ends a program when it first meets a device."""
    double(tmp_path, "nvidia-smi", "#!/bin/sh\n")
    code = f'source {LAUNCH}/env.sh && exec {sys.executable} -c "import jax; jax.devices()"'
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)
    done = subprocess.run(["bash", "-c", code], env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script):
    command = [str(Path(sys.executable).parent / "shellcheck"), "-x", script.name]
    done = subprocess.run(command, cwd=LAUNCH, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout
