#!/usr/bin/env bash
# Train on every host of a Cloud TPU slice. The same command resumes.
#
#   launch/tpu_pod.sh NAME ZONE /mnt/bucket/runs/20b --config gptoss20b.py --set mesh.fsdp=16 --set optim.tokens_per_microbatch=98304
#
# Each host must have the repository in ~/jaxmoe with its .venv (pip install -e . "jax[tpu]"). The
# run folder must be one that all hosts see: a mounted bucket or a network file system.
set -euo pipefail
name=${1:?the name of the TPU first: launch/tpu_pod.sh NAME ZONE RUN_FOLDER --config FILE}
zone=${2:?its zone second: launch/tpu_pod.sh NAME ZONE RUN_FOLDER --config FILE}
work=${3:?the run folder third: launch/tpu_pod.sh NAME ZONE RUN_FOLDER --config FILE}
shift 3
# quoted once more for the shell of the hosts
typed=$(printf '%q ' .venv/bin/python -m jaxmoe.train "$@" --workdir "$work")
exec gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all \
  --command="cd ~/jaxmoe && source launch/env.sh && JAXMOE_PROCESSES=auto exec $typed"
