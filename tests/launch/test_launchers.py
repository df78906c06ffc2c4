# SPDX-License-Identifier: Apache-2.0
"""The launchers, without their clusters: what they would start, by doubles of srun and gcloud."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jaxlib import xla_client

from jaxmoe.config import VllmConfig
from jaxmoe.model.config import tiny
from jaxmoe.vllm.engine.server import build_engine_options, format_flags

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = [*sorted(LAUNCH.glob("*.sh")), LAUNCH / "slurm.sbatch"]
FRACTIONS = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
TELL = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$TOLD"
env | grep -E '^(JAX|XLA)' > "$TOLD.env"
"""


def double(folder: Path, name: str, text: str = TELL) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


def started(tmp_path, script, *args, **env):
    argv_file = tmp_path / "told"
    path = f"{tmp_path}:{os.environ['PATH']}"
    completed = subprocess.run(
        [str(script), *args],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=60,
        env={**os.environ, "PATH": path, "TOLD": str(argv_file), **env},
    )
    assert completed.returncode == 0, completed.stderr
    rows = (tmp_path / "told.env").read_text().splitlines()
    return argv_file.read_text().splitlines(), dict(row.split("=", 1) for row in rows)


def test_slurm_starts_one_task_per_node_with_rank(tmp_path):
    # more names than a pipe holds: who reads the first and leaves would kill it
    double(tmp_path, "scontrol", "#!/usr/bin/env bash\nexec seq -f node%g 7 20000\n")
    # srun: the second of two tasks
    double(tmp_path, "srun", '#!/usr/bin/env bash\nshift\nSLURM_PROCID=1 exec "$@"\n')
    double(tmp_path, "python-double")
    typed, env = started(
        tmp_path,
        LAUNCH / "slurm.sbatch",
        "/runs/a b",
        "--config",
        "tiny.py",
        PYTHON=str(tmp_path / "python-double"),
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_ID="50123",
        SLURM_JOB_NODELIST="node[7-8]",
        SLURM_NTASKS="2",
    )
    assert typed == ["-m", "jaxmoe.train", "--config", "tiny.py", "--workdir", "/runs/a b"]
    assert env["JAX_COORDINATOR_ADDRESS"] == "node7:30123"
    assert env["JAX_NUM_PROCESSES"] == "2" and env["JAX_PROCESS_ID"] == "1"


@pytest.mark.parametrize(
    ("set_before", "share"),
    [
        ({}, 0.9),
        ({"XLA_CLIENT_MEM_FRACTION": "0.4"}, 0.4),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}, 0.4),
        ({"XLA_CLIENT_MEM_FRACTION": "0.4", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, 0.4),
    ],
)
def test_jax_accepts_the_launchers_share_of_memory(tmp_path, monkeypatch, set_before, share):
    """jaxlib refuses the older name of the variable beside the newer one."""
    double(tmp_path, "scontrol", "#!/usr/bin/env bash\necho node7\n")
    double(tmp_path, "srun", '#!/usr/bin/env bash\nshift\nSLURM_PROCID=0 exec "$@"\n')
    double(tmp_path, "python-double")
    for name in FRACTIONS:
        monkeypatch.delenv(name, raising=False)
    _, env = started(
        tmp_path,
        LAUNCH / "slurm.sbatch",
        "/runs/a",
        PYTHON=str(tmp_path / "python-double"),
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_ID="1",
        SLURM_JOB_NODELIST="n",
        SLURM_NTASKS="1",
        **set_before,
    )
    for name in FRACTIONS:
        monkeypatch.setenv(name, env.get(name, ""))
    assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == share


def test_no_file_sets_the_older_memory_variable():
    # where somebody's own value is read
    read = {"launch/env.sh", "jaxmoe/vllm/engine/placement.py"}
    files = [p for top in ("launch", "jaxmoe", "docs") for p in (ROOT / top).rglob("*.*")]
    named = {
        p.relative_to(ROOT).as_posix()
        for p in files
        if p.suffix in (".py", ".sh", ".yaml", ".md", ".sbatch") and FRACTIONS[1] in p.read_text()
    }
    assert named == read


def test_tpu_slices_get_the_command_on_every_host(tmp_path):
    double(tmp_path, "gcloud")
    typed, _ = started(
        tmp_path, LAUNCH / "tpu_pod.sh", "pod", "zone", "/runs/a b", "--config", "tiny.py"
    )
    assert "--worker=all" in typed and "pod" in typed and "--zone=zone" in typed
    (command,) = [x for x in typed if x.startswith("--command=")]
    assert "JAXMOE_PROCESSES=auto exec .venv/bin/python -m jaxmoe.train" in command
    assert r"--workdir /runs/a\ b" in command


def test_launchers_name_no_bucket_as_a_folder():
    """The command takes folders; of gs://bucket each host would make a folder in its clone."""
    files = [path for path in LAUNCH.rglob("*") if path.is_file()]
    assert not [path.name for path in files if re.search(r"\b(gs|s3)://", path.read_text())]


