#!/usr/bin/env bash
# mysql_lock.sh PORT NAME TTL_MS CMD…: what shell scripts around the mysql client do: GET_LOCK for as long as its session
# lives.
set -euo pipefail
port=$1 name=$2
shift 3
coproc DB { exec mariadb --no-defaults -BNn -h 127.0.0.1 -P "$port" -u root; }
mysql=$DB_PID
echo "SELECT GET_LOCK(LEFT(SHA1('$name'), 40), 1000000);" >&"${DB[1]}"
read -r <&"${DB[0]}"
code=0
"$@" || code=$?
eval "exec ${DB[1]}>&-"
wait "$mysql"
exit $code
