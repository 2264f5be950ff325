//! The matrix for people (Markdown) and for programs (JSON).

use std::time::Duration;

use serde_json::{Value, json};

use super::facts::Facts;
use super::fault::Fault;
use super::scene::Outcome;
use super::site::Backend;
use super::tool::{Peer, Tool};
use crate::support::{self, Expect};

/// One cell and how it went, as often as it was played.
#[derive(Clone, Debug)]
pub struct Row {
    tool: Tool,
    backend: Backend,
    fault: Fault,
    expect: Expect,
    /// The exit codes that the holder may end with; empty where nothing is known of the tool.
    codes: &'static [i32],
    outcomes: Vec<Outcome>,
    /// Runs that did not come to their end.
    failures: Vec<String>,
}

impl Row {
    pub fn of_dlock(backend: Backend, fault: Fault) -> Option<Row> {
        let expect = backend.expectation(fault)?;
        Some(Row { codes: backend.exit_codes(fault), ..Row::new(Tool::Dlock, backend, fault, expect) })
    }

    pub fn of_peer(peer: Peer, fault: Fault) -> Row {
        Row::new(Tool::Peer(peer), peer.backend, fault, Expect::Nothing)
    }

    fn new(tool: Tool, backend: Backend, fault: Fault, expect: Expect) -> Row {
        Row { tool, backend, fault, expect, codes: &[], outcomes: Vec::new(), failures: Vec::new() }
    }

    pub fn cell(&self) -> (Tool, Backend, Fault) {
        (self.tool, self.backend, self.fault)
    }

    pub fn name(&self) -> String {
        format!("{} / {} / {}", self.tool.name(), self.backend.name, self.fault.name())
    }

    pub fn add(&mut self, outcome: Result<Outcome, String>) {
        match outcome {
            Ok(outcome) => self.outcomes.push(outcome),
            Err(failure) => {
                eprintln!("{}: {failure}", self.name());
                self.failures.push(failure);
            }
        }
    }

    /// What is wrong with it, if anything.
    pub fn broken(&self) -> Option<String> {
        if self.expect == Expect::Nothing {
            return None;
        }
        let bad = self.outcomes.iter().find(|outcome| !outcome.fulfils(self.expect) || !self.is_told_truly(outcome));
        let what = self.failures.first().cloned().or_else(|| bad.map(|outcome| format!("{outcome:?}")))?;
        Some(format!("{}: {what}; expected {} and exit code {}", self.name(), self.expect.text(), self.codes_text()))
    }

    /// Whether dlock's exit code says what happened.
    fn is_told_truly(&self, outcome: &Outcome) -> bool {
        outcome.code.is_some_and(|code| self.codes.contains(&code))
    }

    fn codes_text(&self) -> String {
        if self.codes.is_empty() {
            return "-".to_owned();
        }
        self.codes.iter().map(i32::to_string).collect::<Vec<_>>().join(" or ")
    }

    fn worst_overlap(&self) -> Option<Duration> {
        self.outcomes.iter().filter_map(|outcome| outcome.overlap).max()
    }

    fn worst_hand_over(&self) -> Option<Duration> {
        self.outcomes.iter().filter_map(|outcome| outcome.hand_over).max()
    }

    /// Where commands are not meant to be silent.
    fn longest_silence(&self) -> Option<Duration> {
        let silences = self.outcomes.iter().map(|outcome| outcome.silence);
        silences.max().filter(|_| !self.fault.silences())
    }

    fn runs(&self) -> usize {
        self.outcomes.len() + self.failures.len()
    }

    fn markdown(&self) -> String {
        let overlap = self.worst_overlap().map_or("0".to_owned(), millis);
        let hand_over = self.worst_hand_over().map_or("-".to_owned(), millis);
        let verdict = match (self.expect, self.broken(), self.failures.is_empty()) {
            (Expect::Nothing, _, true) => "",
            (Expect::Nothing, _, false) => "hand-over never came",
            (_, None, _) => "ok",
            (_, Some(_), _) => "BROKEN",
        };
        format!("{} {overlap} | {hand_over} | {} | {verdict} |\n", self.markdown_head(), self.runs())
    }

    /// What is known before it is played.
    pub fn markdown_head(&self) -> String {
        let (tool, backend, fault) = (self.tool.name(), self.backend.name, self.fault.name());
        format!("| {tool} | {backend} | {fault} | {} | {} |", self.expect.text(), self.codes_text())
    }

    fn json(&self) -> Value {
        let millis = |span: Duration| span.as_secs_f64() * 1000.0;
        json!({
            "tool": self.tool.name(),
            "backend": self.backend.name,
            "fault": self.fault.name(),
            "expected": self.expect.text(),
            "expected_exit_codes": self.codes,
            "exit_codes": self.outcomes.iter().map(|one| one.code).collect::<Vec<_>>(),
            "runs": self.runs(),
            "worst_overlap_ms": self.worst_overlap().map_or(0.0, millis),
            "survivors": self.outcomes.iter().flat_map(|one| &one.survivors).collect::<Vec<_>>(),
            "longest_silence_ms": self.longest_silence().map(millis),
            "hand_over_ms": self.outcomes.iter().filter_map(|one| one.hand_over).map(millis).collect::<Vec<_>>(),
            "failures": self.failures,
            "ok": self.broken().is_none(),
        })
    }
}

