//! dlock: run a command under a named lock, and never beside another holder of it.
//!
//! A library for the binary and for the tests alone: it promises nothing to other programs.

// What only some backends need is unused in a dlock without them.
#![cfg_attr(
    not(all(feature = "etcd", feature = "mysql", feature = "postgres", feature = "redis", feature = "zookeeper")),
    allow(dead_code, unused_imports)
)]

pub mod backend;
pub mod cli;
pub mod clock;
pub mod commands;
pub mod config;
pub mod events;
pub mod exit;
#[allow(unsafe_code)]
pub mod guardian;
pub mod keeper;
pub mod lock;
mod openat;
pub mod report;
