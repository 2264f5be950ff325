"""What the figures were taken on."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import servers
from side_by_side import DLOCK, ROOT

PROGRAMS = {"valgrind": ["valgrind", "--version"], "Rust": ["rustc", "--version"]}


def output(command):
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def processor():
    with open("/proc/cpuinfo") as info:
        models = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
    return models[0] if models else platform.machine()


def load():
    return " ".join(f"{average:.2f}" for average in os.getloadavg())


def commit():
    changed = output(["git", "status", "--porcelain", "--", "src", "Cargo.toml", "Cargo.lock"])
    return output(["git", "rev-parse", "--short", "HEAD"]) + (" with changes in src" if changed else "")


def facts():
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    known = {
        "processor": f"{processor()}, {os.cpu_count()} cores",
        "memory": f"{memory / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "load at the start (1, 5, 15 min)": load(),
        "dlock": f"{output([DLOCK, '--version'])}, commit {commit()}",
        "size of the binary": f"{Path(DLOCK).stat().st_size / 1e6:.2f} MB",
    }
    clients = []
    for kind in servers.ALL:
        known |= {name: output(command).splitlines()[0] for name, command in kind.programs.items()}
        known |= {name: output(["dpkg-query", "-Wf", "${Version}", package]) for name, package in kind.packages.items()}
        clients += [f"{client} {version(client)}" for client in kind.clients]
    known |= {name: output(command).splitlines()[0] for name, command in PROGRAMS.items()}
    known["Python clients"] = ", ".join(clients)
    return known
