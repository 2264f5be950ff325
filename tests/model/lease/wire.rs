//! The messages between dlock and the server, and which of them are on the way.

/// A request of dlock's, or the server's answer to it; the same number for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    Acquire,
    Renew(u8),
    Release,
    Granted,
    Held(u8),
    Lost(u8),
}

const MESSAGES: [Message; 9] = [
    Message::Acquire,
    Message::Renew(1),
    Message::Renew(2),
    Message::Release,
    Message::Granted,
    Message::Held(1),
    Message::Held(2),
    Message::Lost(1),
    Message::Lost(2),
];

impl Message {
    pub fn is_request(self) -> bool {
        matches!(self, Message::Acquire | Message::Renew(_) | Message::Release)
    }
}

/// Those that are on the way, in either direction: a bit for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wire(u16);

impl Wire {
    pub const EMPTY: Wire = Wire(0);

    fn bit(message: Message) -> u16 {
        1 << MESSAGES.iter().position(|one| *one == message).expect("every message has its place")
    }

    pub fn with(self, message: Message) -> Wire {
        Wire(self.0 | Wire::bit(message))
    }

    pub fn without(self, message: Message) -> Wire {
        Wire(self.0 & !Wire::bit(message))
    }

    pub fn all(self) -> impl Iterator<Item = Message> {
        MESSAGES.into_iter().filter(move |message| self.0 & Wire::bit(*message) != 0)
    }
}
