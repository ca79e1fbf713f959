# Installs the LocalAI Cluster worker in a folder of its own and starts it in the foreground. Running it again
# upgrades the worker and restarts it. The lines above name the package that the server offers.
set -eu

say() { printf 'localai-cluster: %s\n' "$1"; }
fail() {
  printf 'localai-cluster: %s\n' "$1" >&2
  exit 1
}

check_settings() {
  case ${LOCALAI_REGISTER_TO:-} in
    http://* | https://*) ;;
    *) fail 'LOCALAI_REGISTER_TO is not the URL of a server. Run the whole line that the server showed.' ;;
  esac
  [ -n "${LOCALAI_REGISTRATION_TOKEN:-}" ] || fail 'LOCALAI_REGISTRATION_TOKEN is not set. Run the whole line that the server showed.'
  [ -n "$WHEEL" ] || fail "$NO_WHEEL"
}

find_python() {
  for name in python3 python3.14 python3.13 python3.12 python3.11; do
    python=$(command -v "$name" 2>/dev/null) || continue
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then return; fi
  done
  fail 'Python 3.11 or later is needed; this machine has none. Install it, then run the line again.'
}

# The token goes to curl by a pipe: other users of this machine can read arguments.
fetch_wheel() {
  mkdir -p "$home/download"
  quoted=$(printf '%s' "$LOCALAI_REGISTRATION_TOKEN" | sed 's/[\\"]/\\&/g')
  status=$(printf 'header = "Authorization: Bearer %s"\n' "$quoted" |
    curl -gsS -K - -o "$home/download/part" -w '%{http_code}' "${LOCALAI_REGISTER_TO%/}/join/wheel") ||
    fail "cannot reach $LOCALAI_REGISTER_TO"
  [ "$status" = 200 ] || fail "$LOCALAI_REGISTER_TO answered $status: $(head -c 300 "$home/download/part")"
  found=$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$home/download/part")
  [ "$found" = "$SHA256" ] || fail 'the package is not the one that was announced; run the line again'
  mv -f "$home/download/part" "$home/download/$WHEEL"
}

arguments_of() {
  if [ -r "/proc/$1/cmdline" ]; then tr '\0' ' ' <"/proc/$1/cmdline"; else ps -p "$1" -o args= 2>/dev/null || true; fi
}

# Stops the worker of this folder, if one runs. The number may belong to another program by now.
stop_running() {
  pid=$(cat "$home/worker.pid" 2>/dev/null) || return 0
  case $pid in '' | *[!0-9]*) return 0 ;; esac
  case $(arguments_of "$pid") in *"$home/venv/"*) ;; *) return 0 ;; esac
  say 'stopping the running worker'
  kill -TERM "$pid" 2>/dev/null || return 0
  waited=0
  while kill -0 "$pid" 2>/dev/null; do
    [ "$waited" -lt 120 ] || fail "the running worker (process $pid) does not stop; stop it, then run the line again"
    waited=$((waited + 1))
    sleep 1
  done
}

pip_install() {
  "$home/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@" ||
    fail 'the package could not be installed; see the output above'
}

install_wheel() {
  if ! "$home/venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -f "$home/installed"
    "$python" -m venv --clear "$home/venv" ||
      fail 'no virtual environment can be made. On Debian or Ubuntu install python3-venv, then run the line again.'
  fi
  if [ "$(cat "$home/installed" 2>/dev/null || true)" = "$SHA256" ]; then return; fi
  rm -f "$home/installed"
  say "installing $WHEEL (SHA-256 $SHA256)"
  if [ -n "$REQUIREMENTS" ]; then
    printf '%s' "$REQUIREMENTS" >"$home/download/requirements.txt"
    pip_install --no-deps --require-hashes --requirement "$home/download/requirements.txt"
    pip_install --no-deps --force-reinstall "$home/download/$WHEEL"
  else
    say 'the package is of an earlier version: what it needs is installed without comparing hashes'
    pip_install --no-deps --force-reinstall "$home/download/$WHEEL"
    pip_install "$home/download/$WHEEL"
  fi
  printf '%s\n' "$SHA256" >"$home/installed"
}

main() {
  check_settings
  find_python
  home=${LOCALAI_WORKER_HOME:-${HOME:?}/localai-cluster-worker}
  (umask 077 && mkdir -p "$home") || fail "cannot make the folder $home"
  cd "$home"
  home=$(pwd)
  fetch_wheel
  # Installed before the running worker is stopped: if that fails, the machine goes on as it was.
  install_wheel
  stop_running
  export LOCALAI_REGISTER_TO LOCALAI_REGISTRATION_TOKEN
  export LOCALAI_BACKENDS_PATH="${LOCALAI_BACKENDS_PATH:-$home/backends}"
  export LOCALAI_MODELS_PATH="${LOCALAI_MODELS_PATH:-$home/models}"
  export LOCALAI_WORKER_DATA_DIR="${LOCALAI_WORKER_DATA_DIR:-$home/data}"
  export LOCALAI_WORKER_FIND_PORTS="${LOCALAI_WORKER_FIND_PORTS:-true}"
  mkdir -p "$LOCALAI_BACKENDS_PATH" "$LOCALAI_MODELS_PATH"
  (umask 077 && mkdir -p "$LOCALAI_WORKER_DATA_DIR")
  printf '%s\n' "$$" >"$home/worker.pid"
  say "starting the worker in $home"
  exec "$home/venv/bin/localai-cluster-worker" </dev/null
}

main
