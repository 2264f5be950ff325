"""What dlock costs before it does anything."""

from pathlib import Path

from report import Aim, Table
from side_by_side import DLOCK, median, milliseconds_of, p99

TIME = Aim(1.3, "true")
SIZE = Aim(6.0, unit="MB")


def measure(bench):
    files = bench.files
    files.dlock.run("seen", "true")
    commands = {
        "true": ["true"],
        "dlock --version": [DLOCK, "--version"],
        "dlock --help": [DLOCK, "--help"],
        "dlock status NAME": [DLOCK, "status", "--backend", files.url, "seen"],
    }
    took = milliseconds_of(100 if bench.quick else 1000, [(1, argv) for argv in commands.values()])
    medians = dict(zip(commands, map(median, took)))
    rows = []
    for name, times in zip(commands, took):
        row = {"command": name, "runs": len(times), "median ms": medians[name], "p99 ms": p99(times)}
        rows.append(row if name == "true" else row | TIME.judge(medians[name], medians))
    size = Path(DLOCK).stat().st_size / 1e6
    rows.append({"command": f"size of the binary: {size:.2f} MB"} | SIZE.judge(size, {}))
    return [Table("Start-up", rows, ["`dlock status` on files; a bare process is coreutils' `true`."])]
