"""A thousand waiters for one lock."""

import time

import procfs
from handover import TOO_LONG, queue_of
from report import Table
from side_by_side import Failed, median, p99

WAITERS = 1000


def memory(queue):
    """Of a waiter and its guardian, in MB."""
    return sum(procfs.pss(pid) for waiter in queue.waiters for pid in procfs.tree(waiter.pid)) / len(queue.waiters)


def row_of(backend, waiters):
    began = time.monotonic()
    with queue_of(backend.dlock, "crowd", backend.directory) as queue:
        queue.grow_to(waiters)
        row = {"backend": backend.name, "waiters": waiters, "all waiting after, s": time.monotonic() - began}
        row["PSS of one, MB"] = memory(queue)
        began = time.monotonic()
        gaps = queue.drain()
        row |= {"had it": len(gaps), "in, s": time.monotonic() - began}
    return row | {"median hand-over, ms": median(gaps), "p99, ms": p99(gaps)}


def measure(bench):
    rows = []
    for backend in bench.backends:
        try:
            rows.append(row_of(backend, WAITERS // (20 if bench.quick else 1)))
        except Failed as failure:
            rows.append({"backend": backend.name, "waiters": f"failed: {failure}"})
    notes = [
        "dlock and its guardian together; what they share with each other and with the other waiters is counted by "
        f"share. Whoever has not had it after {TOO_LONG} s is left out. All waiters are on this machine, beside the "
        "server: the time until all of them wait is mostly that of starting their processes.",
    ]
    return [Table("A crowd of waiters", rows, notes)]
