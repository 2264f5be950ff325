"""What it costs to hold a lock and do nothing else."""

import time
from contextlib import ExitStack

import procfs
import servers
from handover import queue_of
from report import Aim, Table
from side_by_side import dlock_on

SECONDS = 60
MEMORY = Aim(6.0, unit="MB")
CPU = Aim(5.0, unit="ms")
NOTES = [
    "Memory one after the other, the rest all at the same time, each alone on its server, with a command that sleeps "
    "and is not counted. dlock is two processes, dlock and guardian. CPU by schedstat, of all threads; a wake-up is a "
    "voluntary context switch; requests by the server's own count. dlock renews every ttl/3.",
]


def own_processes(queue):
    return procfs.tree(queue.holder.pid, leave_out=("stamp",))


def memory_alone(backend, tool):
    """Before others run that have pages in common with it."""
    with queue_of(tool, "alone", backend.directory) as queue:
        memory = sum(map(procfs.pss, own_processes(queue)))
        queue.drain()
        return memory


class Holder:
    def __init__(self, backend, tool, memory, stack):
        self.backend, self.tool, self.memory = backend, tool, memory
        queue = stack.enter_context(queue_of(tool, "hold", backend.directory))
        stack.callback(queue.drain)
        self.pids = own_processes(queue)
        self.requests = stack.enter_context(backend.counting()) if backend.counting else lambda: None

    def snapshot(self):
        return {
            "cpu": sum(map(procfs.cpu, self.pids)),
            "wake_ups": sum(map(procfs.wake_ups, self.pids)),
            "requests": self.requests(),
        }

    def row(self, before, seconds):
        after = self.snapshot()
        row = {"backend": self.backend.name, "tool": self.tool.name}
        row["PSS, MB"] = self.memory
        row["CPU in 20 s, ms"] = (after["cpu"] - before["cpu"]) * 20 / seconds
        row["wake-ups a minute"] = (after["wake_ups"] - before["wake_ups"]) * 60 // seconds
        counted = after["requests"] is not None
        row["requests a minute"] = (after["requests"] - before["requests"]) * 60 // seconds if counted else None
        if self.tool.name == "dlock":
            small, idle = MEMORY.judge(row["PSS, MB"], {}), CPU.judge(row["CPU in 20 s, ms"], {})
            row |= {"aim": f"{small['aim']}, {idle['aim']}", "met": small["met"] and idle["met"]}
        return row


def measure(bench):
    seconds = 5 if bench.quick else SECONDS
    with ExitStack() as stack:
        etcd = servers.Etcd(stack)
        backends = [kind(stack) for kind in bench.kinds]
        tools = [(backend, dlock_on(backend.url, "--ttl", "30s")) for backend in backends]
        tools.append((etcd, etcd.peers[0]))
        memory = [memory_alone(backend, tool) for backend, tool in tools]
        holders = [Holder(backend, tool, size, stack) for (backend, tool), size in zip(tools, memory)]
        before = [holder.snapshot() for holder in holders]
        time.sleep(seconds)
        rows = [holder.row(one, seconds) for holder, one in zip(holders, before)]
    return [Table(f"Holding a lock for {seconds} s, ttl 30 s", rows, NOTES)]
