#!/usr/bin/env bash
# Makes the virtual environment (.venv, or $VENV) that everything here runs in.
#
# One `pip install -r requirements.txt` cannot do it: Horovod is compiled against the
# TensorFlow and Open MPI that must be there first, and its binary remembers where
# they lie, so it is built anew for each environment. Needs no root.
#
#   ./install.sh            set up, or mend, or do nothing when all is well
#   VENV=/opt/venv PYTHON=python3.12 ./install.sh
#   GPU=1 ./install.sh      TensorFlow with CUDA, Horovod with NCCL: needs both toolkits
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here"
name=${VENV:-.venv}
venv=$(realpath -m -- "$name")
gpu=${GPU:-0}
needed_mb=$((gpu ? 9000 : 3000)) # what remains, the build and pip's cache
requirements=(requirements*.txt) # an image leaves those of the tests out

say() { printf 'install: %s\n' "$*"; }
fail() { printf 'install: error: %s\n' "$*" >&2; exit 1; }

find_python() {
    local python
    for python in ${PYTHON:-python3.11 python3.12 python3.10 python3}; do
        if "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' \
            2>/dev/null; then
            printf '%s' "$python"
            return
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        fail "PYTHON=$PYTHON is not a Python 3.10, 3.11 or 3.12"
    fi
    fail "Python 3.10, 3.11 or 3.12 is needed and none was found" \
        "(Debian, Ubuntu: apt install python3 python3-venv; or set PYTHON)"
}

check_machine() {
    case "$(uname -s) $(uname -m)" in
        "Linux x86_64" | "Linux aarch64") ;;
        *) fail "Linux on x86_64 or aarch64 is needed, found $(uname -sm)" ;;
    esac
    command -v make >/dev/null || fail "make is needed (Debian, Ubuntu: apt install make)"
    command -v "${CXX:-g++}" >/dev/null \
        || fail "a C++17 compiler is needed, ${CXX:-g++} was not found (Debian, Ubuntu: apt install g++)"
    echo 'int main() { if constexpr (true) return 0; }' \
        | "${CXX:-g++}" -std=c++17 -x c++ -fsyntax-only - 2>/dev/null \
        || fail "a C++17 compiler is needed, ${CXX:-g++} cannot compile C++17 (Debian, Ubuntu: apt install g++)"
    local free_mb
    free_mb=$(df -Pm "$(dirname "$venv")" | awk 'NR == 2 { print $4 }')
    [ "$free_mb" -ge "$needed_mb" ] \
        || fail "$needed_mb MB of disk are needed for $name, $free_mb MB are free"
}

# What the environment was made from: any change of it makes a new one.
recipe() {
    { cat install.sh "${requirements[@]}"; echo "$venv $gpu"; } | sha256sum | cut -d' ' -f1
}

# Every file of every package is there with its size: a second or less.
intact() {
    [ "$(cat "$venv/.installed" 2>/dev/null)" = "$(recipe)" ] || return 1
    "$venv/bin/python" - 2>/dev/null <<'PYTHON'
import csv, pathlib, sys, sysconfig
site = pathlib.Path(sysconfig.get_path("purelib"))
records = list(site.glob("*.dist-info/RECORD"))
for record in records:
    for name, _, size in csv.reader(record.open()):
        if "__pycache__" in name:  # some wheels bring these, and Python rewrites them
            continue
        if size and (site / name).stat().st_size != int(size):
            sys.exit(f"{name} is damaged")
sys.exit(not records)
PYTHON
}

make_venv() {
    local python=$1
    if ! "$python" -m venv --clear "$venv" >"$log" 2>&1; then
        # Debian splits ensurepip off; any pip from 22.3 on can bring the first one.
        "$python" -m venv --clear --without-pip "$venv" >"$log" 2>&1 \
            && "$python" -m pip --python "$venv/bin/python" install -q pip >>"$log" 2>&1 \
            || fail "$python can make no virtual environment (Debian, Ubuntu: apt install python3-venv); see $log"
    fi
    : >"$venv/.made-by-install.sh"
}

