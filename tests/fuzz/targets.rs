//! The parsers, and what they are fed with. Each tells whether it understood the input.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use dlock::backend::etcd::queue::Details;
use dlock::backend::redis::answer::Acquire;
use dlock::backend::redis::status::Look;
use dlock::backend::redlock::nodes::Answer;
use dlock::backend::zookeeper::queue::Queue;
use dlock::backend::zookeeper::wire::{self, Connected};
use dlock::backend::{self, Address, file, postgres, sql, zookeeper};
use dlock::commands::status::table::lines;
use dlock::commands::table::Screen;
use dlock::config::ConfigFile;
use dlock::guardian::wire::{GuardianEvent, Link, Order};
use dlock::lock::{Holder, Identity, LastRun, LockName, LockState, Mode, Record};
use dlock::report::{describe, escape, json_escaped};
use nix::sys::socket::{MsgFlags, send};
use redis::FromRedisValue;

pub struct Target {
    pub name: &'static str,
    pub corpus: fn() -> Vec<Vec<u8>>,
    /// What means something to the parser, put in anywhere.
    pub words: &'static [&'static str],
    pub parse: fn(&[u8]) -> bool,
}

pub const TARGETS: [Target; 13] = [
    Target { name: "url", corpus: urls, words: &["://", "@", "%", "[", "]", ",", "?", "&", "=", ":"], parse: url },
    Target { name: "config", corpus: configs, words: TOML, parse: config },
    Target { name: "identity", corpus: contenders, words: JSON, parse: identity },
    Target { name: "last-run", corpus: last_runs, words: JSON, parse: last_run },
    Target { name: "file-record", corpus: file_records, words: JSON, parse: file_record },
    Target { name: "file-token", corpus: tokens, words: &[" ", "-", "\n"], parse: token },
    Target { name: "etcd-record", corpus: contenders, words: JSON, parse: etcd_record },
    Target { name: "zookeeper-record", corpus: contenders, words: JSON, parse: zookeeper_record },
    Target { name: "zookeeper", corpus: answers_of_zookeeper, words: &[], parse: zookeeper_answer },
    Target {
        name: "zookeeper-queue",
        corpus: queues,
        words: &["\n", "-slots-2", "-shared", "-hold-1", "__lock__"],
        parse: queue,
    },
    Target { name: "redis", corpus: answers_of_redis, words: RESP, parse: redis_answer },
    Target { name: "postgres", corpus: answers_of_postgres, words: JSON, parse: postgres_answer },
    Target { name: "guardian", corpus: messages, words: JSON, parse: message },
];

const JSON: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    "\"",
    ":",
    ",",
    "null",
    "true",
    "\\u0000",
    "\\ud800",
    "1e400",
    "\u{202e}",
    "9999-12-31T23:59:59Z",
];
const TOML: &[&str] = &["[", "]", "=", "'", "\"", "\n", "[backends.x]\n", "url = 'redis://h'\n", "ttl = ", "{", "}"];
const RESP: &[&str] = &["\r\n", "*", "$", ":", "%", ">", "_\r\n", "*-1\r\n", "$0\r\n\r\n", "*1\r\n", "~2\r\n", "="];

