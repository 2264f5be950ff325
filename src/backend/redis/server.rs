//! The one server we talk to at a time, connected to when needed: again after a verb was cut short, and
//! at another node when a cluster says so.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::link::{Link, refusal};
use super::resp::{Command, Value, command};
use super::script::Script;
use super::target::Target;
use crate::backend::Patience;
use crate::exit::Fault;

/// A cluster whose nodes send us in circles is being reshaped; a later attempt will find it settled.
const MOST_REDIRECTS: usize = 5;

pub struct Server {
    target: Target,
    patience: Patience,
    link: Option<Link>,
    answered: bool,
    /// Where a cluster has sent us.
    node: Option<String>,
    /// It has turned out that the server cannot tell us when a key changes.
    pub deaf: bool,
}

impl Server {
    pub fn new(target: Target, patience: Patience) -> Server {
        Server { target, patience, link: None, answered: false, node: None, deaf: false }
    }

    /// Runs a script, at the right node of a cluster.
    pub async fn run(&mut self, script: &Script, keys: &[String], args: &[&str]) -> Result<Value> {
        let (mut text_too, mut asking) = (false, false);
        for _ in 0..MOST_REDIRECTS {
            let command = if text_too { script.by_text(keys, args) } else { script.by_hash(keys, args) };
            let commands: Vec<Command> = asking.then(|| command!["ASKING"]).into_iter().chain([command]).collect();
            match self.call(&commands).await?.pop().context("one answer to each command")? {
                Value::Error(error) if error.starts_with("NOSCRIPT") => text_too = true,
                Value::Error(error) if self.is_cluster() && error.starts_with("MOVED ") => {
                    self.follow(&error)?;
                    asking = false;
                }
                // The slot is on its way to another node, which takes us in only if we say so, every time.
                Value::Error(error) if self.is_cluster() && error.starts_with("ASK ") => {
                    self.follow(&error)?;
                    asking = true;
                }
                Value::Error(error) => {
                    // A master that was demoted, or a node in trouble: look for the right one next time.
                    self.forget_link();
                    return Err(refusal(&error));
                }
                answer => return Ok(answer),
            }
        }
        Err(Fault::Unreachable.because("the nodes of the cluster send us in circles"))
    }

    /// Sends commands to the server we are connected to, or connects first.
    pub async fn call(&mut self, commands: &[Command]) -> Result<Vec<Value>> {
        let within = self.allowed();
        let answers = self.link().await?.call(commands, within).await;
        match answers {
            Ok(_) => self.answered = true,
            Err(_) => self.forget_link(),
        }
        answers
    }

    /// Connects anew if an earlier verb was left unanswered.
    pub async fn link(&mut self) -> Result<&mut Link> {
        if !self.link.as_ref().is_some_and(Link::is_sound) {
            self.link = None;
            let within = self.patience.connect;
            // A node that cannot be reached may have left the cluster: then we begin again where we began, also if our
            // caller gives up while we still try.
            let node = self.node.take();
            let connect = self.target.connect(node.as_deref(), within);
            let connected = tokio::time::timeout(within, connect).await.unwrap_or_else(|_| {
                Err(Fault::Unreachable.because(format_args!("no connection to {} within {within:?}", self.host())))
            });
            self.link = Some(connected?);
            self.node = node;
        }
        self.link.as_mut().context("connected just now")
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

    pub fn was_listening(&self) -> bool {
        self.link.as_ref().is_some_and(Link::is_listening)
    }

    pub fn forget_link(&mut self) {
        self.link = None;
        self.node = None;
    }

    /// Goes to one node of a cluster.
    pub fn visit(&mut self, node: String) {
        self.link = None;
        self.node = Some(node);
    }

    /// `MOVED slot host:port`; without a host it is the one that said so, which we know by another name.
    pub fn follow(&mut self, error: &str) -> Result<()> {
        let node = error.rsplit(' ').next().filter(|node| !node.starts_with(':')).with_context(|| refusal(error))?;
        self.visit(node.to_owned());
        Ok(())
    }

    /// The masters of a cluster, or just the one server there is.
    pub async fn nodes(&mut self) -> Result<Vec<String>> {
        if !self.is_cluster() {
            return Ok(vec![self.host().to_owned()]);
        }
        let slots = self.call(&[command!["CLUSTER", "SLOTS"]]).await?.remove(0);
        let mut nodes: Vec<String> = slots
            .items()
            .iter()
            .filter_map(|range| {
                let master = range.items().get(2)?.items();
                Some(format!("{}:{}", master.first()?.text()?, master.get(1)?.text()?))
            })
            .collect();
        nodes.sort();
        nodes.dedup();
        ensure!(!nodes.is_empty(), Fault::Unreachable.because("the cluster serves no slots"));
        Ok(nodes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::thread;

    use super::*;
    use crate::backend::Address;

    /// A node that answers so, whatever it is asked; and what it was asked.
    fn node(answers: Vec<String>) -> (u16, thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = Vec::new();
            for answer in answers {
                let mut buffer = [0; 4096];
                let length = stream.read(&mut buffer).unwrap();
                asked.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
                stream.write_all(answer.as_bytes()).unwrap();
            }
            asked
        });
        (port, asked)
    }

    #[tokio::test]
    async fn a_node_that_takes_in_a_slot_is_told_so_with_the_text_of_a_script_too() {
        let answers = ["+OK\r\n-NOSCRIPT No matching script.\r\n", "+OK\r\n+done\r\n"];
        let (next, asked) = node(answers.map(str::to_owned).to_vec());
        let (first, _) = node(vec![format!("-ASK 1 127.0.0.1:{next}\r\n")]);
        let target = Target::new(&Address::parse(&format!("redis+cluster://127.0.0.1:{first}")).unwrap()).unwrap();
        let patience = Patience { connect: Duration::from_secs(20), attempt: Duration::from_secs(20) };
        let answer = Server::new(target, patience).run(&Script::new("return 1"), &["key".into()], &[]).await;
        assert_eq!(answer.unwrap().text().as_deref(), Some("done"));
        let asked = asked.join().unwrap();
        assert!(asked.iter().all(|request| request.contains("ASKING")), "{asked:?}");
        assert!(asked[1].contains("return 1"), "{asked:?}");
    }

    /// Its password goes unanswered, so whoever connects to it is still at it when its caller gives up.
    #[tokio::test]
    async fn a_node_that_does_not_answer_is_not_gone_to_again_without_asking() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (first, next) = (listener.local_addr().unwrap().port(), silent.local_addr().unwrap().port());
        let asked = thread::spawn(move || {
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().unwrap();
                for answer in ["+OK\r\n", &format!("-MOVED 1 127.0.0.1:{next}\r\n")] {
                    let _ = stream.read(&mut [0; 4096]).unwrap();
                    stream.write_all(answer.as_bytes()).unwrap();
                }
            }
        });
        let target = Target::new(&Address::parse(&format!("redis+cluster://:pw@127.0.0.1:{first}")).unwrap()).unwrap();
        let patience = Patience { connect: Duration::from_secs(60), attempt: Duration::from_secs(60) };
        let mut server = Server::new(target, patience);
        for _ in 0..40 {
            if asked.is_finished() {
                return;
            }
            let verb = async { server.run(&Script::new("return 1"), &["key".into()], &[]).await };
            let _ = tokio::time::timeout(Duration::from_millis(500), verb).await;
        }
        panic!("it never asked the first node again");
    }
}