# All but Horovod; with GPU=1 the TensorFlow that brings CUDA's libraries.
without_horovod() {
    cat "${requirements[@]}" | sed -E '/^horovod/d' | if [ "$gpu" = 0 ]; then cat; else
        sed -E '/^tensorflow==/d; s/^tensorflow-cpu(==[^;]+).*/tensorflow[and-cuda]\1/'
    fi
}

# Runs a command with its output in the log; shows a line of progress now and then.
run() {
    local what=$1 begin=$SECONDS shown=$SECONDS done_percent
    shift
    say "$what"
    "$@" >>"$log" 2>&1 &
    local pid=$!
    trap 'kill "$pid" 2>/dev/null' EXIT
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        if [ $((SECONDS - shown)) -ge 15 ]; then
            shown=$SECONDS
            done_percent=$(grep -oE '^ *\[ *[0-9]+%\]' "$log" | tail -n 1 | tr -d '[] ' || true)
            say "  $((SECONDS - begin)) s ${done_percent:+, $done_percent compiled}"
        fi
    done
    trap - EXIT
    if ! wait "$pid"; then
        tail -n 20 "$log" >&2
        fail "$what failed; the lines above are the end of $log"
    fi
}

check_build() {
    say "checking Horovod"
    local build
    build=$(TF_CPP_MIN_LOG_LEVEL=3 horovodrun --check-build 2>>"$log") \
        || fail "horovodrun --check-build failed; see $log"
    local parts=(TensorFlow MPI Gloo)
    [ "$gpu" = 0 ] || parts+=(NCCL)
    for part in "${parts[@]}"; do
        grep -qF "[X] $part" <<<"$build" \
            || fail "Horovod was built without $part: see $log"
    done
    horovodrun -np 2 python -c 'import horovod.tensorflow as hvd; hvd.init(); assert hvd.size() == 2' \
        >>"$log" 2>&1 || fail "hvd.init() failed on two ranks; see $log"
}

case $gpu in 0 | 1) ;; *) fail "GPU: expected 0 or 1, found $gpu" ;; esac
# The parameter server's updates: a second, so not part of the recipe.
compile_optimizer() {
    local source=replica/optimizer.cpp library=$venv/lib/replica_optimizer.so
    [ "$library" -nt "$source" ] && return
    "${CXX:-g++}" -O3 -fno-math-errno -fno-trapping-math -ffp-contract=off -shared -fPIC \
        -o "$library.new" "$source" || fail "${CXX:-g++} could not compile $source"
    mv "$library.new" "$library"
}

exec 9>"$venv.lock" # two at once: the second waits, then finds all done
command -v flock >/dev/null && flock 9
if intact; then
    compile_optimizer
    say "$name is complete"
    exit 0
fi
if [ -e "$venv" ] && [ ! -e "$venv/.made-by-install.sh" ] \
    && [ -n "$(ls -A "$venv")" ]; then
    fail "$name exists and install.sh did not make it: name another place, VENV=..."
fi
[ ! -e "$venv" ] || say "$name is incomplete or out of date: making it anew"
python=$(find_python)
check_machine
log=$venv.log
say "$name with $("$python" --version), about 3 to 7 minutes"
make_venv "$python"
# mpirun refuses root, as in a container, unless these are set (horovodrun sets them),
# and looks for ssh even to start processes here only, unless it is told of none.
# horovodrun loads TensorFlow to look at it, which would tell of the CPU.
cat >>"$venv/bin/activate" <<'ACTIVATE'
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
command -v ssh >/dev/null || export OMPI_MCA_plm_rsh_agent=
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
ACTIVATE
# shellcheck disable=SC1091
. "$venv/bin/activate"
unset PYTHONPATH PYTHONHOME

run "pip, TensorFlow, Open MPI and mpi4py" \
    pip install -v --no-warn-script-location -r <(without_horovod) \
    'setuptools<81' wheel packaging 'cmake==3.27.*'
[ "$gpu" = 0 ] || export HOROVOD_GPU_OPERATIONS=NCCL
run "Horovod, from source" env HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_MPI=1 \
    HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
    pip install -v --no-build-isolation --no-cache-dir "$(grep '^horovod' requirements.txt)"
check_build
compile_optimizer
recipe >"$venv/.installed"
say "done: . $name/bin/activate"