fn bytes(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

fn urls() -> Vec<Vec<u8>> {
    bytes(&[
        "file:///run/lock/dlock",
        "redis://me:s%40fe@a:1,b,[::1]:3/2?prefix=x%2F&tls-ca=/ca.pem",
        "redis+sentinel://h:26379,i:26379/mymaster?username=u&password-file=/run/secret",
        "rediss+cluster://h?tls-cert=c&tls-key=k",
        "redlock://a,b,c:6380?prefix=p:",
        "etcds://root:p%3Aw@[fe80::1]:2379,e2/locks",
        "zookeeper://z1,z2:2182,z3/curator?recipe=kazoo",
        "postgres://u:p@db:5432/jobs?sslmode=verify-full&schema=dlock",
    ])
}

fn url(input: &[u8]) -> bool {
    let Ok(text) = str::from_utf8(input) else { return false };
    match Address::parse(text) {
        Ok(address) => {
            let _ = (address.to_string(), address.username(), address.has_password());
            let _: Vec<_> = address.hosts().iter().map(|host| host.with_port(1)).collect();
            backend::kind(&address).is_ok()
        }
        Err(error) => format!("{error:#}").is_empty(),
    }
}

fn configs() -> Vec<Vec<u8>> {
    bytes(&[
        "backend = \"lan\"\nttl = \"1m\"\nwait = '5m'\nverbose = true\nconflict-exit-code = 75\n",
        "ttl = 60\nkill-after = 2.5\n[backends.lan]\nurl = 'redis://a,b/1'\nttl = '9s'\nprefix = 'x:'\n",
        "[backends.pg]\nurl = \"postgres://u@h/db\"\nsslmode = \"require\"\npassword-file = '/run/pw'\n",
        "# nothing\n\n[backends]\nzk = { url = 'zk://z1,z2', recipe = 'kazoo' }\n",
    ])
}

fn config(input: &[u8]) -> bool {
    let Ok(text) = str::from_utf8(input) else { return false };
    let parsed = ConfigFile::parse(Path::new("config.toml"), text);
    if let Err(error) = &parsed {
        assert!(!format!("{error:#}").contains('\n'), "an error of several lines: {error:#}");
    }
    parsed.is_ok()
}

/// What etcd and ZooKeeper keep of a contender, and what is read of both: the identity.
fn contenders() -> Vec<Vec<u8>> {
    bytes(&[
        r#"{"owner":"web1.4242.00ff","host":"web1","pid":4242,"user":"root","command":"./report.sh --all","mode":"exclusive","ttl_ms":30000,"waiting_since":"2026-11-16T10:00:00.000Z"}"#,
        r#"{"owner":"w-2.7.1a","host":"w 2","pid":7,"user":"ü","command":"sh -c \"x\"","mode":{"slots":3},"ttl_ms":9000,"waiting_since":"2026-11-16T10:00:00Z","held_since":"2026-11-16T10:00:01Z","slot":2,"token":77}"#,
        r#"{"owner":"z.1.2","host":"z","pid":1,"user":"u","command":"c","ttl_ms":30000,"acquired_ms":1763287200000,"slot":{"number":1,"token":4294967301},"revoked":"because","hold":{"lasts_ms":60000,"token":9,"in_use":true}}"#,
    ])
}

fn last_runs() -> Vec<Vec<u8>> {
    bytes(&[
        r#"{"fencing_token":41,"host":"web1","user":"root","command":"./report.sh","started_at":"2026-11-16T10:00:00.000Z","ended_at":"2026-11-16T10:00:02.500Z","outcome":"exited","exit_code":0,"once":"2026-11-16"}"#,
        r#"{"fencing_token":18446744073709551615,"host":"h","user":"u","command":"c","started_at":"1970-01-01T00:00:00Z","ended_at":null,"outcome":"timed_out","exit_code":null,"once":null,"reason":"an operator"}   "#,
    ])
}

fn identity(input: &[u8]) -> bool {
    let who = Identity::from_json(&String::from_utf8_lossy(input));
    who.map(|who| show(with_holder(Holder::from(who)))).is_some()
}

fn last_run(input: &[u8]) -> bool {
    let Some(run) = LastRun::from_json(&String::from_utf8_lossy(input)) else { return false };
    assert!(LastRun::from_json(&run.to_json()).is_some(), "what was read cannot be written: {run:?}");
    show(LockState { last_run: Some(run), ..free() });
    true
}

fn file_records() -> Vec<Vec<u8>> {
    bytes(&[
        r#"{"owner":"web1.4242.00ff","host":"web1","pid":4242,"user":"root","command":"./report.sh","mode":"exclusive","token":1763287200000000,"slot":null,"since":1763287200000,"ttl_ms":30000,"inode":17,"hold":null}"#,
        r#"{"owner":"web1.4242.00ff","host":"web1","pid":4242,"user":"root","command":"./report.sh","mode":{"slots":2},"token":0,"slot":1,"since":1763287200000,"ttl_ms":30000,"inode":17,"hold":{"boot":"0-1","until_boot_ns":"00000000060000000000","until_ms":"00001763287260000000","ttl_ms":"00000000000000060000"},"ended":true}"#,
    ])
}

thread_local! {
    /// In memory. What is read from a file is read from this one.
    static FILE: File = tempfile::tempfile_in("/dev/shm").unwrap();
    static LINK: (Link, Link) = Link::pair().unwrap();
}

fn with_file<T>(input: &[u8], read: impl FnOnce(&File) -> T) -> T {
    FILE.with(|file| {
        file.set_len(input.len() as u64).unwrap();
        file.write_all_at(input, 0).unwrap();
        read(file)
    })
}

fn file_record(input: &[u8]) -> bool {
    let Some(record) = with_file(input, Record::<file::record::Details>::read_from) else { return false };
    let _ = (record.ttl(), record.held_on_for());
    show(with_holder(Holder { ttl: Some(record.ttl()), ..Holder::from(record.who) }));
    true
}

fn tokens() -> Vec<Vec<u8>> {
    bytes(&[
        "00000000000000000042\n",
        "00001763287200000000 00001763290800000000 3b6c8c1e-0000-4000-8000-000000000000\n",
    ])
}

fn token(input: &[u8]) -> bool {
    const DATE: u64 = 1_763_287_200_000_000;
    let next = || FILE.with(|file| file::acquire::advance(file, DATE, "this-boot").unwrap());
    let first = with_file(input, |_| next());
    let second = next();
    assert!(first.0 >= DATE && second > first && i64::try_from(second.0).is_ok(), "{first:?} {second:?}");
    true
}

fn etcd_record(input: &[u8]) -> bool {
    let Some(record) = Record::<Details>::from_json(input) else { return false };
    let written = record.to_json();
    assert!(Record::<Details>::from_json(written.as_bytes()).is_some(), "what was read cannot be written: {written}");
    true
}

fn zookeeper_record(input: &[u8]) -> bool {
    let Some(record) = Record::<zookeeper::queue::Details>::read(input) else { return false };
    assert!(Record::<zookeeper::queue::Details>::read(record.to_json().as_bytes()).is_some());
    let (ttl, expires_in) = (Some(record.details.ttl()), record.details.hold.map(|hold| hold.lasts()));
    show(with_holder(Holder { ttl, expires_in, ..Holder::from(record.who) }));
    true
}

/// Frames as a server sends them, without their length.
fn answers_of_zookeeper() -> Vec<Vec<u8>> {
    fn string(text: &[u8]) -> Vec<u8> {
        [&(text.len() as i32).to_be_bytes(), text].concat()
    }
    let header = [&7i32.to_be_bytes()[..], &4_294_967_301i64.to_be_bytes(), &0i32.to_be_bytes()].concat();
    let stat: Vec<u8> = [1i64, 2, 1_763_287_200_000, 1_763_287_200_001].iter().flat_map(|n| n.to_be_bytes()).collect();
    let stat = [&stat[..], &[0; 12], &77i64.to_be_bytes(), &[0; 12]].concat();
    let part = |op: i32, error: i32| [&op.to_be_bytes()[..], &[0], &error.to_be_bytes()].concat();
    let created = [part(1, 0), string(b"/lock/x/_c_1-lock-0000000007")].concat();
    let multi = [part(-1, 0), 0i32.to_be_bytes().to_vec(), part(-1, -101), (-101i32).to_be_bytes().to_vec()].concat();
    let children: Vec<u8> = [string(b"a-lock-0000000001"), string(b"b"), string(b"")].concat();
    let connected =
        [&0i32.to_be_bytes()[..], &30_000i32.to_be_bytes(), &99i64.to_be_bytes(), &string(&[7; 16])].concat();
    let with_header = |body: &[u8]| [&header[..], body].concat();
    vec![
        connected,
        with_header(&stat),
        with_header(&[string(b"/lock/x"), stat.clone()].concat()),
        with_header(&[string(br#"{"owner":"x"}"#), stat].concat()),
        with_header(&[3i32.to_be_bytes().to_vec(), children].concat()),
        with_header(&created),
        with_header(&multi),
        [&(-1i32).to_be_bytes()[..], &[0xff; 8], &[0; 4], &string(b"/lock/x")].concat(),
    ]
}

fn zookeeper_answer(input: &[u8]) -> bool {
    let _ = Connected::read(input);
    let Ok(Some((_, Ok(body)))) = wire::read_frame(input) else { return false };
    let read = [
        wire::read_stat(&body).is_ok(),
        wire::read_data(&body).is_ok(),
        wire::read_children(&body).is_ok(),
        wire::multi_refusal(&body).is_ok(),
    ];
    read.contains(&true)
}

/// The names of a lock's children, one a line.
fn queues() -> Vec<Vec<u8>> {
    let curator = "_c_0a1b2c3d-0a1b-2c3d-4e5f-0a1b2c3d4e5f-lock-0000000007";
    let kazoo = "0a1b2c3d0a1b2c3d4e5f0a1b2c3d4e5f__lock__0000000009";
    let tagged = |tag: &str| curator.replace("-lock-", &format!("{tag}-lock-"));
    bytes(&[
        &format!("{curator}\n{kazoo}\n0a__rlock__0000000003\nlast"),
        &[tagged("-shared"), tagged("-hold-2-shared"), kazoo.to_owned()].join("\n"),
        &[tagged("-slots-3"), tagged("-hold-1-slots-3"), tagged("-slots-2")].join("\n"),
    ])
}

fn queue(input: &[u8]) -> bool {
    let names: Vec<String> = String::from_utf8_lossy(input).lines().take(50).map(str::to_owned).collect();
    let queue = Queue::new(&names);
    for position in 0..queue.entries.len() {
        assert!(queue.ahead(position).len() <= position, "nobody is ahead who comes later");
        let _ = queue.holds(position);
    }
    let _ = queue.alive_without_place(&names, Mode::Exclusive);
    !queue.entries.is_empty()
}

fn answers_of_redis() -> Vec<Vec<u8>> {
    let who = r#"exclusive 30000 1763287200000 41 0 {"owner":"web1.4242.00ff","host":"web1","pid":4242,"user":"root","command":"x"}"#;
    let bulk = |text: &str| format!("${}\r\n{text}\r\n", text.len());
    let holder = format!("*4\r\n{}$5\r\n30000\r\n{}:1\r\n", bulk("web1.4242.00ff"), bulk(who));
    let waiter = format!("*3\r\n{}$4\r\n6000\r\n{}", bulk("w2.1.2"), bulk(who));
    let last = String::from_utf8(last_runs().swap_remove(0)).unwrap();
    let state = format!("*6\r\n{}{}{}:1\r\n{holder}{waiter}", bulk("state"), bulk("slots:3"), bulk(&last));
    let mut answers = bytes(&[
        "+OK\r\n:1\r\n$-1\r\n",
        "*4\r\n$7\r\ngranted\r\n:41\r\n$-1\r\n:30000\r\n",
        "*5\r\n$3\r\na\r\n\r\n:-7\r\n$-1\r\n*1\r\n+OK\r\n_\r\n",
        "-NOAUTH Authentication required.\r\n",
        "%2\r\n+server\r\n+redis\r\n+proto\r\n:3\r\n>2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n",
        "~1\r\n,3.25\r\n(3492890328409238509324850943850943825024385\r\n#t\r\n=7\r\ntxt:abc\r\n!5\r\nERR x\r\n",
    ]);
    answers.push(state.into_bytes());
    answers
}

/// The crate's parser, and what we make of its values.
fn redis_answer(input: &[u8]) -> bool {
    let Ok(value) = redis::parse_redis_value(input) else { return false };
    if let Ok(look) = Look::from_redis_value_ref(&value) {
        show(look.of(&name()));
    }
    let _ = (Acquire::from_redis_value_ref(&value), Answer::from_redis_value_ref(&value));
    true
}

fn answers_of_postgres() -> Vec<Vec<u8>> {
    let last = String::from_utf8(last_runs().swap_remove(0)).unwrap();
    let who = r#"{"owner":"web1.4242.00ff","host":"web1","pid":4242,"user":"root","command":"x"}"#;
    let holder = format!(
        r#"{{"owner":"web1.4242.00ff","who":{who},"mode":"slots","slots":3,"fencing_token":41,"slot":1,"since":"2026-11-16T10:00:00.000Z","ttl_ms":30000,"expires_in_ms":29000,"revoked":null}}"#
    );
    let waiter = holder.replace("41", "null").replace(who, "null");
    let status = format!(r#"{{"name":"nightly","last_run":{last},"contenders":[{holder},{waiter}]}}"#);
    bytes(&[&holder, &waiter, &status])
}

fn postgres_answer(input: &[u8]) -> bool {
    let Ok(text) = str::from_utf8(input) else { return false };
    let contender = sql::contender(text);
    let state = postgres::answer::state(text);
    let understood = contender.is_ok() || state.is_ok();
    contender.map(|contender| show(with_holder(contender))).ok();
    state.map(show).ok();
    understood
}

fn messages() -> Vec<Vec<u8>> {
    bytes(&[
        r#"{"Start":{"variables":{"DLOCK_NAME":"x","DLOCK_FENCING_TOKEN":"41"},"deadlines":{"signal_at":{"secs":25,"nanos":0},"kill_at":{"secs":29,"nanos":100},"end":{"secs":29,"nanos":9}},"sent":{"secs":3,"nanos":7}}}"#,
        r#"{"Extend":{"deadlines":{"signal_at":{"secs":25,"nanos":0},"kill_at":{"secs":29,"nanos":100},"end":{"secs":29,"nanos":9}},"sent":{"secs":3,"nanos":7}}}"#,
        r#"{"Signal":15}"#,
        r#"{"End":{"grace":5000000000}}"#,
        r#"{"Linger":{"until":60000000000}}"#,
        r#"{"NotStarted":{"errno":2}}"#,
        r#""TooLate""#,
        r#""Expired""#,
        r#"{"Empty":{"status":256,"leftovers":3}}"#,
    ])
}

fn message(input: &[u8]) -> bool {
    if input.is_empty() {
        return false;
    }
    LINK.with(|(ours, theirs)| {
        let send = |link: &Link| send(link.as_fd().as_raw_fd(), input, MsgFlags::empty()).unwrap();
        send(ours);
        send(theirs);
        let (order, report) = (theirs.receive::<Order>(), ours.receive::<GuardianEvent>());
        order.is_ok() || report.is_ok()
    })
}

fn name() -> LockName {
    "nightly".parse().unwrap()
}

fn free() -> LockState {
    LockState::free(name(), "fuzz")
}

fn with_holder(holder: Holder) -> LockState {
    let _ = escape(describe(&holder));
    let waiter =
        Holder { owner: holder.owner.clone(), expires_in: Some(Duration::MAX), waits: true, ..Holder::default() };
    LockState { holders: vec![holder], waiters: vec![waiter], ..free() }
}

/// What was read can be shown, as JSON and as a table, and does no harm to a terminal.
fn show(state: LockState) {
    let json = json_escaped(&serde_json::to_string(&state).unwrap());
    assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok(), "{json}");
    let screen = Screen { width: Some(80), height: None, color: false, strict: true };
    let table = lines(&mut None, &[state], screen);
    assert!(!table.contains(|c: char| c != '\n' && c.is_control()), "{table:?}");
}
