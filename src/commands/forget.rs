//! `dlock forget`: remove what is on record about a lock. Its tokens never go back.

use anyhow::Result;

use super::block_on;
use crate::backend::{self, Forget, Forgotten, within};
use crate::config::{ForgetJob, Service};
use crate::exit::{Exit, Fault};
use crate::lock::LockName;
use crate::report::{escape, print};

pub fn forget(order: &ForgetJob) -> Result<Exit> {
    forget_from(&order.service, &order.name, &Forget::Everything)
}

pub fn forget_from(service: &Service, name: &LockName, what: &Forget) -> Result<Exit> {
    let mut backend = backend::open(&service.address, service.patience)?;
    let forgotten = block_on(within(service.patience.connect, backend.forget(name, what)))?;
    let line = match (forgotten, what) {
        (Forgotten::InUse, _) => {
            return Err(Fault::Busy.because(format_args!("{name} is held or waited for; nothing was forgotten")));
        }
        (Forgotten::Done, Forget::Everything) => format!("{name}: its history and --once keys are forgotten"),
        (Forgotten::Done, Forget::Once(key)) => format!("{name}: the next run with --once {key} will run"),
        (Forgotten::Nothing, Forget::Everything) => format!("{name}: nothing is on record"),
        (Forgotten::Nothing, Forget::Once(key)) => format!("{name}: no success with --once {key} is on record"),
    };
    print(escape(line) + "\n")?;
    Ok(Exit::OK)
}
