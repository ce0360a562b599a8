#!/usr/bin/env bash
# What both guests run: the second one serves, the first one runs the tests against it.
#   guest.sh PYTHON [PYTEST ARGUMENT...]
set -uo pipefail
here=$(dirname "$0")
if [ "$NODE" -eq 1 ]; then
  "$1" "$here/guest_agent.py" > /out/agent.log 2>&1
  exit
fi
# Plugins that are not needed take as long to import as the tests themselves.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
"$1" -m pytest -p no:cacheprovider -p pytest_asyncio.plugin -p pytest_timeout --timeout=60 --require-all -v --color=no \
  --durations=12 "${@:2}" 2>&1
