//! What a page says that a command prints, and what it prints here: the same words, whatever the times, numbers and names
//! of machines.

/// A command, and what it is said to print.
#[derive(Debug, Default)]
pub struct Step {
    command: String,
    output: Vec<String>,
}

/// A line of its own behind the output of every command.
const END: &str = "\u{1e}";

/// The last line, where the rest of the output is left out.
const AND_SO_ON: &str = "…";

impl Step {
    pub fn script(&self) -> String {
        format!("{}\nstatus=$?; echo '{END}'; (exit $status)\n", self.command)
    }
}

pub fn steps(block: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for line in block.lines() {
        match (line.strip_prefix("$ "), line.strip_prefix("> "), steps.last_mut()) {
            (Some(command), ..) => steps.push(Step { command: command.into(), ..Step::default() }),
            (None, Some(more), Some(step)) if step.output.is_empty() => step.command += &format!("\n{more}"),
            (None, _, Some(step)) => step.output.push(line.into()),
            (None, _, None) => panic!("output without a command: {line}"),
        }
    }
    steps
}

#[track_caller]
pub fn compare(page: &str, steps: &[Step], said: &str) {
    let end = format!("{END}\n");
    let mut said = said.split(&end);
    for step in steps {
        let mut here: Vec<_> = said.next().unwrap_or("(nothing: the shell has ended)").lines().map(alike).collect();
        let mut there: Vec<_> = step.output.iter().map(|line| alike(line)).collect();
        if there.last().is_some_and(|line| line == AND_SO_ON) {
            there.pop();
            here.truncate(there.len());
        }
        assert_eq!(here, there, "{page}: {} prints (left) something else than the page says (right)", step.command);
    }
}

/// A line without what differs from machine to machine and from run to run.
fn alike(line: &str) -> String {
    let host = nix::unistd::gethostname().unwrap().into_string().unwrap();
    let line = line.replace(&host, "web1");
    if line.chars().all(|c| c.is_ascii_digit()) {
        return line;
    }
    let mut words: Vec<String> = Vec::new();
    for word in line.split_whitespace() {
        // An exit code is never just any number.
        let is_exit_code = words.last().is_some_and(|last| last == "exit");
        let word = if is_exit_code { word.to_owned() } else { without_numbers(word) };
        // "9h 12m" and "3s" are both some time.
        if words.last().is_some_and(|last| last == "TIME") && word.starts_with("TIME") {
            words.pop();
        }
        words.push(word);
    }
    words.join(" ")
}

fn without_numbers(word: &str) -> String {
    let mut out = String::new();
    let mut rest = word;
    while let Some(at) = rest.find(|c: char| c.is_ascii_digit()) {
        out += &rest[..at];
        rest = rest[at..].trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
        let unit = ["ms", "us", "ns", "days", "day", "h", "m", "s"].into_iter().find(|unit| {
            rest.strip_prefix(unit).is_some_and(|after| !after.starts_with(|c: char| c.is_ascii_alphanumeric()))
        });
        out += if unit.is_some() { "TIME" } else { "N" };
        rest = &rest[unit.map_or(0, str::len)..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_times_numbers_and_machines_may_differ() {
        let same = |one: &str, other: &str| alike(one) == alike(other);
        assert!(same("held by web1 pid 42 for 9h 12m, token 7", "held by web1 pid 1 for 3s, token 99"));
        assert!(same("exit 0, 1day 9h ago", "exit 0, 41ms ago"));
        assert!(same("a   b", "a b"));
        assert!(!same("held by web1", "held by nobody"));
        assert!(!same("exit 0, 1s ago", "exit 0"));
        assert!(!same("lease 27s", "lease -"));
        assert!(!same("75", "0") && !same("exit 0, 1s ago", "exit 3, 1s ago"));
    }
}
