//! The verbs against real nodes.

mod late;
mod orders;

use std::time::Duration;

use dlock::backend::redis::answer::number;
use dlock::backend::redlock::{GIVE_BACK, Redlock};
use dlock::backend::{Address, Ask, Attempt, Backend, Lease, Released, Renewal, Revoke, Revoked};
use dlock::clock;
use dlock::exit::Fault;
use dlock::lock::{Mode, State, Token};
use redis::Value;

use super::redis::{Server, ask};
use super::{PATIENCE, busy, ending, granted, told};

fn start(count: usize) -> Vec<Server> {
    (0..count).map(|_| Server::start()).collect()
}

fn client(nodes: &[Server]) -> Redlock {
    let hosts: Vec<String> = nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
    Redlock::open(&Address::parse(&format!("redlock://{}", hosts.join(","))).unwrap(), PATIENCE).unwrap()
}

#[test]
fn a_node_count_that_makes_no_majority_is_refused() {
    for wrong in ["redlock://a", "redlock://a,b", "redlock://a,b,c,d", "redlock://a,b,a"] {
        let error = Redlock::open(&Address::parse(wrong).unwrap(), PATIENCE).err().unwrap();
        assert_eq!(Fault::of(&error), Fault::Config, "{wrong}");
    }
}

#[tokio::test]
async fn a_waiter_is_told_of_the_release_and_the_next_token_is_greater() {
    let nodes = start(3);
    let (mut a, mut b) = (client(&nodes), client(&nodes));
    let (one, two) = (ask(Mode::Exclusive), ask(Mode::Exclusive));
    let first = granted(&mut a, &one).await;
    let theirs = busy(&mut b, &two).await.holder.unwrap();
    assert_eq!(theirs.owner, Some(one.who.owner.to_string()));
    assert!(matches!(a.renew(&first).await.unwrap(), Renewal::Held(_)));
    assert_eq!(a.release(&first, &ending(&first)).await.unwrap(), Released::Done);
    assert_eq!(a.release(&first, &ending(&first)).await.unwrap(), Released::Done);
    told(&mut b).await;
    assert!(granted(&mut b, &two).await.token > first.token);
    let state = b.inspect(&two.name).await.unwrap();
    assert_eq!((state.state, state.nodes.len()), (State::Held, 3));
    assert_eq!(state.last_run, ending(&first).last_run);
}

#[tokio::test]
async fn an_attempt_without_a_majority_leaves_nothing_behind() {
    let nodes = start(5);
    for node in &nodes[..3] {
        node.does(&["SET", "dlock:job/a", "their-uuid", "NX", "PX", "60000"]).await;
    }
    busy(&mut client(&nodes), &ask(Mode::Exclusive)).await;
    for node in &nodes[3..] {
        assert_eq!(node.does(&["EXISTS", "dlock:job/a"]).await, Value::Int(0));
    }
}

#[tokio::test]
async fn tokens_grow_while_nodes_are_out_in_turn() {
    let nodes = start(3);
    let mut last = Token(0);
    for out in nodes.iter().chain(&nodes) {
        out.freeze();
        let mut redlock = client(&nodes);
        let lease = granted(&mut redlock, &ask(Mode::Exclusive)).await;
        assert!(lease.token > last);
        last = lease.token;
        redlock.release(&lease, &ending(&lease)).await.unwrap();
        out.thaw();
        // What was sent to the frozen node is applied now: a take, and that its owner left.
        while out.does(&["EXISTS", "dlock:job/a"]).await != Value::Int(0) {}
    }
}

/// All nodes are asked at once, and each has a third of the time that a verb has: here 20 seconds.
#[tokio::test]
async fn a_dead_node_costs_little() {
    let nodes = start(3);
    let mut a = client(&nodes);
    for (n, out) in nodes.iter().enumerate() {
        out.freeze();
        let (before, one) = (clock::now(), super::ask(&format!("job/{n}"), Mode::Exclusive));
        let lease = granted(&mut a, &one).await;
        assert!(matches!(a.renew(&lease).await.unwrap(), Renewal::Held(_)));
        assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
        assert!(before.elapsed() < Duration::from_secs(15), "it took {:?}", before.elapsed());
        out.thaw();
    }
}

#[tokio::test]
async fn a_lease_counts_from_before_its_requests_could_leave() {
    let nodes = start(3);
    let (mut a, one) = (client(&nodes), ask(Mode::Exclusive));
    a.inspect(&one.name).await.unwrap();
    let thaw = async || {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let thawed = clock::now();
        nodes.iter().for_each(Server::thaw);
        thawed
    };
    nodes.iter().for_each(Server::freeze);
    let (lease, thawed) = tokio::join!(granted(&mut a, &one), thaw());
    assert!(lease.grant.from < thawed);
    nodes.iter().for_each(Server::freeze);
    let (renewal, thawed) = tokio::join!(a.renew(&lease), thaw());
    assert!(matches!(renewal.unwrap(), Renewal::Held(grant) if grant.from < thawed));
}

