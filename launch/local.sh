#!/usr/bin/env bash
# Train on this machine, detached from the terminal; the same command resumes.
#
#   launch/local.sh RUN_FOLDER --config tiny.py [--set key=value ...]
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
if [ -f "$work/pid" ] && kill -0 "$(cat "$work/pid")" 2>/dev/null; then
  echo "error: $work is being trained by process $(cat "$work/pid"); stop it first: kill $(cat "$work/pid")" >&2
  exit 2
fi
mkdir -p "$work"
nohup "$python" -m jaxmoe.train "$@" --workdir "$work" >> "$work/log.txt" 2>&1 < /dev/null &
echo $! > "$work/pid"
echo "follow   tail -f $work/log.txt"
echo "stop     kill $!   (saves first)"
