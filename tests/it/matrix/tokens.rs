//! Fencing tokens over many grants: each is greater than the one before, whoever gets it, by `run` or by `acquire`, and
//! also after all servers were killed and came back with their data.
//!
//! `tests/run` asks for a few; `tests/run --tokens [N [BACKEND]]` for N in all (default 100,000), and writes `target/tokens.md`.

use std::path::Path;
use std::time::{Duration, Instant};

use super::site::{Backend, Site, covered, named_place};
use crate::support::{Bed, Dlock, etcd, file, lines, postgres, redis, target, until};

/// So many take turns on each backend.
const CLIENTS: usize = 4;

/// Takes the lock `$2` times. A line is written under the lock, so lines have the order of the grants. A server on a busy
/// machine may be too slow to be reached (69): then it is asked again.
const CLIENT: &str = r#"
    for ((n = 0; n < $2; n++)); do
        if ((n % 10 == 9)); then
            until eval "$("$0" acquire --name tokens)"; do (($? == 69)) || exit; done
            echo "$DLOCK_FENCING_TOKEN" >>"$1"
            until "$0" release --name tokens --owner "$DLOCK_OWNER"; do (($? == 69)) || exit; done
        else
            until "$0" run --name tokens -- sh -c 'echo $DLOCK_FENCING_TOKEN >>"$0"' "$1"; do (($? == 69)) || exit; done
        fi
    done"#;

struct Counted {
    backend: Backend,
    tokens: Vec<u64>,
    took: Duration,
}

/// About so many grants on one backend, with a crash of all its servers in the middle.
fn count(backend: Backend, grants: usize) -> Counted {
    let (site, home) = (Site::open(backend), tempfile::tempdir().unwrap());
    let file = home.path().join("tokens");
    let mut took = Duration::ZERO;
    let half = grants.div_ceil(2 * CLIENTS);
    for _ in 0..2 {
        let begun = Instant::now();
        take_turns(&site, &file, half);
        took += begun.elapsed();
        site.servers.iter().for_each(|server| server.kill());
        site.servers.iter().for_each(|server| server.start_again());
        until("the servers to be back", || site.dlock().run("first").sh("exit 0").ended().code == Some(0));
    }
    let tokens: Vec<u64> = lines(&file).iter().map(|line| line.parse().unwrap()).collect();
    assert_eq!(tokens.len(), 2 * half * CLIENTS, "{}: a grant without a token", backend.name);
    Counted { backend, tokens, took }
}

fn take_turns(site: &Site, file: &Path, each: usize) {
    let dlock = assert_cmd::cargo::cargo_bin!("dlock");
    let client = || {
        let bash = Dlock::played_by("bash").env("DLOCK_BACKEND", site.url()).env("DLOCK_CONNECT_TIMEOUT", "30s");
        bash.args(["-c", CLIENT]).arg(dlock).arg(file).arg(each.to_string()).spawn()
    };
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| client()).collect();
    // As long as it goes on it may take as long as it likes.
    while clients.iter_mut().any(|client| !client.has_ended()) {
        let before = lines(file).len();
        until("another grant", || lines(file).len() > before || clients.iter_mut().all(|client| client.has_ended()));
    }
    clients.into_iter().for_each(|client| drop(client.ended().expect(0)));
}

impl Counted {
    fn grow(&self) -> bool {
        self.tokens.windows(2).all(|pair| pair[0] < pair[1])
    }

    fn markdown(&self) -> String {
        format!(
            "| {} | {} | {} | {} | {} | {:.0} |\n",
            self.backend.name,
            self.tokens.len(),
            self.tokens[0],
            self.tokens[self.tokens.len() - 1],
            if self.grow() { "yes" } else { "NO" },
            self.tokens.len() as f64 / self.took.as_secs_f64(),
        )
    }
}

#[test]
fn every_token_is_greater_than_the_one_before() {
    let asked: Option<usize> = std::env::var("DLOCK_TOKENS").ok().map(|grants| grants.parse().unwrap());
    let few: [Backend; 4] = [&file::FILE, &redis::REDIS, &etcd::ETCD, &postgres::POSTGRES];
    let named = std::env::var("DLOCK_TOKENS_BACKEND").ok().filter(|name| !name.is_empty());
    let backends = match (named, asked) {
        (Some(name), _) => vec![named_place(&name)],
        (None, Some(_)) => covered(),
        (None, None) => few.to_vec(),
    };
    let each = asked.unwrap_or(40 * backends.len()).div_ceil(backends.len());
    let mut table = String::from(
        "| backend | grants | first token | last token | strictly increasing | grants a second |\n\
         | --- | --- | --- | --- | --- | --- |\n",
    );
    let mut all = Vec::new();
    for backend in backends {
        let counted = count(backend, each);
        eprint!("{}", counted.markdown());
        table += &counted.markdown();
        all.push(counted);
    }
    let grants: usize = all.iter().map(|one| one.tokens.len()).sum();
    table += &format!("\n{grants} grants in all.\n");
    eprintln!("\n{table}");
    if asked.is_some() {
        std::fs::write(target("tokens.md"), &table).unwrap();
    }
    assert!(all.iter().all(Counted::grow), "{table}");
}
