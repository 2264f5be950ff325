//! What only ZooKeeper has: other programs in the same queue, its own ways of refusing, an ensemble that
//! loses servers.

mod errors;
mod faults;
mod interop;
