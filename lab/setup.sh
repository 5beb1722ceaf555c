# shellcheck shell=bash
# Sourced after lib.sh: what the lab needs before its first host, each part made once.

TORCH='torch==2.13.0+cpu'
HUB_ADDRESS=$LAB_SUBNET.2
HUB_PORT=8470

# digest_of PATH...: a short digest of all files below them.
digest_of() { find "$@" -type f ! -name '*.pyc' | LC_ALL=C sort | xargs -d '\n' cat | sha256sum | cut -c1-16; }

# lab_setup SET: packages, controller, image, wheels, checkpoints and hub.
lab_setup() {
  [ "$(uname -m)" = x86_64 ] || die "the lab's engine has wheels for x86-64 only; this machine is $(uname -m)"
  ensure_packages ca-certificates python3-venv openssh-client curl \
    podman runc netavark aardvark-dns iptables mmdebstrap debian-archive-keyring
  ensure_venv "$1"
  ensure_image "$LAB_SUITE"
  lab_torch
  lab_checkpoints
  lab_hub
}

# PyTorch's CPU build: a plain torch from the package index is a CUDA build of several GB.
lab_torch() {
  mkdir -p "$LAB_STATE/wheels"
  ls "$LAB_STATE"/wheels/torch-*+cpu-cp311-*.whl >/dev/null 2>&1 && return
  step "Fetch PyTorch's CPU build (190 MB)" bash -c '
    fetch() {
      "$1/.venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --python-version 3.11 --platform manylinux_2_28_x86_64 --dest "$2/wheels.part" "${@:3}"
    }
    set -e
    rm -rf "$2/wheels.part"
    fetch "$1" "$2" "$3" || fetch "$1" "$2" "$3" --extra-index-url "$4"
    mv "$2"/wheels.part/* "$2/wheels/"
    rmdir "$2/wheels.part"
  ' _ "$ROOT" "$LAB_STATE" "$TORCH" "$LAB_TORCH_INDEX"
}

# One tiny target and drafter a mode, remade when their generator changes.
lab_checkpoints() {
  local stamp mode
  stamp=$LAB_STATE/checkpoints/.made-$(digest_of "$ROOT/lab/checkpoint" "$ROOT/requirements/lab.txt")
  [ -e "$stamp" ] && return
  rm -rf "$LAB_STATE/checkpoints"
  for mode in cycle echo random; do
    step "Make the tiny checkpoint ($mode)" \
      "$ROOT/.venv/bin/python" "$ROOT/lab/checkpoint/make_checkpoint.py" "$LAB_STATE/checkpoints/$mode" --mode "$mode"
  done
  touch "$stamp"
}

# The hub serves the checkpoints; their commit hashes go to the inventory by .lab/revisions.json.
lab_hub() {
  local box=$LAB_NAME-hub mode repos=() inside=() revisions key
  for mode in cycle echo random; do
    repos+=(--repo "lab/Kimi-K2.5-tiny-$mode=$LAB_STATE/checkpoints/$mode/target")
    repos+=(--repo "lab/Kimi-K2.5-tiny-$mode-eagle3=$LAB_STATE/checkpoints/$mode/draft")
    inside+=(--repo "lab/Kimi-K2.5-tiny-$mode=/srv/checkpoints/$mode/target")
    inside+=(--repo "lab/Kimi-K2.5-tiny-$mode-eagle3=/srv/checkpoints/$mode/draft")
  done
  revisions=$("$ROOT/.venv/bin/python" "$ROOT/lab/hub/hub.py" --print-revisions "${repos[@]}")
  printf '%s\n' "$revisions" >"$LAB_STATE/revisions.json"
  key=$(digest_of "$ROOT/lab/hub" "$LAB_STATE/revisions.json")
  if [ "$(podman inspect -f '{{index .Config.Labels "checkout"}} {{index .Config.Labels "key"}}' "$box" 2>/dev/null)" != "$ROOT $key" ]; then
    podman rm -f -t 1 "$box" >/dev/null 2>&1 || true
    podman network exists "$LAB_NAME" || podman network create --subnet "$LAB_SUBNET.0/24" "$LAB_NAME" >/dev/null
    podman run -d --name "$box" --label "checkout=$ROOT" --label "key=$key" --network "$LAB_NAME" --ip "$HUB_ADDRESS" --restart=always \
      --volume "$ROOT/lab/hub:/srv/hub:ro" --volume "$LAB_STATE/checkpoints:/srv/checkpoints:ro" \
      "localhost/$LAB_NAME:$LAB_SUITE" python3 /srv/hub/hub.py --listen "0.0.0.0:$HUB_PORT" "${inside[@]}" >/dev/null
  else
    podman start "$box" >/dev/null
  fi
  wait_for 30 "the lab's hub" curl -fsS -o /dev/null --noproxy '*' "http://$HUB_ADDRESS:$HUB_PORT/_log"
}
