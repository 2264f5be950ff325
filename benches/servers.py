"""The backends of the measurements: servers of our own on free ports, what others run on them, and what is aimed at.

Their data is in memory where that is possible, because what is measured is not the disk.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import ExitStack, contextmanager
from glob import glob
from itertools import count
from pathlib import Path

import monitor
import psycopg
import pymysql
from report import Aim
from side_by_side import BIN, ENV, ROOT, Tool, dlock_on, until

PEERS = ROOT / "tests/peers"
TTL = "30000"


HOME = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
PREFIX = "dlock-bench."


def sweep():
    """Removes what measurements left that were killed; their servers have ended with them."""
    for directory in Path(HOME).glob(f"{PREFIX}*.*"):
        if not Path("/proc", directory.name.split(".")[1]).exists():
            shutil.rmtree(directory, ignore_errors=True)


def free_port():
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return str(any_port.getsockname()[1])


class Backend:
    """One backend; `floor` is the least that has to be done on it, `peers` are what others do."""

    floor = Tool("floor: spawn", (str(BIN / "floor"), "spawn"))
    # What `run -- true` and a hand-over (median, ms) should cost.
    run_aim = hand_over_aim = None
    # How often `run -- true` is measured: so often that the ratios of two whole measurements, not their times, agree
    # within about a tenth.
    rounds = 300
    # How programs, Debian packages and Python clients that take part tell their versions.
    programs, packages, clients = {}, {}, []
    # What `requests` counts.
    counted = None

    def __init__(self, stack):
        self.stack = stack
        self.directory = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}.", dir=HOME)
        stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self.begin()
        self.dlock = dlock_on(self.url)

    def daemon(self, *command, user=None, end=signal.SIGKILL):
        """Starts a server that ends with us, however we end."""
        with open(f"{self.directory}/log", "a") as log:
            command = ["setpriv", "--pdeathsig", end.name[3:], *command]
            server = subprocess.Popen(command, stdout=log, stderr=log, user=user, cwd="/", env=ENV)
        self.stack.callback(server.wait)
        self.stack.callback(server.send_signal, end)

    def python(self, script, *args):
        return (sys.executable, str(PEERS / script), *args, "NAME", TTL)

    @contextmanager
    def counting(self):
        """A function that says how many requests there were, as the server has counted them."""
        first, before = self.requests(), self.requests()
        own, asked = before - first, count(1)
        yield lambda: self.requests() - before - own * next(asked)


class Files(Backend):
    name = "file"
    rounds = 1000
    programs = {"flock": ["flock", "--version"], "GNU parallel": ["parallel", "--version"]}
    packages = {"setlock (daemontools)": "daemontools"}
    run_aim = Aim(1.4, "flock")
    hand_over_aim = Aim(1.5, "flock")

    def begin(self):
        locks = f"{self.directory}/locks"
        os.mkdir(locks, 0o700)
        self.url = f"file://{locks}"
        self.floor = Tool("floor: flock + spawn", (str(BIN / "floor"), "flock", f"{locks}/floor"))
        flock, setlock = f"{locks}/NAME.flock", f"{locks}/NAME.setlock"
        self.peers = [
            Tool("flock", ("flock", flock), waiting=self.blocked_on(flock)),
            Tool("setlock", ("setlock", setlock), waiting=self.blocked_on(setlock)),
            Tool("GNU sem", ("sem", "--fg", "--id", f"{Path(self.directory).name}-NAME"), every=25),
        ]

    @staticmethod
    def blocked_on(pattern):
        def waiting(lock):
            inode = os.stat(pattern.replace("NAME", lock)).st_ino
            with open("/proc/locks") as locks:
                return sum("->" in line and line.split()[-3].endswith(f":{inode}") for line in locks)

        return waiting

    # No server, no requests.
    counting = None


class Redis(Backend):
    name = "redis"
    rounds = 600
    programs = {"Redis": ["redis-server", "--version"]}
    clients = ["redis"]
    counted = "commands that clients sent, by MONITOR"
    run_aim = Aim(1.9, "floor: Redis + spawn")
    hand_over_aim = Aim(2.5)

    def begin(self):
        self.port = self.start_node()
        self.url = f"redis://127.0.0.1:{self.port}"
        self.floor = Tool("floor: Redis + spawn", (str(BIN / "floor"), "redis", self.port, "floor:NAME"))
        self.peers = [
            Tool("redis-cli wrapper", (str(PEERS / "cronlock.sh"), self.port, "cli:NAME", TTL), every=5),
            Tool("redis-py", self.python("redis_py.py", self.port), every=20),
        ]

    def start_node(self):
        port = free_port()
        self.daemon("redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", self.directory)
        until(lambda: monitor.ask(port, "PING") == "PONG")
        return port

    @contextmanager
    def counting(self):
        with monitor.counting(self.port, self.directory) as requests:
            yield requests


class Redlock(Redis):
    name = "redlock"
    rounds = 400
    clients = ["redlock-py"]
    counted = "the same, of all five nodes together"
    run_aim = Aim(2.0, "dlock on one Redis")
    hand_over_aim = None

    def begin(self):
        self.ports = [self.start_node() for _ in range(5)]
        self.url = "redlock://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)
        one = dlock_on(f"redis://127.0.0.1:{self.ports[0]}")
        self.peers = [
            Tool("dlock on one Redis", one.before),
            Tool("redlock-py", self.python("redlock_py.py", ",".join(self.ports)), every=20),
        ]

    @contextmanager
    def counting(self):
        """On all nodes together."""
        with ExitStack() as stack:
            counts = [stack.enter_context(monitor.counting(port, self.directory)) for port in self.ports]
            yield lambda: sum(requests() for requests in counts)


class Etcd(Backend):
    name = "etcd"
    programs = {"etcd": ["etcd", "--version"], "etcdctl": ["etcdctl", "version"]}
    counted = "gRPC messages received"
    run_aim = Aim(0.25, "etcdctl lock")
    hand_over_aim = Aim(1.2, "etcdctl lock")

    def begin(self):
        self.client, peer = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.url = f"etcd://{self.client}"
        self.daemon(
            *("etcd", "--data-dir", f"{self.directory}/data", "--initial-cluster", f"default=http://{peer}"),
            *("--listen-client-urls", f"http://{self.client}", "--advertise-client-urls", f"http://{self.client}"),
            *("--listen-peer-urls", f"http://{peer}", "--initial-advertise-peer-urls", f"http://{peer}"),
        )
        until(lambda: self.etcdctl("get", "x").returncode == 0)
        lock = ("etcdctl", f"--endpoints={self.client}", "lock", "etcdctl/NAME", "--")
        self.peers = [Tool("etcdctl lock", lock, every=2, waiting=self.waiting)]

    def etcdctl(self, *args):
        return subprocess.run(["etcdctl", f"--endpoints={self.client}", *args], env=ENV, capture_output=True, text=True)

    def waiting(self, lock):
        return len(self.etcdctl("get", "--prefix", "--keys-only", f"etcdctl/{lock}/").stdout.split()) - 1

    def requests(self):
        """Messages, not calls: one call streams all renewals, and it is counted when it ends."""
        with urllib.request.urlopen(f"http://{self.client}/metrics") as page:
            lines = page.read().decode().splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith("grpc_server_msg_received_total")))


class ZooKeeper(Backend):
    name = "zookeeper"
    packages = {"ZooKeeper": "zookeeper"}
    clients = ["kazoo"]
    counted = "packets received"
    run_aim = Aim(0.08, "kazoo")
    hand_over_aim = Aim(0.6, "kazoo")

    def begin(self):
        self.port = free_port()
        self.url = f"zookeeper://127.0.0.1:{self.port}"
        config = Path(self.directory, "zoo.cfg")
        config.write_text(
            f"tickTime=2000\ndataDir={self.directory}/data\nclientPort={self.port}\nmaxClientCnxns=0\n"
            "4lw.commands.whitelist=mntr\nadmin.enableServer=false\n"
        )
        path = ":".join(glob("/usr/share/java/*.jar"))
        self.daemon("java", "-cp", path, "org.apache.zookeeper.server.quorum.QuorumPeerMain", str(config))
        until(self.is_up)
        self.peers = [Tool("kazoo", self.python("kazoo_lock.py", self.port), every=10, waiting=self.waiting)]

    def figure(self, name):
        with socket.create_connection(("127.0.0.1", int(self.port)), 2) as connection:
            connection.sendall(b"mntr")
            text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        return int(dict(line.split("\t")[:2] for line in text.splitlines() if "\t" in line)[name])

    def is_up(self):
        try:
            return self.figure("zk_packets_received") >= 0
        except (OSError, KeyError):
            return False

    def waiting(self, lock):
        """Every contender has one ephemeral node, and a tool measures one lock at a time."""
        return self.figure("zk_ephemerals_count") - 1

    def requests(self):
        return self.figure("zk_packets_received")


class Postgres(Backend):
    name = "postgres"
    programs = {"PostgreSQL": ["psql", "--version"]}
    clients = ["psycopg"]
    counted = "statements sent, by pg_stat_statements"
    run_aim = Aim(0.07, "psycopg")
    hand_over_aim = Aim(4.0)
    # More than a thousand waiters, each with a connection of its own; the default of 100 is not enough for 256.
    connections = 2100

    def begin(self):
        self.port = free_port()
        self.url = f"postgres://postgres@127.0.0.1:{self.port}/postgres"
        user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        shutil.chown(self.directory, user)
        data, programs = f"{self.directory}/data", sorted(glob("/usr/lib/postgresql/*/bin"))[-1]
        initdb = [f"{programs}/initdb", "--no-sync", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C"]
        subprocess.run([*initdb, "-D", data], user=user, cwd="/", stdout=subprocess.DEVNULL, check=True)
        settings = {
            "port": self.port,
            "unix_socket_directories": self.directory,
            "max_connections": self.connections,
            "shared_preload_libraries": "pg_stat_statements",
            "dynamic_shared_memory_type": "mmap",
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        self.daemon(f"{programs}/postgres", "-D", data, *words, user=user, end=signal.SIGQUIT)
        until(self.is_up)
        self.sql("CREATE EXTENSION pg_stat_statements")
        psql = (str(PEERS / "psql_lock.sh"), self.port, "psql:NAME", TTL)
        self.peers = [
            Tool("psql wrapper", psql, every=5, waiting=self.waiting),
            Tool("psycopg", self.python("psycopg_lock.py", self.port), every=10, waiting=self.waiting),
        ]

    def sql(self, text):
        with psycopg.connect(self.url, autocommit=True) as connection:
            answer = connection.execute(text)
            return answer.fetchone()[0] if answer.description else None

    def is_up(self):
        try:
            return self.sql("SELECT 1") == 1
        except psycopg.OperationalError:
            return False

    def waiting(self, lock):
        return self.sql("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND NOT granted")

    def requests(self):
        """Statements that clients sent; what functions did inside is not counted."""
        return int(self.sql("SELECT sum(calls) FROM pg_stat_statements"))


class Mysql(Backend):
    name = "mysql"
    programs = {"MariaDB": ["mariadbd", "--version"]}
    clients = ["PyMySQL"]
    counted = "statements sent, by Questions"
    run_aim = Aim(0.1, "PyMySQL")
    hand_over_aim = Aim(4.0)
    connections = 2100

    def begin(self):
        self.port = free_port()
        self.socket = f"{self.directory}/socket"
        self.url = f"mysql://root@127.0.0.1:{self.port}/jobs"
        user = "mysql" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        shutil.chown(self.directory, user)
        data = f"{self.directory}/data"
        install = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--skip-test-db"]
        # A server that starts removes what others have in its directory for temporary tables.
        install += ["--auth-root-authentication-method=normal", f"--tmpdir={self.directory}"]
        subprocess.run(install, user=user, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        self.daemon(
            *("mariadbd", "--no-defaults", f"--datadir={data}", f"--socket={self.socket}", f"--port={self.port}"),
            *("--bind-address=127.0.0.1", "--skip-name-resolve", f"--pid-file={self.directory}/pid"),
            *(f"--max-connections={self.connections}", f"--tmpdir={self.directory}"),
            user=user,
        )
        until(self.is_up)
        self.sql("CREATE DATABASE jobs")
        wrapper = (str(PEERS / "mysql_lock.sh"), self.port, "mysql:NAME", TTL)
        self.peers = [
            Tool("mysql wrapper", wrapper, every=5, waiting=self.waiting),
            Tool("PyMySQL", self.python("pymysql_lock.py", self.port), every=10, waiting=self.waiting),
        ]

    def sql(self, text):
        with pymysql.connect(unix_socket=self.socket, user="root", autocommit=True) as connection:
            with connection.cursor() as cursor:
                cursor.execute(text)
                row = cursor.fetchone()
        return row and row[-1]

    def is_up(self):
        try:
            return self.sql("SELECT 1") == 1
        except pymysql.OperationalError:
            return False

    def waiting(self, lock):
        return self.sql("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE = 'User lock'")

    def requests(self):
        """Statements that clients sent; what procedures did inside is not counted."""
        return int(self.sql("SHOW GLOBAL STATUS LIKE 'Questions'"))


ALL = [Files, Redis, Redlock, Etcd, ZooKeeper, Postgres, Mysql]
