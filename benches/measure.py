"""One run of all measurements, or of those that are named; see benches/run."""

import argparse
import datetime
import json
import signal
import sys
from contextlib import ExitStack
from functools import cached_property

import callgrind
import cost
import crowd
import deaths
import handover
import holding
import listing
import machine
import servers
import startup
import uncontended
from side_by_side import LOG, ROOT


class Bench:
    """What the sections have to work with."""

    def __init__(self, stack, asked):
        self.stack, self.quick, self.record = stack, asked.quick, asked.record
        self.kinds = [kind for kind in servers.ALL if not asked.on or kind.name in asked.on]

    @cached_property
    def files(self):
        return servers.Files(self.stack)

    @property
    def backends(self):
        """One after the other, each with no servers beside the tools but its own."""
        for kind in self.kinds:
            with ExitStack() as stack:
                yield kind(stack)


SECTIONS = {
    "uncontended": uncontended.measure,
    "hand-over": handover.measure,
    "cost": cost.measure,
    "crowd": crowd.measure,
    "holding": holding.measure,
    "deaths": deaths.measure,
    "start-up": startup.measure,
    "listing": listing.measure,
    "callgrind": callgrind.measure,
}

NAMES = [kind.name for kind in servers.ALL]


def arguments():
    parser = argparse.ArgumentParser(prog="benches/run", description="Measures dlock and other tools side by side.")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--on", action="append", metavar="BACKEND", choices=NAMES, help=f"only on: {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="measure less often, to see that it works")
    parser.add_argument("--record", action="store_true", help="keep callgrind's count as the one to compare with")
    parser.add_argument("--publish", action="store_true", help="put the result of a whole run into docs/speed.md")
    asked = parser.parse_args()
    unknown = set(asked.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(unknown)}")
    if asked.publish and (asked.quick or asked.sections or asked.on):
        parser.error("only a whole run is published")
    return asked


def write(asked, facts, tables):
    """As text for people and as JSON; returns the text."""
    head = f"## dlock beside others, {datetime.date.today()}{', a quick pass' if asked.quick else ''}\n\n"
    head += "".join(f"- {name}: {value}\n" for name, value in facts.items())
    text = "\n".join([head] + [table.markdown() for section in tables.values() for table in section])
    data = {name: {table.title: table.data or table.rows for table in section} for name, section in tables.items()}
    base = ROOT / "target/bench" / "-".join([str(datetime.date.today()), *["quick"] * asked.quick, *asked.sections, *(asked.on or [])])
    base.with_suffix(".md").write_text(text)
    base.with_suffix(".json").write_text(json.dumps({"machine": facts, "sections": data}, indent=1) + "\n")
    return text


def publish(text):
    """Into the page for readers, below its mark."""
    page = ROOT / "docs/speed.md"
    above, mark, _ = page.read_text().partition("<!-- benches/run --publish writes what follows -->\n")
    page.write_text(f"{above}{mark}\n{text}")


def main():
    asked = arguments()
    # So that the servers are ended whatever ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    servers.sweep()
    LOG.unlink(missing_ok=True)
    facts, tables = machine.facts(), {}
    with ExitStack() as stack:
        bench = Bench(stack, asked)
        for name in asked.sections or SECTIONS:
            print(f"measuring: {name}", file=sys.stderr)
            tables[name] = SECTIONS[name](bench)
            # After every section: what is measured is kept, whatever happens to the next.
            facts["load at the end"] = machine.load()
            text = write(asked, facts, tables)
    if asked.publish:
        publish(text)
    print(text)


if __name__ == "__main__":
    main()
