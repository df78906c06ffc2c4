#!/usr/bin/env bash
# A vLLM server for training runs on other hosts; needs vLLM and our plugin, no trainer.
#
#   export VLLM_API_KEY=$(openssl rand -hex 32)    # the same one for the training command
#   launch/vllm_server.sh gpt-oss-20b --dtype bfloat16 --max-model-len 1537 --max-num-seqs 1024
#
# The folder needs a config.json only. --max-model-len: data.max_prompt_tokens +
# rollout.max_new_tokens + 1. PORT and HOST: where it listens, 8000 on every address of this host.
set -euo pipefail
model=${1:?name the folder of the model first: launch/vllm_server.sh FOLDER --max-model-len N}
shift
if [[ -z ${VLLM_API_KEY:-} ]]; then
  echo "who reaches its port could run code as you: export VLLM_API_KEY=\$(openssl rand -hex 32)," \
    "here and for the training command" >&2
  exit 2
fi
export VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1
exec "${PYTHON:-python3}" -m vllm.entrypoints.openai.api_server \
  --host "${HOST:-0.0.0.0}" --port "${PORT:-8000}" --middleware jaxmoe.vllm.plugin.auth_middleware.AuthMiddleware \
  --model "$model" --served-model-name jaxmoe --load-format dummy --skip-tokenizer-init \
  --enable-scale-out --logprobs-mode processed_logprobs \
  --weight-transfer-config '{"backend": "jaxmoe"}' \
  --worker-extension-cls jaxmoe.vllm.plugin.worker.Worker --enable-return-routed-experts "$@"
