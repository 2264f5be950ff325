//! More locks than fit on a page.

use super::*;

#[tokio::test]
async fn a_list_has_every_lock_once_over_all_pages() {
    let server = Server::shared();
    let mut client = server.client_under("listed");
    let (one, other) = (ask("a/held", Mode::Exclusive), ask("z/released", Mode::Exclusive));
    let lease = granted(client.try_acquire(&other).await.unwrap());
    client.release(&lease, &ending(&lease)).await.unwrap();
    granted(client.try_acquire(&one).await.unwrap());
    let mut names: Vec<String> = (0..600).map(|n| format!("lock-{n}")).collect();
    let nodes = names.iter().map(|name| format!("/listed-meta/{name}"));
    let create = |path: String| Request::create(&path, b"nonsense", Acl::Anyone, Kind::Persistent);
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
