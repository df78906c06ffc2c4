#!/usr/bin/env bash
# Train on this machine, detached from the terminal; the same command resumes.
#
#   launch/local.sh RUN_FOLDER --config tiny.py [--set key=value ...]
#
# PROCESSES=4 before it starts so many, which find each other on this machine. One process takes all
# GPUs of a machine by itself; several are for trying out what a cluster does:
#
#   JAX_NUM_CPU_DEVICES=2 PROCESSES=4 launch/local.sh runs/four --config tiny.py --set mesh.fsdp=8
set -euo pipefail
work=${1:?name the run folder first: launch/local.sh runs/tiny --config tiny.py}
shift
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$here/.venv/bin/python}
if [ ! -x "$(command -v "$python")" ]; then
  echo "error: there is no $python. Make it as the README's first command does, or set PYTHON=..." >&2
  exit 2
fi
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
"$python" -m jaxmoe.train "$@" --workdir "$work" --dry-run > /dev/null # a mistake shows here
work=$(realpath -m -- "$work") # runs/tiny/ is runs/tiny
# the number alone may be another program's by now; a run that is starting has no lock yet
pid=$(cat "$work/pid" 2> /dev/null || true)
if [ -n "$pid" ] && [[ $(ps -ww -p "$pid" -o args= 2> /dev/null) == *jaxmoe.train*" --workdir $work" ]]; then
  echo "error: $work is being trained by process $pid; stop it first: kill $pid" >&2
  exit 2
fi
if [ -f "$work/.lock" ]; then
  # that of jaxmoe, however its run was started; without locks in the filesystem the status is another
  status=0
  flock --nonblock --conflict-exit-code 99 "$work/.lock" true 2> /dev/null || status=$?
  if [ "$status" -eq 99 ]; then
    echo "error: $work must be used by one process at a time; another process trains in it. Stop it, or name another folder." >&2
    exit 2
  fi
fi
mkdir -p "$work"
count=${PROCESSES:-1}
if [ "$count" -gt 1 ]; then
  # a port that nothing listens at, for the processes to meet
  port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  export JAX_COORDINATOR_ADDRESS=127.0.0.1:$port JAX_NUM_PROCESSES=$count
fi
started=()
for number in $(seq 0 $((count - 1))); do
  log=$work/log.txt
  if [ "$count" -gt 1 ]; then export JAX_PROCESS_ID=$number; fi
  if [ "$number" -gt 0 ]; then log=$work/log-$number.txt; fi
  nohup "$python" -m jaxmoe.train "$@" --workdir "$work" >> "$log" 2>&1 < /dev/null &
  started+=($!)
done
first=${started[0]}
sleep 1
if ! kill -0 "$first" 2> /dev/null; then
  kill "${started[@]}" 2> /dev/null || true
  echo "error: the run ended at once; $work/log.txt ends with: $(tail -n 1 "$work/log.txt")" >&2
  exit 1
fi
echo "$first" > "$work/pid"
echo "follow   tail -f $work/log.txt"
echo "stop     kill $first   (saves first, and ends all)"
