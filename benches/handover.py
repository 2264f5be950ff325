"""From the end of one command to the start of the next, with more and more waiting."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager

from report import Table, show
from side_by_side import BIN, LOG, Failed, freshen, median, p99, until

# Waiters, and rounds so that every cell has at least sixty hand-overs, and the one that counts most many more.
CELLS = {1: 60, 8: 8, 64: 4, 256: 1}
QUICK = {1: 5, 8: 1, 64: 1}
# All at once they would run into each other's time limits for connecting.
BATCH = 32
# Seconds after which those who still wait are left out.
TOO_LONG = 60
# Many waiters should not be slower than few by more than noise. With 1 it is always the first hand-over after a rest.
FEW = 8
GROWTH = 1.25


class Queue:
    """A holder, whose command ends at the gate, and those who wait behind it."""

    def __init__(self, tool, lock, directory):
        self.tool, self.lock = tool, lock
        self.log, self.gate = f"{directory}/{lock}.log", f"{directory}/{lock}.gate"
        self.waiters = []
        self.holder = tool.start(lock, BIN / "stamp", self.log, self.gate)

    def end(self):
        # The command of a tool that does not end it ends by itself.
        open(self.gate, "a").close()
        for process in self.everybody():
            process.kill()
        for process in self.everybody():
            process.wait()

    def everybody(self):
        return [self.holder, *self.waiters]

    def see(self, evidence, what):
        """Waits for it, but not if somebody has given up."""

        def seen():
            ended = [process.args for process in self.everybody() if process.poll() is not None]
            if ended:
                raise Failed(f"{self.tool.name} ended before its turn; see {LOG}: {ended[0]}")
            return evidence()

        until(seen, f"{what} ({self.tool.name}, {self.lock})")

    def grow_to(self, count):
        while len(self.waiters) < count:
            more = min(BATCH, count - len(self.waiters))
            self.waiters += [self.tool.start(self.lock, BIN / "stamp", self.log) for _ in range(more)]
            all_of_them = len(self.waiters)
            self.see(lambda: self.tool.waiting(self.lock) >= all_of_them, f"{all_of_them} to wait")

    def drain(self, within=TOO_LONG):
        """Lets everybody have it, or as many as get it in so many seconds; the gaps in milliseconds."""
        open(self.gate, "a").close()
        end = time.monotonic() + within
        try:
            for process in self.everybody():
                if process.wait(max(0, end - time.monotonic())) != 0:
                    raise Failed(f"{self.tool.name} failed on {self.lock}; see {LOG}")
        except subprocess.TimeoutExpired:
            pass
        with open(self.log) as log:
            stamps = sorted(tuple(map(int, line.split())) for line in log)
        gaps = [(begin - end) / 1e6 for (_, end), (begin, _) in zip(stamps, stamps[1:])]
        if any(gap < 0 for gap in gaps):
            raise SystemExit(f"{self.tool.name}: two commands at once on {self.lock}")
        return gaps


@contextmanager
def queue_of(tool, lock, directory):
    """As soon as the holder's command runs; nobody is left at the end."""
    queue = Queue(tool, lock, directory)
    try:
        queue.see(lambda: os.path.exists(queue.log), "the first command to begin")
        yield queue
    finally:
        queue.end()


def hand_overs(tool, lock, waiting, directory):
    with queue_of(tool, lock, directory) as queue:
        queue.grow_to(waiting)
        return queue.drain()


def measure_backend(backend, cells):
    """The gaps of every tool and number of waiters; the tools take turns."""
    tools = [tool for tool in [backend.dlock, *backend.peers] if tool.waiting]
    gaps = {(tool.name, waiting): [] for tool in tools for waiting in cells}
    for waiting, rounds in cells.items():
        freshen(tools)
        for number in range(rounds):
            for tool in tools:
                lock = f"{tool.name.replace(' ', '-')}-{waiting}-{number}"
                try:
                    gaps[tool.name, waiting] += hand_overs(tool, lock, waiting, backend.directory)
                except Failed as failure:
                    print(failure, file=sys.stderr)
    return gaps


def cell(times, expected):
    if not times:
        return "failed"
    missing = f" ({len(times)} of {expected})" if len(times) < expected else ""
    return f"{show(median(times))} / {show(p99(times))}{missing}"


def row_of(backend, tool, gaps, cells):
    row = {"backend": backend.name, "tool": tool}
    row |= {f"{waiting} waiting": cell(gaps[tool, waiting], waiting * cells[waiting]) for waiting in cells}
    few, many = gaps[tool, FEW], gaps[tool, max(cells)]
    growth = median(many) / median(few) if few and many else None
    row[f"{max(cells)} : {FEW}"] = growth
    if tool == "dlock":
        row["grows"] = "no" if growth and growth <= GROWTH else "**yes**"
        if backend.hand_over_aim:
            row |= worst(backend.hand_over_aim, gaps, cells)
    return row


def worst(aim, gaps, cells):
    """The aim holds if it does with any number of waiters, wherever there is something to compare with."""
    if not all(gaps["dlock", waiting] for waiting in cells):
        return {"aim": str(aim), "met": False}
    verdicts = []
    for waiting in cells:
        others = {name: median(times) for (name, count), times in gaps.items() if count == waiting and times}
        if aim.of is None or aim.of in others:
            verdicts.append(aim.judge(others["dlock"], others))
    return max(verdicts, key=lambda verdict: verdict["reached"], default={"aim": str(aim)})


def measure(bench):
    cells = QUICK if bench.quick else CELLS
    rows, data = [], []
    for backend in bench.backends:
        gaps = measure_backend(backend, cells)
        rows += [row_of(backend, tool, gaps, cells) for tool in dict.fromkeys(name for name, _ in gaps)]
        for (tool, waiting), times in gaps.items():
            one = {"backend": backend.name, "tool": tool, "waiting": waiting, "hand_overs": len(times)}
            figures = {"median_ms": median(times), "p99_ms": p99(times), "worst_ms": max(times)} if times else {}
            data.append(one | figures)
    notes = [
        "Median / 99th percentile in ms, as the commands themselves saw it (stamp.c); "
        + ", ".join(f"{waiting * rounds} hand-overs with {waiting} waiting" for waiting, rounds in cells.items())
        + f". An aim counts where it is missed by most. After {TOO_LONG} s nobody is waited for; then there are fewer.",
        f"It grows if the median with {max(cells)} waiting is more than {GROWTH:g} times that with {FEW}.",
        "Left out, because they ask again and again, so that their hand-over is their interval: GNU sem, the redis-cli "
        "wrapper, redis-py, redlock-py. PostgreSQL runs with max_connections raised, so that psycopg can take part.",
    ]
    return [Table("Hand-over", rows, notes, data)]
