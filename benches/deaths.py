"""How long a command's processes outlive dlock when somebody kills it."""

import os
import signal
import subprocess
import sys
import time

from report import Table
from side_by_side import DLOCK, median

SIZES = [100, 1000, 3000]
# Daemons in sessions of their own, awake every 20 ms once all are there: earlier, they would keep the others from being
# started. All of them have the pipe open, so that it ends with the last one.
DAEMONS = """
import os, sys, time
all_there, gate = os.pipe()
for number in range(int(sys.argv[1])):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.close(gate)
        os.read(all_there, 1)
        while True:
            time.sleep(0.02)
    os.wait()
os.close(gate)
print("ready", flush=True)
time.sleep(1000)
"""
NOTES = [
    "`kill -9` of dlock, until no process of the command is left: daemons in sessions of their own, all woken at one "
    "moment and then awake every 20 ms. Measured by the end of a pipe that all of them have open, the guardian too.",
]


def death(url, size):
    """In milliseconds."""
    reader, writer = os.pipe()
    argv = [DLOCK, "run", "--backend", url, "--name", "deaths", "--", sys.executable, "-c", DAEMONS, str(size)]
    dlock = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, pass_fds=[writer])
    os.close(writer)
    assert dlock.stdout.readline() == "ready\n"
    began = time.monotonic()
    dlock.send_signal(signal.SIGKILL)
    assert os.read(reader, 1) == b""
    took = time.monotonic() - began
    os.close(reader)
    dlock.stdout.close()
    dlock.wait()
    return took * 1000


def measure(bench):
    # To start thousands of daemons takes longer than to end them.
    runs = 2 if bench.quick else 5
    rows = []
    for size in SIZES:
        times = [death(bench.files.url, size) for _ in range(runs)]
        rows.append({"daemons": size, "runs": runs, "median ms": median(times), "worst ms": max(times)})
    return [Table("From the death of dlock to that of its command", rows, NOTES)]
