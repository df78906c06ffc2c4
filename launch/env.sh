# shellcheck shell=bash
# What the launchers set before python starts, and why. To be sourced; what is set already stays.

# The coordinator must be asked directly, and not by a proxy of the cluster's.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY
# GPU memory: XLA takes 90 % at once. Its default of 75 % leaves room for programs that are not
# here; beside a vLLM on the same GPU set it lower. JAX refuses its older name beside the newer one:
# a value under the older name is taken over.
export XLA_CLIENT_MEM_FRACTION=${XLA_CLIENT_MEM_FRACTION:-${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}}
unset XLA_PYTHON_CLIENT_MEM_FRACTION
if command -v nvidia-smi > /dev/null; then
  # a layer's weights are gathered while the layer before is computed
  XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_latency_hiding_scheduler=true"
  # a collective whose peers are gone ends the process, instead of waiting for ever
  XLA_FLAGS="$XLA_FLAGS --xla_gpu_nccl_termination_timeout_seconds=300"
  export XLA_FLAGS
fi
