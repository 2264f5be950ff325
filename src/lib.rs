//! dlock: run a command under a named lock, and never beside another holder of it.
//!
//! A library for the binary and for the tests alone: it promises nothing to other programs.

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
pub mod metrics;
mod notify;
mod openat;
pub mod report;
