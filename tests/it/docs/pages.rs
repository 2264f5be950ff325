//! What holds for all pages together: every link leads somewhere, and every test that a page names exists.

use std::path::{Path, PathBuf};

use super::root;
use crate::matrix::Fault;

/// The pages that no test names: they need no server, and nothing else that is special.
pub fn without_a_test_of_their_own() -> Vec<String> {
    let tests = include_str!("mod.rs");
    pages().into_iter().filter(|page| !tests.contains(&format!("Tour::of({page:?})"))).collect()
}

/// The README and everything under docs/, by their paths in the repository.
fn pages() -> Vec<String> {
    let mut found = vec!["README.md".to_owned()];
    let mut folders = vec![PathBuf::from("docs")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(root().join(&folder)).unwrap().flatten() {
            let path = folder.join(entry.file_name());
            if entry.path().is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "md") {
                found.push(path.display().to_string());
            }
        }
    }
    found
}

fn text(page: &str) -> String {
    std::fs::read_to_string(root().join(page)).unwrap()
}

/// In the order in which they should be read.
#[test]
fn the_index_leads_to_every_page() {
    let index = text("docs/README.md");
    for page in pages().iter().filter_map(|page| page.strip_prefix("docs/")).filter(|page| *page != "README.md") {
        assert!(index.contains(&format!("]({page})")), "docs/README.md does not name {page}");
    }
}

#[test]
fn every_link_leads_somewhere() {
    for page in pages() {
        let text = text(&page);
        let folder = Path::new(&page).parent().unwrap();
        for link in text.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            if file.starts_with("http") {
                continue;
            }
            let target = if file.is_empty() { PathBuf::from(&page) } else { folder.join(file) };
            assert!(root().join(&target).exists(), "{page}: {link} leads nowhere");
            if !heading.is_empty() {
                let there = std::fs::read_to_string(root().join(&target)).unwrap();
                let known = there.lines().filter(|line| line.starts_with('#')).any(|line| anchor(line) == heading);
                assert!(known, "{page}: {link} has no such heading");
            }
        }
    }
}

/// As GitHub makes it of a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().to_lowercase();
    kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).collect::<String>().replace(' ', "-")
}

/// They are written `path/of/file.rs` and, for one function of it, `path/of/file.rs: name`.
#[test]
fn every_test_that_a_page_names_exists() {
    let mut named = 0;
    for page in pages() {
        let is_test = |code: &&str| code.starts_with("tests/") && code.contains(".rs");
        for code in text(&page).split('`').filter(is_test) {
            let (file, function) = code.split_once(": ").unwrap_or((code, ""));
            let source = std::fs::read_to_string(root().join(file)).unwrap_or_default();
            let is_there = !source.is_empty() && (function.is_empty() || source.contains(&format!("fn {function}(")));
            assert!(is_there, "{page} names {code}, which is not there; {}", whereabouts(function));
            named += usize::from(!function.is_empty());
        }
    }
    assert!(named > 30, "docs/guarantees.md names its tests");
}

/// Where a test has gone that was moved.
fn whereabouts(function: &str) -> String {
    let mut grep = std::process::Command::new("grep");
    let found = grep.args(["-rlw", &format!("fn {function}"), "tests"]).current_dir(root()).output().unwrap().stdout;
    format!("it is in: {}", String::from_utf8_lossy(&found).trim())
}

/// They are written `fault: its name`, and stand in the table of docs/faults.md.
#[test]
fn every_fault_that_a_page_names_is_played() {
    let guarantees = text("docs/guarantees.md");
    let named: Vec<_> = guarantees.split('`').filter_map(|code| code.strip_prefix("fault: ")).collect();
    assert!(named.len() > 10);
    for fault in named.into_iter().filter(|fault| *fault != "…") {
        assert!(Fault::ALL.iter().any(|known| known.name() == fault), "no fault is called {fault:?}");
    }
}

#[test]
fn the_readme_is_short_and_has_every_exit_code() {
    let readme = text("README.md");
    assert!(readme.lines().count() <= 250);
    for code in ["128+N", "64", "65", "69", "75", "77", "78", "79", "124", "125, 126, 127"] {
        assert!(readme.contains(&format!("| {code} |")), "{code} is missing");
    }
}

/// The one line that the README has about it.
#[test]
fn the_readme_says_of_faults_what_was_measured() {
    let measured =
        text("docs/faults.md").lines().find(|line| line.contains(" runs that must not overlap did")).map(|line| {
            let numbers: Vec<_> = line.split_whitespace().filter(|word| word.parse::<u32>().is_ok()).take(2).collect();
            numbers.join(" of ")
        });
    let readme = text("README.md").replace(',', "");
    assert!(readme.contains(&format!("{} runs", measured.unwrap())), "docs/faults.md says {:?}", "0 of N");
    assert!(readme.contains(&format!("under {} kinds of faults", Fault::ALL.len())));
}
