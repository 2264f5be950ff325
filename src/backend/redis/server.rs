//! The one server we talk to at a time, connected to when needed: again after a verb was cut short, and
//! at another node when a cluster says so.
//!
//! It tells us when keys change by the client-side caching that Redis has had since version 6: it pushes a message once a
//! key that we have read is changed in whatever way.

use std::future::pending;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use redis::aio::MultiplexedConnection;
use redis::{
    Cmd, ErrorKind, FromRedisValue, Pipeline, PushKind, RedisError, Script, ServerErrorKind, ToRedisArgs, Value, cmd,
    pipe,
};

use super::answer::{items, text};
use super::connection::{Connection, is_answer, refusal};
use super::target::{Target, redirect};
use crate::backend::{Patience, within};
use crate::clock;
use crate::exit::Fault;

/// A cluster whose nodes send us in circles is being reshaped; a later attempt will find it settled.
const MOST_REDIRECTS: usize = 5;
/// Until the keys of a lock are together again, while their slot moves to another node.
const TRY_AGAIN: Duration = Duration::from_millis(20);
/// Between attempts to get a connection back that only listens.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);

/// Keys to be told about, and what each held when we last heard of it.
pub type Watch = Vec<(String, Option<String>)>;

pub struct Server {
    target: Target,
    patience: Patience,
    connection: Option<Connection>,
    answered: bool,
    /// Where a cluster has sent us.
    node: Option<String>,
    /// It has turned out that the server cannot tell us when a key changes.
    pub cannot_push: bool,
}

impl Server {
    pub fn new(target: Target, patience: Patience) -> Server {
        Server { target, patience, connection: None, answered: false, node: None, cannot_push: false }
    }

    /// Runs a script, at the right node of a cluster.
    pub async fn run<T: FromRedisValue>(
        &mut self,
        script: &Script,
        keys: &[String],
        args: impl ToRedisArgs,
    ) -> Result<T> {
        let mut call = script.prepare_invoke();
        call.key(keys).arg(args);
        let (end, mut redirects, mut asking) = (clock::now() + self.allowed(), 0, false);
        loop {
            let request = async |redis: &mut MultiplexedConnection| {
                // The slot is on its way to this node, which takes us in only if we say so, every time.
                if asking {
                    script.load_async(redis).await?;
                    cmd("ASKING").exec_async(redis).await?;
                }
                call.invoke_async::<Value>(redis).await
            };
            let error = match self.send(request).await? {
                Ok(answer) => return T::from_redis_value(answer).context("a script's answer"),
                Err(error) => error,
            };
            let is_split = error.kind() == ErrorKind::Server(ServerErrorKind::TryAgain);
            match redirect(&error).filter(|_| self.is_cluster()) {
                Some((node, for_this_request)) if redirects < MOST_REDIRECTS => {
                    self.visit(node);
                    asking = for_this_request;
                    redirects += 1;
                }
                None if is_split && clock::now() < end => {
                    clock::sleep_until(clock::now() + TRY_AGAIN).await;
                    redirects = 0;
                    if std::mem::take(&mut asking) {
                        self.forget_connection();
                    }
                }
                _ => {
                    // A master that was demoted, or a node in trouble: look for the right one next time.
                    self.forget_connection();
                    return Err(refusal(error));
                }
            }
        }
    }

    pub async fn call<T: FromRedisValue>(&mut self, command: &Cmd) -> Result<T> {
        let answer = self.send(async |redis| command.query_async::<Value>(redis).await).await?;
        T::from_redis_value(answer.map_err(refusal)?).context("an answer of Redis")
    }

    /// So that the script can be called by its hash among other commands.
    pub async fn load(&mut self, script: &Script) -> Result<()> {
        self.send(async |redis| script.load_async(redis).await).await?.map_err(refusal)?;
        Ok(())
    }

    /// All in one round trip. What the server refuses stands among the answers.
    pub async fn call_all(&mut self, commands: &Pipeline) -> Result<Vec<Value>> {
        let count = commands.len();
        self.send(async |redis| redis.send_packed_commands(commands, 0, count).await).await?.map_err(refusal)
    }

    /// Sends requests to the server we are connected to, or connects first. Whoever drops this, or whose patience ends, has
    /// dropped the connection with it: what was sent may still be carried out. The node may have left the cluster, too.
    async fn send<T>(
        &mut self,
        request: impl AsyncFnOnce(&mut MultiplexedConnection) -> Result<T, RedisError>,
    ) -> Result<Result<T, RedisError>> {
        let patience = self.allowed();
        self.connect().await?;
        let (mut connection, node) = (self.connection.take().context("connected just now")?, self.node.take());
        let answered = async {
            match request(&mut connection.redis).await {
                Err(error) if !is_answer(&error) => Err(refusal(error)),
                answer => Ok(answer),
            }
        };
        let answer = within(patience, answered).await?;
        (self.answered, self.connection, self.node) = (true, Some(connection), node);
        Ok(answer)
    }

    /// Connects anew if an earlier verb was left unanswered.
    pub async fn connect(&mut self) -> Result<&mut Connection> {
        if self.connection.is_none() {
            let within = self.patience.connect;
            // A node that cannot be reached may have left the cluster: then we begin again where we began, also if our
            // caller gives up while we still try.
            let node = self.node.take();
            let connected = tokio::time::timeout(within, self.target.connect(node.as_deref(), within)).await;
            let connection = connected.unwrap_or_else(|_| {
                Err(Fault::Unreachable.because(format_args!("no connection to {} within {within:?}", self.host())))
            })?;
            self.cannot_push |= connection.pushes.is_none();
            self.connection = Some(connection);
            self.node = node;
        }
        self.connection.as_mut().context("connected just now")
    }

