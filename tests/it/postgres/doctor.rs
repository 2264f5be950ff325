//! What the doctor finds about PostgreSQL.

use crate::support::{Bed, Dlock, Pooler, Postgres, examined};

#[test]
fn a_transaction_pooler_is_seen() {
    let server = Postgres::with(&[]);
    let pooler = Pooler::to(&server);
    examined(server.dlock(), 0).says("postgres-pooler", "fine", "no transaction pooler");
    let behind = |parameters: &str| Dlock::new().env("DLOCK_BACKEND", pooler.url(parameters));
    examined(behind("listen=off"), 0).says("postgres-pooler", "fine", "listen is off");
    examined(behind(""), 0).says("postgres-pooler", "weak", "listen is on");
}
