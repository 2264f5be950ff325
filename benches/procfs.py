"""What the kernel knows about processes and their threads."""

from pathlib import Path


def tree(pid, leave_out=()):
    """The process and all below it, without those of these names."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += tree(int(child), leave_out)
    return [one for one in found if Path(f"/proc/{one}/comm").read_text().strip() not in leave_out]


def pss(pid):
    """In MB: memory of its own, and its share of what it has in common with others."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


def cpu(pid):
    """In milliseconds, of all threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


def wake_ups(pid):
    """How often any of its threads went to sleep, and so was woken."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return total


def peak(pid):
    """In MB: the most that was ever resident; 0 if it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0) * 1024 / 1e6
