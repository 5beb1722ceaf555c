# shellcheck shell=bash
# What the lab and the tests share: set-up of the controller, long steps with progress, podman's settings.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Everything that the lab makes lies here; `lab/down --purge` removes it.
LAB_STATE=$ROOT/.lab
LAB_NAME=${LAB_NAME:-sglang-lab}
# First three octets of the lab's private bridge.
LAB_SUBNET=${LAB_SUBNET:-10.99.7}
LAB_SUITE=${LAB_SUITE:-bookworm}
# The controller's interpreter: 3.11 or newer, which Debian 12 has.
LAB_PYTHON=${LAB_PYTHON:-/usr/bin/python3}
# An index of PyTorch's CPU builds, asked only when pip's own configuration has none of that release.
LAB_TORCH_INDEX=${LAB_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
export CONTAINERS_CONF=$ROOT/lab/image/containers.conf
export DEBIAN_FRONTEND=noninteractive

say() { printf '\n==> %s\n' "$*"; }
die() { printf '\nFAILED: %s\n' "$*" >&2; exit 1; }

# Packages, containers and the bridge need root: ask for it once, keep the LAB_* settings.
become_root() {
  [ "$(id -u)" = 0 ] && return
  command -v sudo >/dev/null || die "run this as root, or install sudo and run it again"
  exec sudo --preserve-env="$(compgen -e | grep -E '^(LAB_|PIP_|SSL_CERT|CI$)' | paste -sd,)" -- "$@"
}

# step TITLE COMMAND...: run it with its output in a log; a line every ten seconds; the log's end on failure.
step() {
  local title=$1 log start pid seconds
  shift
  mkdir -p "$LAB_STATE/log"
  log=$LAB_STATE/log/$(printf '%s' "$title" | tr -cs 'A-Za-z0-9' '-' | cut -c1-60).log
  start=$SECONDS
  printf '==> %s ...\n' "$title"
  "$@" >"$log" 2>&1 </dev/null &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    seconds=$((SECONDS - start))
    if [ "$seconds" -gt 0 ] && [ $((seconds % 10)) = 0 ]; then
      printf '    %4ds  %s\n' "$seconds" "$(tail -c 400 "$log" | tr '\r' '\n' | grep -v '^ *$' | tail -n 1 | cut -c1-100)"
    fi
    sleep 1
  done
  if ! wait "$pid"; then
    tail -n 25 "$log" >&2
    die "$title: the whole log is in ${log#"$ROOT"/}"
  fi
}

# Install the Debian packages that are missing; none missing means that apt is not asked at all.
ensure_packages() {
  local missing=() name
  for name in "$@"; do
    dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null | grep -qx installed || missing+=("$name")
  done
  [ ${#missing[@]} = 0 ] && return
  step "Update the package lists" apt-get update
  step "Install ${missing[*]}" apt-get install -y --no-install-recommends "${missing[@]}"
}

# ensure_venv SET: the controller's virtual environment holds exactly what requirements/SET.txt pins.
ensure_venv() {
  local lock=$ROOT/requirements/$1.txt stamp
  stamp=$ROOT/.venv/.installed-$1-$(sha256sum "$lock" | cut -c1-16)
  [ -e "$stamp" ] && return
  "$LAB_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "the controller needs Python 3.11 or newer; $LAB_PYTHON is $("$LAB_PYTHON" -V). Set LAB_PYTHON"
  step "Make the controller's virtual environment ($1)" bash -c '
    set -e
    [ -x "$1/.venv/bin/python" ] || "$2" -m venv "$1/.venv"
    "$1/.venv/bin/pip" install --disable-pip-version-check --require-hashes -r "$3"
  ' _ "$ROOT" "$LAB_PYTHON" "$lock"
  touch "$stamp"
}

# The image of a lab host, built again when what it is made from changed.
ensure_image() {
  "$ROOT/lab/image/build" "$1" --current ||
    step "Build the image of a lab host ($1, about a minute)" "$ROOT/lab/image/build" "$1"
}

# wait_for SECONDS WHAT COMMAND...: until the command succeeds.
wait_for() {
  local limit=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" 2>/dev/null; do
    [ "$SECONDS" -lt "$limit" ] || die "$what did not come up"
    sleep 0.3
  done
}

# The lab's files may have been made under sudo: whoever called can read and remove them.
hand_over() {
  [ -n "${SUDO_UID:-}" ] && chown -R "$SUDO_UID:${SUDO_GID:-$SUDO_UID}" "$LAB_STATE" "$ROOT/.venv"
  return 0
}
