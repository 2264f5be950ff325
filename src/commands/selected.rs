//! Fetches the locks that were asked for: by name, by pattern, or all there are, page by page.

use std::time::Duration;

use anyhow::Result;

use super::doctor::is_spent_probe;
use crate::backend::{Backend, within};
use crate::lock::{LockState, Selector};

/// Hands over what was asked for, those with a name first and in the order in which they were named.
pub async fn each_page(
    wanted: &[Selector],
    patience: Duration,
    backend: &mut dyn Backend,
    mut show: impl FnMut(Vec<LockState>) -> Result<()>,
) -> Result<()> {
    let mut named = Vec::new();
    for selector in wanted {
        if let Selector::Name(name) = selector {
            named.push(within(patience, backend.inspect(name)).await?);
        }
    }
    let all_have_names = named.len() == wanted.len();
    if !named.is_empty() {
        show(named)?;
        if all_have_names {
            return Ok(());
        }
    }
    let is_listed = |state: &LockState| match wanted {
        [] => !is_spent_probe(state),
        _ if wanted.contains(&Selector::Name(state.name.clone())) => false,
        _ => wanted.iter().any(|selector| selector.selects(&state.name)),
    };
    let mut next = None;
    loop {
        let mut page = within(patience, backend.list(next)).await?;
        page.locks.retain(is_listed);
        show(page.locks)?;
        next = page.next;
        if next.is_none() {
            return Ok(());
        }
    }
}
