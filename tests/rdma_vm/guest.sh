#!/usr/bin/env bash
# What both guests run: the second one serves, the first one runs the tests and then ends the second.
#   guest.sh PYTHON [PYTEST ARGUMENT...]
set -uo pipefail
here=$(dirname "$0")
if [ "$NODE" -eq 1 ]; then
  "$1" "$here/guest_agent.py" > /out/agent.log 2>&1
  exit
fi
until (exec 3<> /dev/tcp/10.77.2.2/7007) 2>/dev/null; do :; done
"$1" -m pytest -p no:cacheprovider --timeout=60 -q "$here/guest_rdma.py" "${@:2}" 2>&1
