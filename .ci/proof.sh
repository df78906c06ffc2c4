# shellcheck shell=bash
# How .ci/run proves that its parts ran. To be sourced by it, which sets: root (the checkout), work
# (a new folder), all ("all", or empty on a landing).
# shellcheck disable=SC2154

# The command under `<!-- tests -->` in the README, word for word; fails where there is none.
readme_command() {
  local command
  command=$(awk '/<!-- tests -->/{grab=1; next} grab && /^```/{if (open) exit; open=1; next} open' "$1")
  case $command in
    *pytest*) printf '%s\n' "$command" ;;
    *) echo "CI: $1 must hold a code block with pytest after the line <!-- tests -->" >&2; return 1 ;;
  esac
}

# run_tests PART COMMAND...: the command, which runs pytest, then whether enough tests passed.
# The report of pytest is asked for by a variable: the README's command stays as it is.
run_tests() {
  local part=$1
  shift
  mkdir -p "$work/reports"
  PYTEST_ADDOPTS="--junitxml=$work/reports/$part.xml" "$@" || return
  python3 "$root/.ci/passed.py" part \
    "$root/.ci/least_passed.txt" "$work/reports" "${all:-landing}" "$part"
}

# Whether the registry answers: a small package of a known version can be downloaded.
registry_answers() {
  .venv/bin/pip download --no-deps --no-cache-dir --dest "$(mktemp -d -p "$work")" iniconfig==2.3.1
}

# install_or_skip LANE ARGUMENTS...: by pip. Where that fails the lane is skipped only if the registry
# answers nothing at all: status 3, and a note that the last check reads. Anything else is a mistake
# of our own, as a name or a version that does not exist: status 1.
install_or_skip() {
  local lane=$1
  shift
  if .venv/bin/pip install "$@"; then return 0; fi
  if registry_answers; then
    echo "CI: lane $lane: the registry answers, and pip install $* fails: see above" >&2
    return 1
  fi
  echo "SKIPPED lane $lane: the registry does not answer"
  mkdir -p "$work/reports"
  touch "$work/reports/$lane.skipped"
  return 3
}

# Whether every part of the table ran; with `all` also which tests no part has passed, and why.
# In the main lane's folder, whose environment knows all tests.
check_all_parts() {
  python3 "$root/.ci/passed.py" parts \
    "$root/.ci/least_passed.txt" "$work/reports" "${all:-landing}" || return
  [ -n "$all" ] || return 0
  .venv/bin/python -m pytest --collect-only -q -m "" tests >"$work/collected.txt" || return
  .venv/bin/python -m pytest --collect-only -q -m "gpu or tpu" tests >"$work/chips.txt" || return
  python3 "$root/.ci/passed.py" missing "$work/reports" "$work/collected.txt" "$work/chips.txt"
}