#[tokio::test]
async fn a_node_that_comes_back_empty_is_taken_again() {
    let nodes = start(3);
    let mut a = client(&nodes);
    let one = ask(Mode::Exclusive);
    let lease = granted(&mut a, &one).await;
    nodes[0].does(&["FLUSHALL"]).await;
    told(&mut a).await;
    renewed_on(&nodes[0], &mut a, &lease).await;
    nodes[1].does(&["FLUSHALL"]).await;
    renewed_on(&nodes[1], &mut a, &lease).await;
    nodes[0].does(&["FLUSHALL"]).await;
    nodes[2].does(&["SET", "dlock:job/a", "thief"]).await;
    assert!(matches!(renewal(&mut a, &lease).await, Renewal::Lost(_)));
}

/// What the nodes say in the end. One that a busy machine keeps from answering with the others is asked again.
async fn renewal(client: &mut Redlock, lease: &Lease) -> Renewal {
    let limit = clock::now() + Duration::from_secs(60);
    loop {
        match client.renew(lease).await {
            Ok(renewal) => return renewal,
            Err(error) => assert!(!limit.has_passed(), "{error:#}"),
        }
    }
}

async fn renewed_on(node: &Server, client: &mut Redlock, lease: &Lease) {
    let limit = clock::now() + Duration::from_secs(60);
    let ours = Value::BulkString(lease.owner.to_string().into());
    while node.does(&["GET", "dlock:job/a"]).await != ours {
        assert!(matches!(renewal(client, lease).await, Renewal::Held(_)));
        assert!(!limit.has_passed(), "it is never taken again");
    }
}

#[tokio::test]
async fn a_node_that_lost_its_data_is_told_by_a_waiter_whom_it_belongs_to() {
    let nodes = start(3);
    let (mut a, mut b) = (client(&nodes), client(&nodes));
    let (one, two) = (ask(Mode::Exclusive), ask(Mode::Exclusive));
    let lease = granted(&mut a, &one).await;
    for _ in 0..2 {
        busy(&mut b, &two).await;
        for node in &nodes {
            node.does(&["FLUSHALL"]).await;
        }
        busy(&mut b, &two).await;
        let left: u64 = number(&nodes[0].does(&["PTTL", "dlock:job/a"]).await).unwrap();
        assert!(Duration::from_millis(left) > one.ttl / 2, "{left} ms");
    }
    // Nobody can have held it in between, and so nothing is lost.
    assert!(matches!(a.renew(&lease).await.unwrap(), Renewal::Held(_)));
    // What was granted since is not undone.
    nodes[0].does(&["FLUSHALL"]).await;
    nodes[0].does(&["SET", "{dlock:job/a}:token", &(lease.token.0 + 1).to_string()]).await;
    busy(&mut b, &two).await;
    assert_ne!(nodes[0].does(&["GET", "dlock:job/a"]).await, Value::BulkString(one.who.owner.to_string().into()));
    a.release(&lease, &ending(&lease)).await.unwrap();
    told(&mut b).await;
    while let Attempt::Busy(busy) = b.try_acquire(&two).await.unwrap() {
        clock::sleep_until(busy.ask_again).await;
    }
}

#[tokio::test]
async fn a_revoked_holder_is_told_and_only_exclusive_locks_are_had() {
    let nodes = start(3);
    let (mut a, mut operator, one) = (client(&nodes), client(&nodes), ask(Mode::Exclusive));
    let error = a.try_acquire(&ask(Mode::Shared)).await.unwrap_err();
    assert_eq!(Fault::of(&error), Fault::Usage);
    let lease = granted(&mut a, &one).await;
    let seen = operator.inspect(&one.name).await.unwrap().holders.remove(0);
    let safely = Revoke::Safely { reason: "maintenance".into() };
    assert_eq!(operator.revoke(&one.name, &seen, &safely).await.unwrap(), Revoked::Marked);
    told(&mut a).await;
    assert!(matches!(a.renew(&lease).await.unwrap(), Renewal::Revoked(reason) if reason == "maintenance"));
    assert_eq!(operator.inspect(&one.name).await.unwrap().state, State::Revoked);
    assert_eq!(
        operator.revoke(&one.name, &seen, &Revoke::Now { reason: "stuck".into() }).await.unwrap(),
        Revoked::Freed
    );
    assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::ForceReleased("stuck".into()));
    let mut names = Vec::new();
    let mut after = None;
    loop {
        let page = operator.list(after).await.unwrap();
        names.extend(page.locks.into_iter().map(|lock| lock.name));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(names, [one.name]);
}

