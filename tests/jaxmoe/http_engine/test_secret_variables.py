# SPDX-License-Identifier: Apache-2.0
"""A vLLM that a run starts gets what it needs, and no key to anything else."""

import pytest

from jaxmoe.http_engine.secret_variables import remove_secrets

SECRET = (
    "HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY OPENAI_API_KEY AWS_PROFILE hf_token DB_PASSWORD "
    "AWS_SECRET_ACCESS_KEY GOOGLE_APPLICATION_CREDENTIALS GITHUB_TOKEN SSH_AUTH_SOCK CLIENT_SECRET "
    "AZURE_CLIENT_ID"
).split()
NEEDED = (
    "PATH HOME PYTHONPATH LD_LIBRARY_PATH CUDA_VISIBLE_DEVICES NCCL_DEBUG TOKENIZERS_PARALLELISM "
    "VLLM_LOGGING_LEVEL HF_HOME OMP_NUM_THREADS LANG TMPDIR KEYBOARD XDG_CACHE_HOME "
    "VLLM_CPU_KVCACHE_SPACE"
).split()


@pytest.mark.parametrize("name", SECRET)
def test_keys_of_other_services_are_not_passed(name):
    assert remove_secrets({name: "x", "PATH": "/bin"}) == {"PATH": "/bin"}


def test_what_a_server_needs_is_handed_on():
    kept_variables = dict.fromkeys(NEEDED, "x")
    assert remove_secrets(kept_variables) == kept_variables
