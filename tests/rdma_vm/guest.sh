#!/usr/bin/env bash
# What both guests run: the second one serves, the first one runs the tests against it. In the checkout's root.
#   guest.sh PYTHON [PYTEST ARGUMENT...]
set -uo pipefail
if [ "$NODE" -eq 1 ]; then
  "$1" -m tests.rdma_vm.guest_agent > /out/agent.log 2>&1
  exit
fi
# Plugins that are not needed take as long to import as the tests themselves.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
"$1" -m pytest -p no:cacheprovider -p pytest_asyncio.plugin -p pytest_timeout --timeout=60 --require-all -v --color=no \
  --durations=12 "${@:2}" 2>&1