    pub fn host(&self) -> &str {
        self.target.hosts.first().map_or("", String::as_str)
    }

    pub fn is_cluster(&self) -> bool {
        self.target.is_cluster()
    }

    pub fn allowed(&self) -> Duration {
        if self.answered { self.patience.attempt } else { self.patience.connect }
    }

    pub fn forget_connection(&mut self) {
        self.connection = None;
        self.node = None;
    }

    /// Goes to one node of a cluster.
    pub fn visit(&mut self, node: String) {
        self.connection = None;
        self.node = Some(node);
    }

    /// The masters of a cluster, or just the one server there is.
    pub async fn nodes(&mut self) -> Result<Vec<String>> {
        if !self.is_cluster() {
            return Ok(vec![self.host().to_owned()]);
        }
        let slots: Value = self.call(cmd("CLUSTER").arg("SLOTS")).await?;
        let master = |range: &Value| {
            let master = items(items(range).get(2)?);
            Some(format!("{}:{}", text(master.first()?)?, text(master.get(1)?)?))
        };
        let mut nodes: Vec<String> = items(&slots).iter().filter_map(master).collect();
        nodes.sort();
        nodes.dedup();
        ensure!(!nodes.is_empty(), Fault::Unreachable.because("the cluster serves no slots"));
        Ok(nodes)
    }

    /// Returns when the keys differ from what was seen, or once when the connection on which we
    /// listened breaks; never, if the server cannot tell. May be dropped at any time.
    pub async fn changed(&mut self, watch: &[(String, Option<String>)]) {
        loop {
            if let Ok(()) = self.listen(watch).await {
                return;
            }
            // That a connection broke on which we listened is worth asking; that there is none is not.
            let broke = self.connection.as_ref().is_some_and(|connection| connection.listening);
            self.forget_connection();
            if broke {
                return;
            }
            clock::sleep_until(clock::now() + LISTEN_AGAIN).await;
        }
    }

    /// Its requests change nothing, so the connection goes on when this is dropped.
    async fn listen(&mut self, watch: &[(String, Option<String>)]) -> Result<()> {
        while !self.cannot_push && !watch.is_empty() {
            let patience = self.allowed();
            let connection = self.connect().await?;
            let Some(pushes) = &mut connection.pushes else { break };
            // What was pushed before we read the keys is older than what we read.
            while pushes.try_recv().is_ok() {}
            let mut read = pipe();
            if !connection.listening {
                read.cmd("CLIENT").arg("TRACKING").arg("ON").arg("OPTIN");
            }
            // Of these keys alone: the scripts read others too, which change whenever anybody waits.
            let keys: Vec<&str> = watch.iter().map(|(key, _)| key.as_str()).collect();
            read.cmd("CLIENT").arg("CACHING").arg("YES").cmd("MGET").arg(keys);
            let answers = connection.redis.send_packed_commands(&read, 0, read.len());
            let mut answers = within(patience, async { answers.await.map_err(refusal) }).await?;
            let values = answers.pop().unwrap_or_default();
            if answers.iter().any(|answer| matches!(answer, Value::ServerError(_))) {
                self.cannot_push = true;
                break;
            }
            connection.listening = true;
            if let Value::ServerError(error) = values {
                // As when a cluster has moved the keys: the next verb finds out where they are.
                self.forget_connection();
                return Err(refusal(RedisError::from(error)));
            }
            if items(&values).iter().map(text).ne(watch.iter().map(|(_, seen)| seen.clone())) {
                return Ok(());
            }
            match pushes.recv().await {
                Some(push) if push.kind == PushKind::Disconnection => bail!("the server closed the connection"),
                Some(_) => {}
                None => bail!("the connection broke"),
            }
        }
        pending().await
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::thread;

    use super::*;
    use crate::backend::Address;

    /// Its log-in goes unanswered, so whoever connects to it is still at it when its caller gives up.
    #[tokio::test]
    async fn a_node_that_does_not_answer_is_not_gone_to_again_without_asking() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (first, next) = (listener.local_addr().unwrap().port(), silent.local_addr().unwrap().port());
        let asked = thread::spawn(move || {
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().unwrap();
                for answer in ["%0\r\n", &format!("-MOVED 1 127.0.0.1:{next}\r\n")] {
                    let _ = stream.read(&mut [0; 4096]).unwrap();
                    stream.write_all(answer.as_bytes()).unwrap();
                }
            }
        });
        let target = Target::new(&Address::parse(&format!("redis+cluster://127.0.0.1:{first}")).unwrap()).unwrap();
        let patience = Patience { connect: Duration::from_secs(60), attempt: Duration::from_secs(60) };
        let mut server = Server::new(target, patience);
        for _ in 0..40 {
            if asked.is_finished() {
                return;
            }
            let script = Script::new("return 1");
            let keys = ["key".to_owned()];
            let verb = server.run::<Value>(&script, &keys, super::super::NO_ARGS);
            let _ = tokio::time::timeout(Duration::from_millis(500), verb).await;
        }
        panic!("it never asked the first node again");
    }
}
