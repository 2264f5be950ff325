//! What only shows from inside: answers that got lost, leases taken over, sessions that ended. Against a
//! real server; everything a user can see is tested through the binary.

mod deleted;
mod holding;
mod listing;
mod lost_data;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, SystemTime};

use super::*;
use crate::backend::{Busy, within};
use crate::clock;
use crate::lock::{Identity, LastRun, Mode, Outcome, State};

struct Server {
    process: Child,
    directory: PathBuf,
    port: u16,
}

impl Server {
    /// The one that other tests use at the moment, or a new one.
    fn shared() -> Arc<Server> {
        static RUNNING: Mutex<Weak<Server>> = Mutex::new(Weak::new());
        let mut running = RUNNING.lock().unwrap();
        running.upgrade().unwrap_or_else(|| {
            let server = Arc::new(Server::start());
            *running = Arc::downgrade(&server);
            server
        })
    }

    fn start() -> Server {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let directory = std::env::temp_dir().join(format!("dlock-zookeeper-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let settings = format!(
            "tickTime=200\nmaxSessionTimeout=60000\ndataDir={}\nclientPortAddress=127.0.0.1\nclientPort={port}\n\
             admin.enableServer=false\nmaxClientCnxns=0\n",
            directory.display()
        );
        std::fs::write(directory.join("zoo.cfg"), settings).unwrap();
        let process = Command::new("java")
            .args(["-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dzookeeper.forceSync=no"])
            .args(["-cp", "/usr/share/java/zookeeper.jar:/usr/share/java/slf4j-nop.jar"])
            .arg("org.apache.zookeeper.server.quorum.QuorumPeerMain")
            .arg(directory.join("zoo.cfg"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Server { process, directory, port };
        // Its port is open a moment before it serves.
        let begun = clock::now();
        while !server.serves() {
            assert!(begun.elapsed() < Duration::from_secs(60), "the server does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }

    fn serves(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) else { return false };
        // One that is about to may take a question and never answer.
        stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        let mut answer = String::new();
        let asked = stream.write_all(b"srvr").and_then(|()| stream.read_to_string(&mut answer));
        asked.is_ok() && answer.starts_with("Zookeeper version")
    }

    fn client(&self) -> ZooKeeper {
        self.client_under("dlock")
    }

    fn client_under(&self, prefix: &str) -> ZooKeeper {
        let address = Address::parse(&format!("zookeeper://127.0.0.1:{}?prefix={prefix}", self.port)).unwrap();
        let patience = Patience { connect: Duration::from_secs(30), attempt: Duration::from_secs(30) };
        ZooKeeper::open(&address, patience).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn ask(name: &str, mode: Mode) -> Ask {
    Ask {
        name: name.parse().unwrap(),
        who: Identity::of_this_process("true").unwrap(),
        mode,
        ttl: Duration::from_secs(20),
        queue: true,
        once: None,
    }
}

fn ending(lease: &Lease) -> Ending {
    let last_run = LastRun {
        fencing_token: lease.token,
        host: "host".into(),
        user: "user".into(),
        command: "true".into(),
        started_at: SystemTime::UNIX_EPOCH,
        ended_at: None,
        outcome: Outcome::Exited,
        exit_code: Some(0),
        once: None,
        reason: None,
    };
    Ending { last_run: Some(last_run), hold_until: None }
}

fn granted(attempt: Attempt) -> Lease {
    match attempt {
        Attempt::Granted(lease) => lease,
        other => panic!("not granted: {other:?}"),
    }
}

fn busy(attempt: Attempt) -> Busy {
    match attempt {
        Attempt::Busy(busy) => busy,
        other => panic!("not busy: {other:?}"),
    }
}

async fn hinted(client: &mut ZooKeeper) {
    within(Duration::from_secs(60), client.changed()).await.expect("a hint");
}

#[tokio::test]
async fn a_release_wakes_the_next_and_its_token_is_greater() {
    let server = Server::shared();
    let (mut first, mut second) = (server.client(), server.client());
    let (mine, yours) = (ask("order", Mode::Exclusive), ask("order", Mode::Exclusive));
    let held = granted(first.try_acquire(&mine).await.unwrap());
    let waiting = busy(second.try_acquire(&yours).await.unwrap());
    assert_eq!(waiting.ahead, Some(1));
    let came = first.inspect(&mine.name).await.unwrap().waiters[0].waiting_since.unwrap();
    assert_eq!(waiting.holder.unwrap().owner.as_deref(), Some(mine.who.owner.as_str()));
    assert_eq!(first.release(&held, &ending(&held)).await.unwrap(), Released::Done);
    hinted(&mut second).await;
    let next = granted(second.try_acquire(&yours).await.unwrap());
    assert!(next.token > held.token);
    let state = second.inspect(&mine.name).await.unwrap();
    assert_eq!(state.last_run, ending(&held).last_run);
    let holder = state.holder(&yours.who.owner).unwrap();
    assert_eq!(holder.fencing_token, Some(next.token));
    assert!(holder.acquired_at.unwrap() > came, "it did not hold the lock while it waited");
    second.withdraw(&yours).await.unwrap();
    assert_eq!(second.inspect(&mine.name).await.unwrap().state, State::Free);
}

#[tokio::test]
async fn a_place_whose_creation_was_not_answered_is_found_again() {
    let server = Server::shared();
    let mut client = server.client();
    let ask = ask("unanswered", Mode::Exclusive);
    let lease = granted(client.try_acquire(&ask).await.unwrap());
    client.place = None;
    assert_eq!(granted(client.try_acquire(&ask).await.unwrap()).token, lease.token);
    // The same, but in a session that is not ours any more: the place is given up for a new one.
    client.place = None;
    client.ensemble.session = None;
    client.ensemble.attach(ask.ttl).await.unwrap();
    assert!(granted(client.try_acquire(&ask).await.unwrap()).token > lease.token);
    let state = client.inspect(&ask.name).await.unwrap();
    assert_eq!((state.holders.len(), state.waiters.len()), (1, 0));
}

#[tokio::test]
async fn a_renewal_counts_from_itself_and_sees_the_end_of_the_session() {
    let server = Server::shared();
    let mut client = server.client();
    let ask = ask("renewed", Mode::Exclusive);
    let lease = granted(client.try_acquire(&ask).await.unwrap());
    assert_eq!(lease.term.ttl, ask.ttl);
    let before = clock::now();
    let Renewal::Held(term) = client.renew(&lease).await.unwrap() else { panic!("not held") };
    assert!(term.from >= before);
    // Somebody else ends the session, as the server does when it expires.
    let mut other = server.client();
    other.ensemble.session = client.ensemble.session.clone();
    other.ensemble.close().await.unwrap();
    hinted(&mut client).await;
    assert!(matches!(client.renew(&lease).await.unwrap(), Renewal::Lost(_)));
}

#[tokio::test]
async fn a_session_that_was_not_renewed_for_long_is_not_claimed_again() {
    let server = Server::shared();
    let mut client = server.client();
    let ask = ask("forgotten", Mode::Exclusive);
    let lease = granted(client.try_acquire(&ask).await.unwrap());
    // As if the server had been away for long, and had kept the session all the same.
    client.ensemble.session.as_mut().unwrap().proven = clock::now() - 3 * ask.ttl;
    let again = granted(client.try_acquire(&ask).await.unwrap());
    assert!(again.token > lease.token);
    client.ensemble.session.as_mut().unwrap().proven = clock::now() - 3 * ask.ttl;
    assert!(matches!(client.renew(&again).await.unwrap(), Renewal::Lost(_)));
}

#[tokio::test]
async fn a_revoke_is_seen_at_once_and_a_deletion_too() {
    let server = Server::shared();
    let (mut client, mut operator) = (server.client(), server.client());
    let ask = ask("revoked", Mode::Exclusive);
    let lease = granted(client.try_acquire(&ask).await.unwrap());
    let holder = operator.inspect(&ask.name).await.unwrap().holders[0].clone();
    let safely = Revoke::Safely { reason: "maintenance".into() };
    assert_eq!(operator.revoke(&ask.name, &holder, &safely).await.unwrap(), Revoked::Marked);
    hinted(&mut client).await;
    assert!(matches!(client.renew(&lease).await.unwrap(), Renewal::Revoked(reason) if reason == "maintenance"));
    assert_eq!(operator.inspect(&ask.name).await.unwrap().state, State::Revoked);
    assert_eq!(
        operator.revoke(&ask.name, &holder, &Revoke::Now { reason: "stuck".into() }).await.unwrap(),
        Revoked::Freed
    );
    hinted(&mut client).await;
    assert!(matches!(client.renew(&lease).await.unwrap(), Renewal::Taken(why) if why == "stuck"));
    assert_eq!(
        operator.revoke(&ask.name, &holder, &Revoke::Now { reason: "stuck".into() }).await.unwrap(),
        Revoked::NotHeld
    );
    assert_eq!(client.release(&lease, &ending(&lease)).await.unwrap(), Released::Taken("stuck".into()));
}

#[tokio::test]
async fn a_release_whose_answer_was_lost_is_recognised() {
    let server = Server::shared();
    let mut client = server.client();
    let ask = ask("released", Mode::Exclusive);
    let lease = granted(client.try_acquire(&ask).await.unwrap());
    assert_eq!(client.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
    assert_eq!(client.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
}

#[tokio::test]
async fn another_process_of_the_owner_can_move_the_end_of_a_hold() {
    let server = Server::shared();
    let (mut first, mut second) = (server.client(), server.client());
    let ask = ask("handed-on", Mode::Slots(2));
    let (name, owner, hour) = (&ask.name, &ask.who.owner, Duration::from_secs(3600));
    let lease = granted(first.try_acquire(&ask).await.unwrap());
    assert_eq!(second.rehold(name, owner, hour).await.unwrap(), Reheld::Running);
    let kept = Ending { last_run: None, hold_until: Some(clock::now() + hour) };
    assert_eq!(first.release(&lease, &kept).await.unwrap(), Released::Done);
    assert_eq!(first.release(&lease, &kept).await.unwrap(), Released::Done);
    assert_eq!(second.rehold(name, owner, 2 * hour).await.unwrap(), Reheld::Done);
    let holder = second.inspect(name).await.unwrap().holders[0].clone();
    assert_eq!((holder.fencing_token, holder.slot), (Some(lease.token), lease.slot));
    assert!(holder.expires_in.unwrap() > hour);
    // Its slot is still taken.
    let other =
        granted(first.try_acquire(&Ask { who: Identity::of_this_process("").unwrap(), ..ask.clone() }).await.unwrap());
    assert_ne!(other.slot, lease.slot);
    let safely = Revoke::Safely { reason: "maintenance".into() };
    assert_eq!(second.revoke(name, &holder, &safely).await.unwrap(), Revoked::Marked);
    assert_eq!(second.rehold(name, owner, hour).await.unwrap(), Reheld::Revoked("maintenance".into()));
    assert_eq!(second.rehold(name, owner, Duration::ZERO).await.unwrap(), Reheld::Done);
    assert_eq!(second.rehold(name, owner, Duration::ZERO).await.unwrap(), Reheld::NotOurs);
    second.visit().await.unwrap();
    assert_eq!(
        second.ensemble.children("/dlock-meta/handed-on").await.unwrap(),
        [format!("slot-{}", other.slot.unwrap())]
    );
}

#[tokio::test]
async fn slots_are_numbered_and_their_tokens_grow_per_slot() {
    let server = Server::shared();
    let mut clients: Vec<ZooKeeper> = (0..4).map(|_| server.client()).collect();
    let asks: Vec<Ask> = (0..4).map(|_| ask("slots", Mode::Slots(2))).collect();
    let first = granted(clients[0].try_acquire(&asks[0]).await.unwrap());
    let second = granted(clients[1].try_acquire(&asks[1]).await.unwrap());
    assert_eq!((first.slot, second.slot), (Some(0), Some(1)));
    busy(clients[2].try_acquire(&asks[2]).await.unwrap());
    busy(clients[3].try_acquire(&asks[3]).await.unwrap());
    // The first to go is not the one just before the first waiter.
    clients[0].release(&first, &ending(&first)).await.unwrap();
    hinted(&mut clients[2]).await;
    let third = granted(clients[2].try_acquire(&asks[2]).await.unwrap());
    assert_eq!(third.slot, Some(0));
    assert!(third.token > first.token);
    // The last waiter learns that it is now first in line, and then of its turn.
    hinted(&mut clients[3]).await;
    busy(clients[3].try_acquire(&asks[3]).await.unwrap());
    clients[1].release(&second, &ending(&second)).await.unwrap();
    hinted(&mut clients[3]).await;
    let fourth = granted(clients[3].try_acquire(&asks[3]).await.unwrap());
    assert_eq!(fourth.slot, Some(1));
    assert!(fourth.token > second.token);
    let mut other = server.client();
    let attempt = other.try_acquire(&ask("slots", Mode::Slots(3))).await.unwrap();
    assert!(matches!(attempt, Attempt::OtherTerms(_)), "{attempt:?}");
    let attempt = other.try_acquire(&ask("slots", Mode::Exclusive)).await.unwrap();
    assert!(matches!(attempt, Attempt::OtherTerms(_)), "{attempt:?}");
}

#[tokio::test]
async fn a_hold_keeps_its_place_before_those_who_waited_and_then_ends() {
    let server = Server::shared();
    let (mut first, mut second) = (server.client(), server.client());
    let (mine, yours) = (ask("held", Mode::Exclusive), ask("held", Mode::Exclusive));
    let lease = granted(first.try_acquire(&mine).await.unwrap());
    busy(second.try_acquire(&yours).await.unwrap());
    let until = clock::now() + Duration::from_millis(1500);
    let ending = Ending { hold_until: Some(until), ..ending(&lease) };
    assert_eq!(first.release(&lease, &ending).await.unwrap(), Released::Done);
    loop {
        match second.try_acquire(&yours).await.unwrap() {
            Attempt::Granted(_) => break,
            Attempt::Busy(busy) => clock::sleep_until(busy.ask_again).await,
            other => panic!("{other:?}"),
        }
    }
    assert!(until.has_passed());
}

#[tokio::test]
async fn who_does_not_queue_leaves_no_trace() {
    let server = Server::shared();
    let (mut first, mut second) = (server.client(), server.client());
    let mine = ask("no-wait", Mode::Exclusive);
    granted(first.try_acquire(&mine).await.unwrap());
    let impatient = Ask { queue: false, ..ask("no-wait", Mode::Exclusive) };
    busy(second.try_acquire(&impatient).await.unwrap());
    let state = second.inspect(&mine.name).await.unwrap();
    assert_eq!((state.holders.len(), state.waiters.len()), (1, 0));
}

#[tokio::test]
async fn a_recorded_key_is_not_run_again_and_only_success_is_recorded() {
    let server = Server::shared();
    let mut client = server.client();
    let ask = Ask { once: Some("2026-11-16 ä/.".into()), ..ask("once", Mode::Exclusive) };
    for exit_code in [1, 0] {
        let lease = granted(client.try_acquire(&ask).await.unwrap());
        let mut ending = ending(&lease);
        let run = ending.last_run.as_mut().unwrap();
        (run.once, run.exit_code) = (ask.once.clone(), Some(exit_code));
        assert_eq!(client.release(&lease, &ending).await.unwrap(), Released::Done);
    }
    assert!(matches!(client.try_acquire(&ask).await.unwrap(), Attempt::AlreadyRan));
    assert_eq!(client.inspect(&ask.name).await.unwrap().state, State::Free);
}
