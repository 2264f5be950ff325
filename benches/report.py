"""Aims, and tables as Markdown."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Aim:
    """A figure of ours should be at most this, or at most so many times somebody else's."""

    limit: float
    of: str | None = None
    unit: str = "ms"

    def __str__(self):
        return f"≤ {self.limit:g} × {self.of}" if self.of else f"≤ {self.limit:g} {self.unit}"

    def judge(self, figure, others):
        """What goes into a row; `others` are the figures by name."""
        reached = figure / others[self.of] if self.of else figure
        return {"aim": str(self), "reached": reached, "met": reached <= self.limit}


@dataclass
class Table:
    """Rows are dictionaries, whose keys are the header."""

    title: str
    rows: list
    notes: list = field(default_factory=list)
    # What the JSON has instead of the rows, where those are made for reading.
    data: list | None = None

    def markdown(self):
        header = list(dict.fromkeys(key for row in self.rows for key in row))
        lines = [header, ["---" if header.index(name) < 2 else "---:" for name in header]]
        lines += [[show(row.get(name)) for name in header] for row in self.rows]
        table = [f"| {' | '.join(line)} |" for line in lines]
        return "\n".join([f"### {self.title}", "", *table, "", *(f"{note}\n" for note in self.notes)])


def show(value):
    if value is None:
        return ""
    if isinstance(value, bool):
        return "met" if value else "**not met**"
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"
    return str(value)
