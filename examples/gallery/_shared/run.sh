#!/bin/sh
# Starts this engine: run.sh --addr HOST:PORT
# Needs no environment but LOCALAI_GRPC_AUTH_TOKEN and a plain PATH. The wheels in lib/ fit one Python version
# only: the interpreter they were installed with is tried first, then what PATH offers of that version.
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P) || exit 1
version=$(cat "$here/python-version") || exit 1

# One request runs on one core, so requests side by side share a machine without fighting for threads.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-$OMP_NUM_THREADS}"

fits() {
    "$1" -I -S -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$version" 2>/dev/null
}

for python in "$(cat "$here/python-path")" "python$version" python3; do
    if fits "$python"; then
        # exec keeps the process id that the worker watches.
        exec "$python" -B -E -s "$here/server.py" "$@"
    fi
done
echo "This engine needs Python $version: put python$version on PATH, or assemble the gallery again." >&2
exit 1
