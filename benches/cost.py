"""What a server has to do for it, by its own count."""

from handover import queue_of
from report import Table

WAITING = 64


def per_cycle(backend, tool, cycles):
    tool.run("cost", "true")
    with backend.counting() as requests:
        for _ in range(cycles):
            tool.run("cost", "true")
        return requests() / cycles


def per_hand_over(backend, tool, waiting):
    if not tool.waiting:
        return None
    with queue_of(tool, f"cost-{tool.name.replace(' ', '-')}", backend.directory) as queue:
        queue.grow_to(waiting)
        with backend.counting() as requests:
            queue.drain()
            return requests() / waiting


def measure(bench):
    waiting = WAITING // (8 if bench.quick else 1)
    rows = []
    for backend in bench.backends:
        if not backend.counting:
            continue
        for tool in [backend.dlock, *backend.peers]:
            row = {"backend": backend.name, "tool": tool.name}
            row["requests per run"] = per_cycle(backend, tool, 5 if bench.quick else 20)
            row[f"requests per hand-over, {waiting} waiting"] = per_hand_over(backend, tool, waiting)
            rows.append(row)
    notes = [
        "; ".join(f"{kind.name}: {kind.counted}" for kind in bench.kinds if kind.counted) + ".",
        "A hand-over has all that happens between the end of the first command and the exit of the last tool, divided "
        "by the waiters. The requests of a holder at rest are in the table about holding.",
    ]
    return [Table("Requests to the server", rows, notes)]
