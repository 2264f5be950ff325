//! What the fault matrix does not tell: no run is ended that could have gone on.

use super::used;
use crate::support::{Bed, Mysql, unique, until};

#[test]
fn a_transaction_that_sits_on_the_row_only_delays() {
    let (server, name) = (Mysql::shared(), unique("sat-upon"));
    used(server);
    server.dlock().run(&name).sh("exit 0").ended().expect(0);
    let sit = format!(
        "START TRANSACTION; SELECT token FROM dlock_locks WHERE name = '{name}' FOR UPDATE; SELECT SLEEP(6); ROLLBACK"
    );
    let sitting = std::thread::spawn(move || server.sql(&sit));
    let asleep = "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE INFO LIKE 'SELECT SLEEP(6)%'";
    until("the row to be taken", || server.sql(asleep) == "1");
    // Error 1205 after four seconds is none to show.
    server.dlock().run(&name).sh("exit 0").ended().expect(0).silently();
    sitting.join().unwrap();
}