def test_a_vllm_servers_key_is_not_an_argument(tmp_path):
    double(tmp_path, "python-double")
    vllm = LAUNCH / "vllm_server.sh"
    env = {"PYTHON": str(tmp_path / "python-double"), "VLLM_API_KEY": "s3cret"}
    typed, _ = started(tmp_path, vllm, "/models/a b", "--dtype", "bfloat16", **env)
    assert "s3cret" not in " ".join(typed)
    assert (
        typed[typed.index("--middleware") + 1]
        == "jaxmoe.vllm.plugin.auth_middleware.AuthMiddleware"
    )
    assert typed[typed.index("--model") + 1] == "/models/a b" and typed[-1] == "bfloat16"
    # what a run's own servers have, but for its sizes
    options = build_engine_options(VllmConfig(), tiny(), context=8, rows=8, cpu=False)
    options = {
        k: v for k, v in options.items() if k not in ("dtype", "max_model_len", "max_num_seqs")
    }
    for flag in format_flags(options):
        assert flag in typed, flag

    completed = subprocess.run(
        [str(vllm), "DIR"], text=True, capture_output=True, env={"PATH": "/bin"}
    )
    assert completed.returncode == 2 and "export VLLM_API_KEY=" in completed.stderr


@pytest.mark.parametrize("script", ["slurm.sbatch", "tpu_pod.sh", "local.sh", "vllm_server.sh"])
def test_a_launcher_without_arguments_prints_its_usage(script):
    completed = subprocess.run([str(LAUNCH / script)], text=True, capture_output=True)
    assert completed.returncode != 0 and f"first: launch/{script} " in completed.stderr.replace(
        "sbatch launch", "launch"
    )


def test_a_kubernetes_pod_knows_its_coordinator_and_rank():
    yaml = pytest.importorskip("yaml", reason="pip install pyyaml")
    jobset, _ = yaml.safe_load_all((LAUNCH / "k8s" / "jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    env = {row["name"]: row for row in container["env"]}
    assert env["JAX_NUM_PROCESSES"]["value"] == str(spec["completions"] * job["replicas"])
    assert spec["completions"] == spec["parallelism"] and spec["completionMode"] == "Indexed"
    # the first pod's name is JOBSET-JOB-0-0, and the JobSet's own name its subdomain
    host = env["JAX_COORDINATOR_ADDRESS"]["value"].partition(":")[0]
    assert host == f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    assert "job-completion-index" in str(env["JAX_PROCESS_ID"])


def test_kubernetes_servers_have_the_runs_names_and_key():
    yaml = pytest.importorskip("yaml", reason="pip install pyyaml")
    service, servers, policy = yaml.safe_load_all((LAUNCH / "k8s" / "vllm.yaml").read_text())
    run, guard = yaml.safe_load_all((LAUNCH / "k8s" / "jobset.yaml").read_text())
    assert guard["kind"] == "NetworkPolicy"
    (pod,) = [job["template"]["spec"]["template"]["spec"] for job in run["spec"]["replicatedJobs"]]
    variables = {row["name"]: row for row in pod["containers"][0]["env"]}
    name, spec = service["metadata"]["name"], servers["spec"]
    assert service["spec"]["clusterIP"] == "None" and spec["serviceName"] == name
    (port,) = [row["port"] for row in service["spec"]["ports"]]
    stem = servers["metadata"]["name"]
    urls = [f"http://{stem}-{i}.{name}:{port}" for i in range(spec["replicas"])]
    assert variables["VLLM_URLS"]["value"].split(",") == urls
    labels, template = spec["template"]["metadata"]["labels"], spec["template"]["spec"]
    for selector in (
        spec["selector"]["matchLabels"],
        service["spec"]["selector"],
        policy["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector == labels
    (container,) = template["containers"]
    (key,) = [row for row in container["env"] if row["name"] == "VLLM_API_KEY"]
    secret = key["valueFrom"]["secretKeyRef"]
    assert variables["VLLM_API_KEY"]["valueFrom"]["secretKeyRef"] == secret | {"optional": True}
    assert container["ports"][0]["containerPort"] == port
    assert policy["spec"]["ingress"][0]["ports"] == [{"port": port}]
    (jobset,) = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"].values()
    assert jobset == run["metadata"]["name"]
    # both see the folder that weights pass through, and every mount is a volume
    mounts = [
        {m["name"]: m["mountPath"] for m in c["volumeMounts"]}
        for c in (container, pod["containers"][0])
    ]
    assert mounts[0]["runs"] == mounts[1]["runs"] and template["volumes"][0] == pod["volumes"][0]
    assert set(mounts[0]) == {volume["name"] for volume in template["volumes"]}
    assert container["command"][0] == "launch/vllm_server.sh"


def test_the_flags_are_known_to_xla(tmp_path):
    """A flag that it does not know ends a program when it first meets a device."""
    double(tmp_path, "nvidia-smi", "#!/bin/sh\n")
    code = f'source {LAUNCH}/env.sh && exec {sys.executable} -c "import jax; jax.devices()"'
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)
    completed = subprocess.run(["bash", "-c", code], env=env, text=True, capture_output=True)
    assert completed.returncode == 0, completed.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script):
    command = [str(Path(sys.executable).parent / "shellcheck"), "-x", script.name]
    completed = subprocess.run(command, cwd=LAUNCH, text=True, capture_output=True)
    assert completed.returncode == 0, completed.stdout
