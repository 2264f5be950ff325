"""Fills a backend with very many locks: copies of two that dlock itself left, a tenth of them held, the others with a
full history of runs."""

import base64
import glob
import http.client
import json
import os
import shutil

import monitor
from kazoo.client import KazooClient
from side_by_side import DLOCK, Tool

RELEASED, HELD = "released", "held"
RUNS = 20
COMMAND = ("/bin/echo", "a command line of the usual length")


def source(number):
    """Which of the two locks to copy."""
    return HELD if number % 10 == 0 else RELEASED


class Filling:
    """Knows what dlock left on a backend, and copies it."""

    def __init__(self, backend):
        self.backend = backend
        backend.dlock.run(RELEASED, *COMMAND)
        self.after_one_run = self.size()
        for _ in range(RUNS - 1):
            backend.dlock.run(RELEASED, *COMMAND)
        self.after_all_runs = self.size()
        acquire = (DLOCK, "acquire", "--backend", backend.url, "--ttl", "6h", "--name", "NAME")
        Tool("dlock acquire", acquire).run(HELD)
        self.note()

    def note(self):
        """Looks at what dlock left, where the server does not copy it by itself."""

    def size(self):
        """What the released lock takes on the server, in bytes, as the server counts."""
        raise NotImplementedError


class Files(Filling):
    def size(self):
        directory = self.backend.url.removeprefix("file://")
        return sum(os.stat(file).st_size for file in glob.glob(f"{directory}/{RELEASED}.d/*"))

    def note(self):
        self.directory = self.backend.url.removeprefix("file://")
        self.backend.stack.callback(self.end_hold)

    def end_hold(self):
        """A held lock has a process that keeps it, which goes when the lock does."""
        for file in glob.glob(f"{self.directory}/{HELD}.d/holder.*"):
            os.unlink(file)

    def fill(self, numbers):
        for number in numbers:
            base, copy = f"{self.directory}/{source(number)}", f"{self.directory}/lock-{number}"
            open(f"{copy}.lock", "x").close()
            os.mkdir(f"{copy}.d", 0o700)
            for entry in os.scandir(f"{base}.d"):
                target = f"{copy}.d/{entry.name}"
                if entry.name.startswith("holder."):
                    with open(entry.path) as file, open(target, "x") as out:
                        json.dump({**json.load(file), "inode": os.stat(f"{copy}.lock").st_ino}, out)
                else:
                    shutil.copyfile(entry.path, target)


class Redis(Filling):
    copy = f"""
        local keys = {{}}
        for _, lock in ipairs({{ '{RELEASED}', '{HELD}' }}) do keys[lock] = redis.call('KEYS', '*dlock:' .. lock .. '*') end
        for n = ARGV[1], ARGV[2] do
            local lock = n % 10 == 0 and '{HELD}' or '{RELEASED}'
            for _, key in ipairs(keys[lock]) do
                redis.call('COPY', key, (key:gsub('dlock:' .. lock, 'dlock:lock-' .. n)))
            end
        end"""

    def size(self):
        keys = f"""
            local size = 0
            for _, key in ipairs(redis.call('KEYS', '*dlock:{RELEASED}*')) do
                size = size + redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 0)
            end
            return size"""
        return int(monitor.ask(self.backend.port, "EVAL", keys, "0"))

    def fill(self, numbers):
        answer = monitor.ask(self.backend.port, "EVAL", self.copy, "0", str(numbers.start), str(numbers.stop - 1))
        assert not answer, answer


class Etcd(Filling):
    def ask(self, path, body):
        self.connection.request("POST", f"/v3/{path}", json.dumps(body))
        answer = json.load(self.connection.getresponse())
        assert "error" not in answer, answer
        return answer

    def keys_of(self, lock):
        self.connection = http.client.HTTPConnection(self.backend.client)
        encode = lambda text: base64.b64encode(text.encode()).decode()
        everything = self.ask("kv/range", {"key": encode("dlock"), "range_end": encode("dlocl")})["kvs"]
        decoded = [(base64.b64decode(one["key"]).decode(), one) for one in everything]
        return [(key, one) for key, one in decoded if lock in key.split("/")]

    def size(self):
        return sum(len(key) + len(base64.b64decode(one["value"])) for key, one in self.keys_of(RELEASED))

    def note(self):
        self.keys = {lock: self.keys_of(lock) for lock in (RELEASED, HELD)}

    def fill(self, numbers):
        puts = []
        for number in numbers:
            lock = source(number)
            for key, one in self.keys[lock]:
                copy = "/".join(f"lock-{number}" if part == lock else part for part in key.split("/"))
                put = {"key": base64.b64encode(copy.encode()).decode(), "value": one["value"]}
                puts.append({"requestPut": {**put, "lease": one.get("lease", "0")}})
        for begin in range(0, len(puts), 128):
            self.ask("kv/txn", {"success": puts[begin : begin + 128]})


class ZooKeeper(Filling):
    def client(self):
        """Not there while dlock is measured: its pings would count."""
        client = KazooClient(hosts=f"127.0.0.1:{self.backend.port}")
        client.start()
        return client

    def size(self):
        client = self.client()
        size = len(client.get(f"/dlock-meta/{RELEASED}")[0])
        client.stop()
        client.close()
        return size

    def note(self):
        client = self.client()
        (hold,) = client.get_children(f"/dlock/{HELD}")
        self.nodes = {
            RELEASED: [("/dlock-meta/{}", client.get(f"/dlock-meta/{RELEASED}")[0])],
            HELD: [("/dlock/{}", b""), ("/dlock/{}/" + hold, client.get(f"/dlock/{HELD}/{hold}")[0])],
        }
        client.stop()
        client.close()

    def fill(self, numbers):
        client = self.client()
        pending = []
        for number in numbers:
            for path, data in self.nodes[source(number)]:
                pending.append(client.create_async(path.format(f"lock-{number}"), data))
            if len(pending) > 500:
                [one.get() for one in pending]
                pending.clear()
        [one.get() for one in pending]
        client.stop()
        client.close()


class Postgres(Filling):
    def size(self):
        return int(self.backend.sql(f"SELECT pg_column_size(l) FROM dlock.locks l WHERE name = '{RELEASED}'"))

    def fill(self, numbers):
        copied = f"generate_series({numbers.start}, {numbers.stop - 1}) n"
        is_source = f"l.name = CASE WHEN n % 10 = 0 THEN '{HELD}' ELSE '{RELEASED}' END"
        columns = "owner, mode, slots, token, slot, since, ttl, expires, server, revoked, kept, who, wake, session"
        of_locks = "token, last_owner, last_token, last_run, earlier, last_success"
        self.backend.sql(
            "SET dlock.inside = 'on';"
            f"INSERT INTO dlock.locks (name, {of_locks}) SELECT 'lock-' || n, {of_locks}"
            f"  FROM dlock.locks l, {copied} WHERE {is_source};"
            f"INSERT INTO dlock.contenders (name, {columns}) SELECT 'lock-' || n, {columns}"
            f"  FROM dlock.contenders l, {copied} WHERE {is_source};"
            "ANALYZE dlock.locks, dlock.contenders"
        )
