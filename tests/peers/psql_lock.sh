#!/usr/bin/env bash
# psql_lock.sh PORT NAME TTL_MS CMD…: what shell scripts around psql do: an advisory lock for as long as its session lives.
set -euo pipefail
port=$1 name=$2
shift 3
coproc DB { exec psql -XAtq -v ON_ERROR_STOP=1 -v name="$name" -h 127.0.0.1 -p "$port" -U postgres postgres; }
psql=$DB_PID
echo "SELECT pg_advisory_lock(hashtext(:'name'));" >&"${DB[1]}"
read -r <&"${DB[0]}"
code=0
"$@" || code=$?
eval "exec ${DB[1]}>&-"
wait "$psql"
exit $code
