//! Requests that reach a node after their owner has sent newer ones, or has gone.

use dlock::backend::Address;
use dlock::backend::redis::Script;
use dlock::backend::redis::answer::{items, number, text};
use dlock::backend::redis::server;
use dlock::backend::redlock::acquire::{RAISE, TAKE};
use dlock::backend::redlock::{GIVE_BACK, RELEASE, RENEW, REVOKE, Redlock};

use redis::Value;

use super::super::PATIENCE;
use super::super::redis::Server;

/// What is done about the queue when a node is given back.
#[derive(Clone, Copy, PartialEq)]
pub enum Then {
    Wait,
    Leave,
}

impl Then {
    pub fn flag(self) -> &'static str {
        if self == Then::Wait { "1" } else { "0" }
    }
}

/// One node, and the requests of one owner in whatever order they arrive.
pub struct Arrivals {
    node: Server,
    pub link: server::Server,
    pub keys: Vec<String>,
}

impl Arrivals {
    pub fn new() -> Arrivals {
        let node = Server::start();
        let link = node.link();
        let redlock = Redlock::open(&Address::parse("redlock://a,b,c").unwrap(), PATIENCE).unwrap();
        let keys = redlock.keys(&"job/a".parse().unwrap());
        Arrivals { node, link, keys }
    }

    /// The first word of the answer, or of the error.
    async fn run(&mut self, script: &Script, args: &[&str]) -> String {
        let args: Vec<&str> = std::iter::once("me").chain(args.iter().copied()).collect();
        match self.link.run::<Value>(script, &self.keys, &args).await {
            Ok(answer) => text(&items(&answer)[0]).unwrap(),
            Err(error) => format!("{error:#}").replace("Redis says: ", "").split(' ').next().unwrap().to_owned(),
        }
    }

    async fn take(&mut self, n: &str, ttl: &str) -> String {
        self.run(&TAKE, &[n, ttl, "", "1", "0", "0", "0", "{}", "", ""]).await
    }

    async fn raise(&mut self, token: &str) -> String {
        self.run(&RAISE, &[token, "60000", "{}"]).await
    }

    async fn give_back(&mut self, n: &str, given_up: &str, and: Then) {
        assert_eq!(self.run(&GIVE_BACK, &[n, given_up, and.flag(), "0", "0", "60000", "{}"]).await, "done");
    }

    async fn release(&mut self, given_up: &str) -> String {
        self.run(&RELEASE, &["1", "0", "", "", given_up]).await
    }

    async fn is_ours(&self) -> bool {
        self.node.does(&["GET", "dlock:job/a"]).await == Value::BulkString("me".into())
    }

    async fn is_queued(&self) -> bool {
        self.node.does(&["ZSCORE", "{dlock:job/a}:queue", "me"]).await != Value::Nil
    }
}

#[tokio::test]
async fn an_older_take_changes_nothing_of_what_a_newer_one_has() {
    let mut at = Arrivals::new();
    assert_eq!(at.take("3", "60000").await, "ours");
    assert_eq!(at.take("1", "1000").await, "WITHDRAWN");
    let left: u64 = number(&at.node.does(&["PTTL", "dlock:job/a"]).await).unwrap();
    assert!(left > 30_000, "{left} ms left");
    at.give_back("2", "1", Then::Wait).await;
    assert!(at.is_ours().await);
    assert!(!at.is_queued().await);
    at.give_back("4", "1", Then::Leave).await;
    assert!(!at.is_ours().await);
}

#[tokio::test]
async fn an_older_give_back_leaves_alone_what_a_renewal_counts_on() {
    let mut at = Arrivals::new();
    at.take("1", "60000").await;
    // The 2nd was a give-back, the 3rd a take: neither has arrived. Others made a majority, and this one is renewed.
    assert_eq!(at.run(&RENEW, &["4", "1", "60000", "{}"]).await, "ours");
    at.give_back("2", "", Then::Wait).await;
    assert!(at.is_ours().await);
}

#[tokio::test]
async fn what_is_given_up_stays_so_whatever_older_word_arrives() {
    let mut at = Arrivals::new();
    at.give_back("4", "3", Then::Leave).await;
    at.give_back("3", "2", Then::Leave).await;
    assert_eq!(at.take("3", "60000").await, "WITHDRAWN");
    assert_eq!(at.take("5", "60000").await, "ours");
    assert_eq!(at.release("4").await, "released");
    at.give_back("3", "2", Then::Leave).await;
    assert_eq!(at.take("4", "60000").await, "WITHDRAWN");
    assert_eq!(at.release("4").await, "released");
}

#[tokio::test]
async fn who_has_left_is_not_put_back_into_the_queue() {
    let mut at = Arrivals::new();
    at.give_back("3", "2", Then::Leave).await;
    at.give_back("2", "1", Then::Wait).await;
    assert!(!at.is_queued().await);
    at.give_back("5", "", Then::Wait).await;
    assert!(at.is_queued().await);
}

#[tokio::test]
async fn a_revocation_does_not_let_in_what_was_given_up() {
    let mut at = Arrivals::new();
    at.take("2", "60000").await;
    at.raise("7").await;
    assert_eq!(at.run(&RELEASE, &["7", "30000", "", "", "3"]).await, "released");
    assert_eq!(at.run(&REVOKE, &["7", "safely", "maintenance"]).await, "marked");
    at.run(&REVOKE, &["7", "now", ""]).await;
    assert_eq!(at.take("3", "60000").await, "WITHDRAWN");
}

#[tokio::test]
async fn a_node_that_knows_a_greater_token_does_not_vote_for_a_smaller_one() {
    let mut at = Arrivals::new();
    at.take("1", "60000").await;
    assert_eq!(at.raise("8").await, "ours");
    assert_eq!(at.raise("8").await, "ours");
    assert_eq!(at.raise("7").await, "gone");
    let about = text(&at.node.does(&["HGET", "{dlock:job/a}:details", "me"]).await).unwrap();
    assert_eq!(about.split(' ').nth(3), Some("8"), "{about}");
}
