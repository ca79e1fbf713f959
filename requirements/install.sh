# Brings the virtual environment up to date: `PYTHON=… VENV=… sh requirements/install.sh run [test]`.
# Quick when nothing has changed; each lock is installed again only when its content differs.
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
        fail "$PYTHON is older than 3.11. Install Python 3.11, or say which: make PYTHON=/path/to/python3.11 …"
    echo "make: creating $VENV"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV" || fail "venv does not work. Install it (Debian: python3-venv)."
fi

for name in "$@"; do
    lock="requirements/$name.txt"
    stamp="$VENV/.installed-$name"
    if ! cmp -s "$lock" "$stamp"; then
        "$python" requirements/progress.py "$lock" ||
            fail "pip could not install $lock (its lines above say why). See that the package index is reachable."
        cp "$lock" "$stamp"
    fi
done

# Stubs of the engines' protocol, and the product itself with its `localai-cluster-worker`.
"$python" -m localai_cluster.rpc.build
if ! cmp -s pyproject.toml "$VENV/.installed-project" || [ ! -x "$VENV/bin/localai-cluster-worker" ]; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index -e . ||
        fail "pip could not install the product itself (its lines above say why)."
    cp pyproject.toml "$VENV/.installed-project"
fi
