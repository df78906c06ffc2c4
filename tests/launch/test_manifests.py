# SPDX-License-Identifier: Apache-2.0
"""The manifests against Kubernetes' own schemas, in which no unknown field passes.

A JobSet is no part of Kubernetes; the Job within it is. What they say: test_launchers.py.
"""

from copy import deepcopy
from pathlib import Path

import pytest

K8S = Path(__file__).parents[2] / "launch" / "k8s"


def documents(name):
    yaml = pytest.importorskip("yaml", reason="pip install pyyaml")
    return list(yaml.safe_load_all((K8S / name).read_text()))


@pytest.fixture
def valid():
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="pip install kubernetes-validate (72 MB of schemas)"
    )

    def valid(manifest):
        try:
            schemas.validate(manifest, "1.30", strict=True)
        except schemas.ValidationError as error:
            return str(error)
        return None

    return valid


def job():
    (one,) = documents("jobset.yaml")[0]["spec"]["replicatedJobs"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": one["name"]},
        "spec": one["template"]["spec"],
    }


def test_servers_service_and_policy_follow_the_schema(valid):
    for manifest in documents("vllm.yaml"):
        assert valid(manifest) is None, manifest["kind"]


def test_the_jobset_follows_the_schema_without_misspelt_fields(valid):
    assert valid(job()) is None
    misspelt = deepcopy(job())
    misspelt["spec"]["completion"] = misspelt["spec"].pop("completions")
    assert "completion" in (valid(misspelt) or "")
