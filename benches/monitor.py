"""Counts what clients send to a Redis server, by MONITOR: its other counters do not tell that from what scripts do."""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

from side_by_side import until


def ask(port, *command):
    return subprocess.run(["redis-cli", "-p", port, *command], capture_output=True, text=True).stdout.strip()


@contextmanager
def counting(port, directory):
    """A function that says how many commands clients have sent since."""
    path = f"{directory}/monitor.{port}"
    with open(path, "wb") as out:
        watcher = subprocess.Popen(["redis-cli", "-p", port, "MONITOR"], stdout=out)
    marks = 0

    def requests():
        nonlocal marks
        marks += 1
        mark = f'"PING" "mark-{marks}"'
        ask(port, "PING", f"mark-{marks}")
        until(lambda: mark in Path(path).read_text(errors="replace"))
        lines = Path(path).read_text(errors="replace").splitlines()
        return sum(" lua]" not in line and '"PING" "mark-' not in line for line in lines if line[:1].isdigit())

    try:
        until(lambda: Path(path).read_text(errors="replace").startswith("OK"))
        yield requests
    finally:
        watcher.kill()
        watcher.wait()
        os.unlink(path)
