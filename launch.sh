#!/usr/bin/env bash
# Sets paceline up on first use, then runs it. `./launch.sh` alone answers a question with a small real model.
set -euo pipefail

usage() {
    cat <<'USAGE'
Usage: ./launch.sh [COMMAND] [ARGUMENT …]

  (none)             the same as generate
  generate PROMPT …  answer prompts, or a first question; --tp N splits the model over N ranks, one a GPU by default
  serve [MODEL]      answer OpenAI's API over HTTP; --tp N as for generate
  chat [MODEL]       talk with a model in the terminal, or with a server: --url URL
  batch IN OUT       answer a file of requests in OpenAI's batch format, resumable; --url URL for a server
  verify MODEL …     check a model's shards against its checkpoint, or show what each rank would hold
  test …             style, types and tests; arguments go to pytest
  bench serve …      load against any OpenAI-compatible server: latencies, goodput, tokens a second
  bench NAME …       run benchmarks/NAME.py
  setup              set up only
  COMMAND --help     the options of a command; other commands go to `python -m paceline.launcher`

verify and bench take one rank unless --tp N is given.

The first run makes .venv beside this script and installs into it (about a minute, 2 GB).
  PYTHON=…           the Python, 3.11 or newer, to make .venv with
  PACELINE_PYTHON=…  an interpreter that has paceline installed, used as it is instead of .venv
USAGE
}

root="$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)"
venv="$root/.venv"
constraints="$root/.ci/constraints.txt"
log="$venv/setup.log"

# Keeps the current folder off Python's path: a folder called `kernels` there would be taken for a package by transformers.
export PYTHONSAFEPATH=1

say() { printf 'launch.sh: %s\n' "$*" >&2; }
fail() { say "$@"; exit 1; }

# The interpreter to make .venv with.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or newer with its venv module; install one, or name it in PYTHON"
}

# What the installed packages depend on: another value means that set-up has to run again.
fingerprint() {
    { printf '%s\n' "$root"; cat "$root/pyproject.toml" "$constraints" "$venv/pyvenv.cfg"; } 2>/dev/null | sha256sum
}

is_set_up() {
    [[ -x "$venv/bin/python" && -f "$venv/setup.stamp" && "$(<"$venv/setup.stamp")" == "$(fingerprint)" ]]
}

# Runs one step of the set-up, its output in the log; shows the log's end where it fails.
step() {
    if ! "$@" >>"$log" 2>&1; then
        tail -n 20 "$log" >&2
        fail "set-up failed; the whole output is in $log; ./launch.sh tries again"
    fi
}

# torch comes first and alone: where there is no GPU its CPU build, from PyTorch's own index, is a tenth of the size.
# An index that cannot be reached costs seconds, and the configured one is used.
install_torch() {
    local pip=("$venv/bin/python" -m pip install --constraint "$constraints" torch)
    if ! command -v nvidia-smi >/dev/null; then
        "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu --retries 1 --timeout 10 && return
    fi
    "${pip[@]}"
}

set_up() {
    exec 9<"$root/launch.sh"
    flock 9 # one set-up at a time; whoever waited finds it done
    if ! is_set_up; then
        say "setting up $venv (once, about a minute)"
        if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
            local python
            python="$(find_python)"
            "$python" -m venv --clear "$venv" || fail "$python could not make $venv; install its venv module (python3-venv)"
        fi
        rm -f "$venv/setup.stamp"
        : >"$log"
        step install_torch
        step "$venv/bin/python" -m pip install --constraint "$constraints" --editable "${root}[dev]"
        fingerprint >"$venv/setup.stamp"
    fi
    exec 9<&-
}

check_given_python() {
    command -v -- "$PACELINE_PYTHON" >/dev/null || fail "PACELINE_PYTHON=$PACELINE_PYTHON is not an interpreter"
    "$PACELINE_PYTHON" -c 'import paceline' 2>/dev/null || fail "$PACELINE_PYTHON has no paceline; run:" \
        "$PACELINE_PYTHON -m pip install --no-deps --no-build-isolation --editable $root"
}

run_tests() {
    cd -- "$root"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    "$python" -m mypy
    if [[ $# -eq 0 ]]; then
        # The whole suite takes a process a core, each with one thread: more would take the others' cores.
        set -- --numprocesses "$(nproc)" --dist worksteal
        export OMP_NUM_THREADS=1 # which nproc heeds, too
    fi
    exec "$python" -m pytest "$@"
}

# Whether a file of benchmarks/ is a program; the others are what the programs share.
is_benchmark() {
    [[ -f "$1" && "$(<"$1")" == *'if __name__ == "__main__":'* ]]
}

run_benchmark() {
    local name="${1:-}" script
    script="$root/benchmarks/$name.py"
    if [[ -z "$name" ]] || ! is_benchmark "$script"; then
        local known=() file
        for file in "$root"/benchmarks/*.py; do
            ! is_benchmark "$file" || known+=("$(basename -s .py -- "$file")")
        done
        fail "bench needs serve, or the name of a benchmark: ${known[*]}"
    fi
    # Benchmarks import the helpers beside them, which PYTHONSAFEPATH alone would hide.
    export PYTHONPATH="$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
    exec "$python" -m paceline.launcher.start --script "$script" "${@:2}"
}

case "${1:-}" in
    -h | --help | help) usage; exit ;;
esac

if [[ -n "${PACELINE_PYTHON:-}" ]]; then
    check_given_python
    python="$PACELINE_PYTHON"
else
    is_set_up || set_up
    python="$venv/bin/python"
fi

case "${1:-}" in
    setup) ;;
    test) run_tests "${@:2}" ;;
    bench)
        [[ "${2:-}" != serve ]] || exec "$python" -m paceline.launcher.start "$@"
        run_benchmark "${@:2}"
        ;;
    "") exec "$python" -m paceline.launcher.start generate ;;
    *) exec "$python" -m paceline.launcher.start "$@" ;;
esac
