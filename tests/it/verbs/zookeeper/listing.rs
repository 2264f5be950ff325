//! More locks than fit on a page.

use dlock::backend::Backend;
use dlock::backend::zookeeper::wire::{ANYONE, Kind, Request};
use dlock::lock::{Mode, State};

use super::{ZooKeeperBed, ask, ending, granted, open_under};

#[tokio::test]
async fn a_list_has_every_lock_once_over_all_pages() {
    let server = ZooKeeperBed::shared();
    let mut client = open_under(&server, "listed");
    let (one, other) = (ask("a/held", Mode::Exclusive), ask("z/released", Mode::Exclusive));
    let lease = granted(&mut client, &other).await;
    client.release(&lease, &ending(&lease)).await.unwrap();
    granted(&mut client, &one).await;
    let mut names: Vec<String> = (0..600).map(|n| format!("lock-{n}")).collect();
    let nodes = names.iter().map(|name| format!("/listed-meta/{name}"));
    let create = |path: String| Request::create(&path, b"nonsense", ANYONE, Kind::Persistent);
    assert!(client.ensemble.call(&nodes.map(create).collect::<Vec<_>>()).await.unwrap().iter().all(Result::is_ok));
    names.extend(["a/held".to_owned(), "z/released".to_owned()]);
    names.sort();

    let (mut found, mut after, mut pages) = (Vec::new(), None, 0);
    loop {
        let page = client.list(after).await.unwrap();
        found.extend(page.locks);
        pages += 1;
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert!(pages > 1);
    assert_eq!(found.iter().map(|lock| lock.name.to_string()).collect::<Vec<_>>(), names);
    assert_eq!((found[0].state, found[601].last_run.is_some()), (State::Held, true));
}
