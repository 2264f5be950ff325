//! What only ZooKeeper has: other programs in the same queue, its own ways of refusing, an ensemble that
//! loses servers.

mod doctor;
mod errors;
mod faults;
mod interop;
mod queue;
mod records;
