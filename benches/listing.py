"""What `dlock status` costs when a backend has many locks: time, memory, and the server's own count of requests."""

import json
import resource
import subprocess
import tempfile
import time
from contextlib import ExitStack, nullcontext

import filling
import procfs
import servers
from report import Table
from side_by_side import DLOCK, ENV

# Whatever can be filled; each backend's class there has the name it has among the servers.
KINDS = [(kind, getattr(filling, kind.__name__)) for kind in servers.ALL if hasattr(filling, kind.__name__)]
LOCKS = [1_000, 10_000, 100_000]
FORMATS = [[], ["--json"], ["--format", "prometheus"]]


def peak_memory(process):
    """In MB: the high-water mark of the process as long as it is there to be asked."""
    peak = 0
    while process.poll() is None:
        peak = max(peak, procfs.peak(process.pid))
        time.sleep(0.001)
    return peak


def cpu_of_children():
    """In seconds, of all that have ended: however busy the machine is."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def count(out, options):
    """How many locks are shown."""
    if "--json" in options:
        return len(json.load(out))
    if "prometheus" in options:
        return sum(line.startswith("dlock_lock_held{") for line in out)
    return sum(1 for _ in out) - 1


def row_of(backend, locks, *options):
    counting = backend.counting() if backend.counting else nullcontext(lambda: None)
    with tempfile.TemporaryFile("w+") as out, counting as requests:
        began, spent = time.monotonic(), cpu_of_children()
        process = subprocess.Popen([DLOCK, "status", "--backend", backend.url, *options], env=ENV, stdout=out)
        peak = peak_memory(process)
        took, spent = time.monotonic() - began, cpu_of_children() - spent
        assert process.returncode == 0, f"{backend.name}: exit {process.returncode}"
        asked = requests()
        out.seek(0)
        shown = count(out, options)
    assert shown == locks, f"{backend.name} shows {shown} of {locks} locks"
    command = " ".join(["dlock status", *options])
    row = {"backend": backend.name, "command": command, "locks": locks}
    return row | {"seconds": took, "dlock's CPU, s": spent, "peak memory, MB": peak, "requests": asked}


def measure(bench):
    rows, sizes = [], []
    for start, fill in KINDS:
        if start not in bench.kinds:
            continue
        # Of its own: what others left there would be shown too.
        with ExitStack() as stack:
            backend = start(stack)
            copies, filled = fill(backend), 2
            few, many = copies.after_one_run, copies.after_all_runs
            per_run = (many - few) / (filling.RUNS - 1)
            sizes.append({"backend": backend.name, "1 run": few, f"{filling.RUNS} runs": many, "each more": per_run})
            for locks in LOCKS[: 1 if bench.quick else None]:
                copies.fill(range(filled, locks))
                filled = locks
                for options in FORMATS:
                    tries = [row_of(backend, locks, *options) for _ in range(1 if bench.quick else 3)]
                    rows.append(min(tries, key=lambda row: row["seconds"]))
    notes = [
        "One lock is run and one acquired by dlock itself; what that leaves is copied until there are so many, every "
        f"tenth of them held, the others with {filling.RUNS} runs on record. The fastest of three. Memory is resident, "
        "at its highest.",
        "ZooKeeper cannot list a part of a node's children: the names of all locks, some 100 bytes each, are read at "
        "the beginning. Its `jute.maxbuffer` of 1 MB, left at its default, does not limit such an answer.",
    ]
    of_sizes = [
        "Bytes on the server of a lock that is free, by its server's own count: `MEMORY USAGE`, `pg_column_size`, the "
        "lengths of keys and values, of a znode, of files. No index and no overhead of a file system.",
    ]
    return [Table("Listing many locks", rows, notes), Table("Size of a lock's history", sizes, of_sizes)]
