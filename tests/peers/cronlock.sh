#!/usr/bin/env bash
# cronlock.sh PORT NAME TTL_MS CMD…: what shell scripts around redis-cli do: SET NX PX, run, delete if still ours.
set -euo pipefail
port=$1 name=$2 ttl=$3
shift 3
own="$$-$RANDOM"
until [ "$(redis-cli -p "$port" SET "$name" "$own" NX PX "$ttl")" = OK ]; do sleep 0.05; done
code=0
"$@" || code=$?
redis-cli -p "$port" EVAL "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end" 1 "$name" "$own" >/dev/null
exit $code
