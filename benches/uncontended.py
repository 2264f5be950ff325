"""A whole run of `true` under a lock that nobody else wants."""

import tempfile

import servers
from report import Table
from side_by_side import ROOT, Tool, dlock_on, freshen, median, milliseconds_of, p99

SPAWN = servers.Backend.floor


def contestants(backend, stack):
    tools = [SPAWN, backend.floor] if backend.floor != SPAWN else [SPAWN]
    tools.append(backend.dlock)
    if backend.name == "file":
        disk = stack.enter_context(tempfile.TemporaryDirectory(dir=ROOT / "target/bench"))
        tools.append(Tool("dlock, lock on disk", dlock_on(f"file://{disk}").before))
    return tools + backend.peers


def rows_of(backend, rounds, stack):
    tools = contestants(backend, stack)
    freshen(tools)
    runs = [(tool.every, tool.argv(f"run-{number}", "true")) for number, tool in enumerate(tools)]
    took = dict(zip((tool.name for tool in tools), milliseconds_of(rounds, runs)))
    medians = {name: median(times) for name, times in took.items()}
    nearest = min(medians[tool.name] for tool in backend.peers if not tool.name.startswith("dlock"))
    for name, times in took.items():
        row = {"backend": backend.name, "tool": name, "runs": len(times)}
        row |= {"median ms": medians[name], "p99 ms": p99(times)}
        row["× floor"] = medians[name] / medians[backend.floor.name]
        if name.startswith("dlock") and name != "dlock on one Redis":
            row["× nearest peer"] = medians[name] / nearest
            row |= backend.run_aim.judge(medians[name], medians)
        yield row


def measure(bench):
    rows = []
    for backend in bench.backends:
        rounds = backend.rounds // (10 if bench.quick else 1)
        rows += rows_of(backend, rounds, bench.stack)
    notes = [
        "From the start of the process to its exit, in turns (timer.c); slow tools in every 2nd to 25th round.",
        "Floors are C programs that do the least there is to do (floor.c): spawn alone, where no other is named.",
    ]
    return [Table("A run of `true`, nobody else there", rows, notes)]
