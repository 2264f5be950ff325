//! Taking a lock away from its holder, and why.

use anyhow::{Result, bail};
use tokio_postgres::types::{ToSql, Type};

use super::explain::is_unwritable;
use super::session::Parameters;
use super::{Postgres, ascii, number};
use crate::backend::{Revoke, Revoked};
use crate::clock::Instant;
use crate::lock::{Holder, LastRun, LockName, OwnerId};

/// What dlock.renew says before the operator's reason.
pub(super) const TAKEN: &str = "an operator took it away: ";

impl Postgres {
    pub(super) async fn take_away(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        let (reason, now) = match how {
            Revoke::Safely { reason } => (reason.as_str(), false),
            Revoke::Now { reason } => (reason.as_str(), true),
        };
        match self.revoke_for(name, from, reason, now).await {
            // No reason must keep a lock from being taken away because the database has no letters for it.
            Err(error) if is_unwritable(&error) => self.revoke_for(name, from, &ascii(reason), now).await,
            revoked => revoked,
        }
    }

    async fn revoke_for(&mut self, name: &LockName, from: &Holder, reason: &str, now: bool) -> Result<Revoked> {
        let (Some(owner), Some(token)) = (from.owner.as_deref(), from.fencing_token) else {
            return Ok(Revoked::NotHeld);
        };
        let (name, token) = (name.as_str(), number(token)?);
        let run = now.then(|| ascii(&LastRun::cut_short(from, reason).to_json()));
        let whose: [(&(dyn ToSql + Sync), Type); 3] = [(&name, Type::TEXT), (&owner, Type::TEXT), (&token, Type::INT8)];
        let how: [(&(dyn ToSql + Sync), Type); 3] = [(&reason, Type::TEXT), (&now, Type::BOOL), (&run, Type::TEXT)];
        let with = [&whose[..], &how].concat();
        let mut answer = self.client.call("SELECT dlock.revoke($1, $2, $3, $4, $5, $6::json)", &with).await?;
        if answer.is_none() {
            // A schema from before there were reasons for this.
            let reason = (!now).then_some(reason);
            let with = [&whose[..], &[(&reason, Type::TEXT)]].concat();
            answer = self.client.call("SELECT dlock.revoke($1, $2, $3, $4)", &with).await?;
        }
        let Some(answer) = answer else { return Ok(Revoked::NotHeld) };
        Ok(match answer.row()?.try_get(0)? {
            "marked" => Revoked::Marked,
            "freed" => Revoked::Freed,
            "not held" => Revoked::NotHeld,
            other => bail!("dlock.revoke says {other:?}"),
        })
    }

    /// Why an owner's lock was freed on the spot, if it was.
    pub(super) async fn why_taken(&mut self, name: &LockName, owner: &OwnerId) -> Result<Option<String>> {
        const SQL: &str = "SELECT t.reason FROM dlock.taken t WHERE t.name = $1 AND t.owner = $2
            ORDER BY t.token DESC LIMIT 1";
        let with: &Parameters<'_> = &[(&name.as_str(), Type::TEXT), (&owner.as_str(), Type::TEXT)];
        let answer = self.client.call(SQL, with).await?;
        Ok(answer.and_then(|answer| answer.rows.first().map(|row| row.try_get(0))).transpose()?)
    }

    /// The same where the answer must not be waited for as long as that to the request before it may take: that one is
    /// certain, and would get lost.
    pub(super) async fn why_taken_soon(&mut self, name: &LockName, owner: &OwnerId, asked: Instant) -> Option<String> {
        let left = self.client.patience().saturating_sub(asked.elapsed()) / 2;
        tokio::time::timeout(left, self.why_taken(name, owner)).await.ok()?.ok()?
    }
}