impl Outcome {
    pub fn fulfils(&self, expect: Expect) -> bool {
        match expect {
            Expect::NoOverlap => self.is_alone() && self.tokens_grow,
            Expect::TokenRefuses => self.tokens_grow && self.token_refuses,
            Expect::NoOverlapButTokens => self.is_alone(),
            Expect::Nothing => true,
        }
    }

    /// Whether no process of the one command was left when the other began, not even one that cannot beat.
    fn is_alone(&self) -> bool {
        self.overlap.is_none() && self.survivors.is_empty()
    }
}

/// All rows, and under which circumstances they came about.
pub struct Report {
    pub rows: Vec<Row>,
    pub facts: Facts,
    /// Cells that could not be played on this machine, and why.
    pub not_played: Vec<String>,
}

impl Report {
    pub fn broken(&self) -> Vec<String> {
        self.rows.iter().filter_map(Row::broken).collect()
    }

    /// The rows in which dlock promises that commands do not overlap: their runs, and those that did all the same.
    fn promised(&self) -> (usize, usize) {
        let promised = |row: &&Row| matches!(row.expect, Expect::NoOverlap | Expect::NoOverlapButTokens);
        let rows: Vec<&Row> = self.rows.iter().filter(promised).collect();
        let overlapped = rows.iter().flat_map(|row| &row.outcomes).filter(|outcome| !outcome.is_alone());
        (rows.iter().map(|row| row.runs()).sum(), overlapped.count())
    }

    pub fn markdown(&self) -> String {
        let mut text = self.facts.markdown();
        text += &format!("\n{}\n\n", self.statement());
        text += "| tool | backend | fault | expected | exit code | worst overlap | longest hand-over | runs | |\n\
                 | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
        self.rows.iter().for_each(|row| text += &row.markdown());
        text + "\n" + &self.condensed()
    }

    fn statement(&self) -> String {
        let (runs, overlapped) = self.promised();
        let least = self.rows.iter().map(Row::runs).min().unwrap_or(0).max(1);
        let hand_over = self.rows.iter().filter(|row| !row.tool.is_peer()).filter_map(Row::worst_hand_over).max();
        let silence = self.rows.iter().filter_map(Row::longest_silence).max();
        let mut text = format!(
            "{overlapped} of {runs} runs that must not overlap did. If none of n runs fails, the rate of failures is below \
             about 3/n with 95 % confidence: {:.2} % over all of them together, {:.0} % for a single cell. The longest \
             hand-over took {}. The longest time that a living process gave no heartbeat was {}. A shorter overlap might \
             not show in the heartbeats, only in the second command's search for processes of the first.",
            (300.0 / runs.max(1) as f64).min(100.0),
            (300.0 / least as f64).min(100.0),
            hand_over.map_or("-".to_owned(), millis),
            silence.map_or("-".to_owned(), millis),
        );
        for cell in &self.not_played {
            text += &format!(" Not played here: {cell}.");
        }
        text
    }

    /// One line for each tool and backend.
    fn condensed(&self) -> String {
        let mut text = String::from(
            "| tool | backend | faults | runs | worst overlap where 0 is promised | worst overlap elsewhere |\n\
             | --- | --- | --- | --- | --- | --- |\n",
        );
        let mut groups: Vec<(&str, &str, Vec<&Row>)> = Vec::new();
        for row in &self.rows {
            let key = (row.tool.name(), row.backend.name);
            match groups.iter_mut().find(|(tool, backend, _)| (*tool, *backend) == key) {
                Some((_, _, rows)) => rows.push(row),
                None => groups.push((key.0, key.1, vec![row])),
            }
        }
        for (tool, backend, rows) in groups {
            let worst = |promised: bool| {
                let is_promised =
                    |row: &&&Row| !matches!(row.expect, Expect::TokenRefuses | Expect::Nothing) == promised;
                let rows: Vec<&&Row> = rows.iter().filter(is_promised).collect();
                let worst = rows.iter().filter_map(|row| row.worst_overlap()).max().map_or("0".to_owned(), millis);
                if rows.is_empty() { "-".to_owned() } else { worst }
            };
            let runs: usize = rows.iter().map(|row| row.runs()).sum();
            text += &format!("| {tool} | {backend} | {} | {runs} | {} | {} |\n", rows.len(), worst(true), worst(false));
        }
        text
    }

    /// Into `target/`, where whoever asked for it finds it.
    pub fn write(&self) {
        let (runs, overlapped) = self.promised();
        let report = json!({
            "facts": self.facts.json(),
            "runs_that_must_not_overlap": runs,
            "of_these_overlapped": overlapped,
            "not_played": self.not_played,
            "cells": self.rows.iter().map(Row::json).collect::<Vec<_>>(),
        });
        let target = support::target("");
        std::fs::write(target.join("faults.md"), self.markdown()).unwrap();
        std::fs::write(target.join("faults.json"), serde_json::to_string_pretty(&report).unwrap()).unwrap();
    }
}

fn millis(span: Duration) -> String {
    format!("{} ms", span.as_millis())
}
