# Updates the virtual environment: `PYTHON=… VENV=… sh requirements/install.sh run [test]`.
# A lock file is installed again only if its content has changed.
set -eu

root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
python="$VENV/bin/python"

fail() {
    echo "make: $1" >&2
    exit 1
}

[ -n "$PYTHON" ] || fail "Python is not installed. Install Python 3.11 with venv."
if ! "$python" -c 'import pip' 2>/dev/null; then
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$PYTHON is older than 3.11. Install Python 3.11, or select one: make PYTHON=/path/to/python3.11 …"
    echo "make: creating $VENV"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV" || fail "venv is not available. Install it (Debian: python3-venv)."
fi

for name in "$@"; do
    lock="requirements/$name.txt"
    stamp="$VENV/.installed-$name"
    if ! cmp -s "$lock" "$stamp"; then
        "$python" requirements/progress.py "$lock" ||
            fail "pip could not install $lock (see its output above). Check that the package index is reachable."
        cp "$lock" "$stamp"
    fi
done

# The gRPC stubs, and the product itself with its command `localai-cluster-worker`.
"$python" -m localai_cluster.rpc.build
if ! cmp -s pyproject.toml "$VENV/.installed-project" || [ ! -x "$VENV/bin/localai-cluster-worker" ]; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index -e . ||
        fail "pip could not install the product itself (see its output above)."
    cp pyproject.toml "$VENV/.installed-project"
fi