#[tokio::test]
async fn waiters_have_their_turn_one_after_the_other() {
    let nodes = start(5);
    let [mut a, mut b, mut c] = [client(&nodes), client(&nodes), client(&nodes)];
    let [one, two, three] = [ask(Mode::Exclusive), ask(Mode::Exclusive), ask(Mode::Exclusive)];
    let first = granted(&mut a, &one).await;
    assert_eq!(busy(&mut b, &two).await.ahead, Some(0));
    assert_eq!(busy(&mut c, &three).await.ahead, Some(1));
    a.release(&first, &ending(&first)).await.unwrap();
    told(&mut b).await;
    // It has time to come, however long this machine takes: nobody knows since when it has been its turn.
    for node in &nodes {
        node.does(&["DEL", &format!("{{dlock:job/a}}:turn:{}", two.who.owner)]).await;
    }
    let free = busy(&mut c, &three).await;
    assert_eq!((free.ahead, free.holder.is_none()), (Some(1), true), "it is free, but not for them");
    let second = granted(&mut b, &two).await;
    told(&mut c).await;
    assert_eq!(busy(&mut c, &three).await.ahead, Some(0));
    b.release(&second, &ending(&second)).await.unwrap();
    told(&mut c).await;
    granted(&mut c, &three).await;
}

#[tokio::test]
async fn a_first_that_does_not_come_is_passed_over() {
    let nodes = start(3);
    let [mut a, mut gone, mut c] = [client(&nodes), client(&nodes), client(&nodes)];
    let [one, two, three] = [ask(Mode::Exclusive), ask(Mode::Exclusive), ask(Mode::Exclusive)];
    let first = granted(&mut a, &one).await;
    busy(&mut gone, &two).await;
    busy(&mut c, &three).await;
    a.release(&first, &ending(&first)).await.unwrap();
    let mut refused = 0;
    while let Attempt::Busy(busy) = c.try_acquire(&three).await.unwrap() {
        refused += 1;
        clock::sleep_until(busy.ask_again).await;
    }
    assert!(refused <= 3, "refused {refused} times");
    assert!(matches!(gone.try_acquire(&two).await.unwrap(), Attempt::Busy(busy) if busy.ahead == Some(0)));
}

#[tokio::test]
async fn nodes_with_different_firsts_keep_nobody_out_for_long() {
    let nodes = start(3);
    for (node, other) in nodes.iter().zip(["x", "y"]) {
        node.does(&["ZADD", "{dlock:job/a}:queue", "1", other]).await;
        node.does(&["ZADD", "{dlock:job/a}:places", "99999999999999", other]).await;
    }
    let (mut a, one) = (client(&nodes), ask(Mode::Exclusive));
    busy(&mut a, &one).await;
    // On a busy machine a node may be too slow to count. Nobody is passed over: it is never known since when it is whose
    // turn.
    for _ in 0..50 {
        for (node, other) in nodes.iter().zip(["x", "y"]) {
            node.does(&["DEL", &format!("{{dlock:job/a}}:turn:{other}")]).await;
        }
        if let Attempt::Granted(_) = a.try_acquire(&one).await.unwrap() {
            return;
        }
    }
    panic!("it was kept out");
}

#[tokio::test]
async fn what_was_taken_again_is_not_given_back_by_an_older_request() {
    let nodes = start(3);
    let (mut a, one) = (client(&nodes), ask(Mode::Exclusive));
    let lease = granted(&mut a, &one).await;
    let keys = a.keys(&one.name);
    let late = [one.who.owner.as_str(), "0", "", "0", "0", "0", "60000", ""];
    for node in &nodes {
        node.link().run::<Value>(&GIVE_BACK, &keys, &late).await.unwrap();
        assert_eq!(node.does(&["GET", "dlock:job/a"]).await, Value::BulkString(one.who.owner.to_string().into()));
    }
    a.withdraw(&one).await.unwrap();
    assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::NotOurs);
}

#[tokio::test]
async fn what_is_known_of_the_dead_is_gone_in_the_end_but_not_before_a_lease() {
    const DAY: Duration = Duration::from_secs(86400);
    let nodes = start(3);
    let long = Ask { ttl: 9 * DAY, ..ask(Mode::Exclusive) };
    let lease = granted(&mut client(&nodes), &long).await;
    busy(&mut client(&nodes), &ask(Mode::Exclusive)).await;
    assert!(matches!(client(&nodes).renew(&lease).await.unwrap(), Renewal::Held(_)));
    for (part, least, most) in [("queue", 0, 2), ("places", 0, 2), ("details", 9, 11)] {
        let left: u64 = number(&nodes[0].does(&["PTTL", &format!("{{dlock:job/a}}:{part}")]).await).unwrap();
        assert!((least * DAY..most * DAY).contains(&Duration::from_millis(left)), "{part}: {left} ms");
    }
}
