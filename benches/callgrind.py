"""Instructions of `dlock run -- true` on files: a regression shows without a clock."""

import json
import subprocess
from pathlib import Path

from report import Table
from side_by_side import DLOCK, ENV, ROOT, median

RECORD = ROOT / "benches/callgrind.json"
RUNS = 9
# Threads meet in one order or another; that much lies between two runs of the same binary.
SPREAD = 0.03


def instructions(url, directory):
    out = Path(directory, "callgrind.out")
    valgrind = ["valgrind", "-q", "--tool=callgrind", "--trace-children=no", f"--callgrind-out-file={out}"]
    command = [DLOCK, "run", "--backend", url, "--name", "callgrind", "--", "true"]
    subprocess.run([*valgrind, *command], env=ENV, check=True)
    totals = [line.split()[1] for line in out.read_text().splitlines() if line.startswith("totals:")]
    return int(totals[0])


def measure(bench):
    files = bench.files
    files.dlock.run("callgrind", "true")
    counted = int(median(instructions(files.url, files.directory) for _ in range(3 if bench.quick else RUNS)))
    if bench.record:
        RECORD.write_text(json.dumps({"run_true_on_files": counted}, indent=2) + "\n")
    recorded = json.loads(RECORD.read_text())["run_true_on_files"]
    change = counted / recorded - 1
    row = {"what": "`dlock run -- true` on files", "instructions": counted, "recorded": recorded}
    row |= {"change": f"{change:+.1%}", "aim": f"≤ +{SPREAD:.0%}", "met": change <= SPREAD}
    notes = [
        "Counted by callgrind: dlock's own process with all its threads, in user space, from the loader's first "
        "instruction to the exit. Not counted: the guardian, the command, the kernel. Not the first run of a "
        f"lock; median of {RUNS}. It depends on compiler and C library: on another machine, record it first "
        "(`benches/run --record callgrind`)."
    ]
    return [Table("Instructions", [row], notes)]
