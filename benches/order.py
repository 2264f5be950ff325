"""Which functions a run goes through, and in which order: written to link/order.ld, they lie side by side.

A program is mapped in pieces of 64 kB, each when it is touched for the first time. What a run needs of dlock's 4 MB is
spread over all of it if nobody sees to that.
"""

import os
import re
import subprocess
from bisect import bisect_right
from pathlib import Path

from report import Table
from side_by_side import DLOCK, ENV, ROOT, Failed, until

SCRIPT = ROOT / "link/order.ld"
HEAD = """\
/* What a run goes through, in the order in which it does, so that little of the program has to be mapped.
 * Written by `benches/run order`. Names that no longer exist do no harm. */
"""


def sections(map_file):
    """Where lld has put the code: (address, size, pattern) in the order of addresses."""
    found = []
    for line in map_file.read_text().splitlines():
        fields = re.match(r"\s*([0-9a-f]+)\s+[0-9a-f]+\s+([0-9a-f]+)\s+\d+ {9}(\S.*):\((\.text[^)]*)\)$", line)
        if fields:
            address, size, file, section = fields.groups()
            found.append((int(address, 16), int(size, 16), pattern(file, section)))
    return sorted(place for place in found if place[2])


def pattern(file, section):
    """For a linker script, and for other compilers as well: without what they put into a name to make it unique."""
    member = re.search(r"(lib\w+\.a)\((.*)\)$", file)
    if section == ".text":
        return f"*{member[1]}:{member[2]}(.text)" if member else None
    section = re.sub(r"17h[0-9a-f]{16}E", "17h*E", section)
    return f"*({re.sub(r'Cs[0-9A-Za-z]+_', 'Cs*_', section)})"


def trace(argv, directory, meanwhile=lambda: None):
    """The addresses of all instructions, process by process: those of the guardian are among them."""
    logs = Path(directory, "trace")
    logs.mkdir(exist_ok=True)
    valgrind = ["valgrind", "-q", "--tool=lackey", "--basic-counts=no", "--trace-mem=yes", f"--log-file={logs}/%p"]
    traced = subprocess.Popen([*valgrind, *argv], env=ENV, stdout=subprocess.DEVNULL)
    meanwhile()
    if traced.wait() != 0:
        raise Failed(f"{argv} failed")
    for log in sorted(logs.iterdir(), key=lambda log: int(log.name)):
        with log.open() as lines:
            yield from (int(line[3:].split(",")[0], 16) for line in lines if line.startswith("I  "))
        log.unlink()


def scenes(backend):
    """What is traced on a backend: a lock that is free, and one that is not at first."""
    dlock, run = backend.dlock, backend.dlock.argv("order", "true")
    yield run, lambda: None
    began = Path(backend.directory, "began")
    holder = dlock.start("order", "sh", "-c", f": > {began}; exec sleep infinity")
    until(began.exists, "the first command to begin")

    def let_it_wait():
        until(lambda: dlock.waiting("order") == 1, "the second one to wait")
        holder.terminate()

    yield run, let_it_wait
    holder.wait()


def measure(bench):
    link_map = ROOT / "target/bench/link.map"
    build = {**os.environ, "DLOCK_LINK_MAP": str(link_map)}
    subprocess.run(["cargo", "build", "--release", "--quiet"], cwd=ROOT, env=build, check=True)
    places = sections(link_map)
    starts = [address for address, _, _ in places]
    order, rows = {}, []
    files = bench.files

    def add(what, argv, *meanwhile):
        before = len(order)
        for address in trace(argv, files.directory, *meanwhile):
            start, size, name = places[max(bisect_right(starts, address) - 1, 0)]
            if start <= address < start + size:
                order.setdefault(name, size)
        rows.append({"what": what, "functions more": len(order) - before})

    for backend in bench.backends:
        backend.dlock.run("order", "true")
        for scene in scenes(backend):
            add(f"run on {backend.name}", *scene)
        if backend is files:
            add("status", [DLOCK, "status", "--backend", files.url, "order"])
            add("--help", [DLOCK, "--help"])
    lines = "".join(f"    {name}\n" for name in order)
    SCRIPT.write_text(f"{HEAD}SECTIONS\n{{\n  .text.first :\n  {{\n{lines}  }}\n}}\nINSERT BEFORE .text;\n")
    subprocess.run(["cargo", "build", "--release", "--quiet"], cwd=ROOT, check=True)
    kilobytes = sum(order.values()) // 1000
    return [Table("What a run goes through", rows, [f"{len(order)} functions, {kilobytes} kB, in link/order.ld."])]
