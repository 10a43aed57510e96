//! Both ends' windows of notifications and plain lists agree after every short sequence of steps.
//!
//! Memory safety: a peer decides how many notifications it sends, of which size and number, and
//! what it acknowledges. The windows bound the memory that either end keeps for it. A ticket
//! releases an operation, so an acknowledgement must never take the ticket of another notification
//! or the same ticket twice, and none may be lost.

use std::sync::{Arc, Mutex};

use kvx_testkit::{Tier, sequences};
use proptest::prelude::*;
use proptest::sample::select;

use super::*;

/// The largest notification that is sent only into an otherwise empty window, less two bytes.
const NEARLY_ALL: usize = WINDOW_BYTES - 2;

fn zeros(len: usize) -> Box<[u8]> {
    vec![0; len].into()
}

/// Returns how many steps are tried from each start.
fn steps() -> usize {
    if Tier::Whole.runs_or_says("sequences of 5 steps of notifications instead of 4") {
        5
    } else {
        4
    }
}

/// A step of a sender of notifications.
#[derive(Clone, Copy, Debug)]
enum SenderStep {
    Add(usize),
    Send,
    /// Acknowledges the notification this far after the oldest.
    Acknowledge(u64),
    Pop,
    End,
}

/// A sender and its model, which counts every sum anew.
#[derive(Default)]
struct ModelledSender {
    to_peer: NoticesToPeer,
    /// The number of each operation that has settled.
    settled: Arc<Mutex<Vec<usize>>>,
    added: usize,
    /// The operations and lengths of the notifications that wait.
    waiting: Vec<(usize, usize)>,
    /// Numbers, operations and lengths of the notifications that were sent.
    sent: Vec<(u64, usize, usize)>,
    next: u64,
}

impl ModelledSender {
    fn waiting_cost(&self) -> usize {
        self.waiting.iter().map(|(_, len)| len + ENTRY_OVERHEAD).sum()
    }

    fn sent_bytes(&self) -> usize {
        self.sent.iter().map(|(_, _, len)| len).sum()
    }

    /// Settles a ticket, which must be that of this operation.
    fn settle(&self, ticket: Ticket, operation: usize) {
        let before = self.settled.lock().unwrap().len();
        ticket.settle(Ok(()));
        assert_eq!(self.settled.lock().unwrap()[before..], [operation]);
    }

    fn add(&mut self, len: usize) {
        let (settled, operation) = (Arc::clone(&self.settled), self.added);
        self.added += 1;
        let ticket = Ticket::new(move |_| settled.lock().unwrap().push(operation));
        let fits = self.waiting_cost() + len + ENTRY_OVERHEAD <= MAX_WAITING_BYTES;
        match self.to_peer.add(zeros(len), ticket) {
            Ok(()) => {
                assert!(fits, "more waits than may");
                self.waiting.push((operation, len));
            }
            Err((ticket, error)) => {
                assert!(!fits && error.kind() == ErrorKind::Exhausted, "{error}");
                self.settle(ticket, operation);
            }
        }
    }

    fn send(&mut self) -> Option<(u64, Box<[u8]>)> {
        let fits = self.waiting.first().is_some_and(|(_, len)| {
            self.sent.len() < WINDOW && self.sent_bytes() + len <= WINDOW_BYTES
        });
        let sent = self.to_peer.next_to_send();
        let found = sent.as_ref().map(|(notice, bytes)| (*notice, bytes.len()));
        assert_eq!(found, fits.then(|| (self.next, self.waiting[0].1)));
        if fits {
            let (operation, len) = self.waiting.remove(0);
            self.sent.push((self.next, operation, len));
            self.next += 1;
        }
        sent
    }

    fn acknowledge(&mut self, notice: u64) {
        let is_oldest = self.sent.first().is_some_and(|(oldest, ..)| *oldest == notice);
        match self.to_peer.acknowledge(notice) {
            Ok(ticket) => {
                assert!(is_oldest, "{notice} is not the oldest");
                let (_, operation, _) = self.sent.remove(0);
                self.settle(ticket, operation);
            }
            Err(error) => assert!(!is_oldest && error.kind() == ErrorKind::Malformed, "{error}"),
        }
    }

    fn pop(&mut self) {
        match self.to_peer.pop() {
            Some((bytes, ticket)) => {
                let (operation, len) = self.waiting.remove(0);
                assert_eq!(bytes.len(), len);
                self.settle(ticket, operation);
            }
            None => assert!(self.waiting.is_empty()),
        }
    }

    fn end(&mut self) {
        let sent = std::mem::take(&mut self.sent).into_iter().map(|(_, operation, _)| operation);
        let waiting = std::mem::take(&mut self.waiting).into_iter().map(|(operation, _)| operation);
        let mut left = sent.chain(waiting);
        let tickets: Vec<Ticket> = self.to_peer.end().collect();
        for ticket in tickets {
            self.settle(ticket, left.next().expect("no ticket is returned twice"));
        }
        assert_eq!(left.next(), None, "no ticket is lost");
    }

    fn step(&mut self, step: SenderStep) {
        match step {
            SenderStep::Add(len) => self.add(len),
            SenderStep::Send => drop(self.send()),
            SenderStep::Acknowledge(after) => {
                let oldest = self.sent.first().map_or(self.next, |(oldest, ..)| *oldest);
                self.acknowledge(oldest.wrapping_add(after));
            }
            SenderStep::Pop => self.pop(),
            SenderStep::End => self.end(),
        }
        assert!(self.sent.len() <= WINDOW && self.sent_bytes() <= WINDOW_BYTES);
        assert_eq!(self.to_peer.awaits_answer(), !self.sent.is_empty());
        let front = self.to_peer.front().map(<[u8]>::len);
        assert_eq!(front, self.waiting.first().map(|(_, len)| *len));
    }

    /// Ends the link, and checks that every operation has settled once.
    fn finish(mut self) {
        self.step(SenderStep::End);
        let mut settled = self.settled.lock().unwrap().clone();
        settled.sort_unstable();
        assert!(settled.into_iter().eq(0..self.added), "every operation settles once");
    }
}

/// Returns senders whose windows and queues are empty, one short of full, or two bytes short.
fn senders() -> [Vec<SenderStep>; 4] {
    use SenderStep::{Add, Send};
    let nearly_full = [vec![Add(0); WINDOW + 1], vec![Send; WINDOW - 1]].concat();
    let nearly_all_bytes = vec![Add(NEARLY_ALL), Send, Add(1), Add(1), Add(1)];
    // This one is too large to be sent, so it waits.
    let waiting = vec![Add(MAX_WAITING_BYTES - 3 * ENTRY_OVERHEAD - 1)];
    [Vec::new(), nearly_full, nearly_all_bytes, waiting]
}

fn sender_steps(lengths: &[usize]) -> Vec<SenderStep> {
    use SenderStep::{Acknowledge, Add, End, Pop, Send};
    // The oldest, the one after it, the one before it, and one that was not sent yet.
    let acknowledgements = [0, 1, u64::MAX, WINDOW as u64].map(Acknowledge);
    let adds = lengths.iter().map(|len| Add(*len));
    adds.chain(acknowledgements).chain([Send, Pop, End]).collect()
}

/// Proven for all sequences of 4 steps (in the whole tier 5) from four starts, with notifications
/// of up to 2 bytes and acknowledgements around the oldest.
#[test]
fn every_short_sequence_of_a_sender_keeps_its_window_and_settles_each_operation_once() {
    for start in senders() {
        for steps in sequences(&sender_steps(&[0, 1, 2]), steps()) {
            let mut sender = ModelledSender::default();
            start.iter().chain(&steps).for_each(|step| sender.step(*step));
            sender.finish();
        }
    }
}

/// A step of a receiver of notifications. The flag says whether the agent's queue has space.
#[derive(Clone, Copy, Debug)]
enum ReceiverStep {
    Take(u64, usize, bool),
    Deliver(bool),
    Clear,
}

fn answer(has_space: bool) -> Result<(), QueueFull> {
    if has_space { Ok(()) } else { Err(QueueFull) }
}

/// A receiver and its model: the numbers and lengths of the parked notifications.
#[derive(Default)]
struct ModelledReceiver {
    from_peer: NoticesFromPeer,
    parked: Vec<(u64, usize)>,
}

impl ModelledReceiver {
    /// Creates a receiver with parked notifications, as `take` leaves them.
    fn with_parked(parked: Vec<(u64, usize)>) -> Self {
        let bytes = parked.iter().map(|(_, len)| len).sum();
        let boxes = parked.iter().map(|(notice, len)| (*notice, zeros(*len))).collect();
        ModelledReceiver { from_peer: NoticesFromPeer { parked: boxes, bytes }, parked }
    }

    fn bytes(&self) -> usize {
        self.parked.iter().map(|(_, len)| len).sum()
    }

    /// Returns whether the notification was delivered; `None` if the peer broke the window.
    fn take(&mut self, notice: u64, bytes: &[u8], has_space: bool) -> Option<bool> {
        let delivers = self.parked.is_empty() && has_space;
        let fits = self.parked.len() < WINDOW && self.bytes() + bytes.len() <= WINDOW_BYTES;
        let taken = self.from_peer.take(notice, bytes, |_| answer(has_space));
        assert_eq!(taken.as_ref().ok(), (delivers || fits).then_some(&delivers));
        assert!(taken.as_ref().err().is_none_or(|error| error.kind() == ErrorKind::Malformed));
        if !delivers && fits {
            self.parked.push((notice, bytes.len()));
        }
        taken.ok()
    }

    /// Returns the number of the notification that was delivered.
    fn deliver(&mut self, has_space: bool) -> Option<u64> {
        let delivers = has_space && !self.parked.is_empty();
        let first = delivers.then(|| self.parked.remove(0));
        let mut offered = None;
        let delivered = self.from_peer.deliver_next(|bytes| {
            offered = Some(bytes.len());
            answer(has_space)
        });
        assert_eq!(delivered, first.map(|(notice, _)| notice));
        assert!(first.is_none_or(|(_, len)| offered == Some(len)));
        delivered
    }

    fn step(&mut self, step: ReceiverStep) {
        match step {
            ReceiverStep::Take(notice, len, space) => _ = self.take(notice, &zeros(len), space),
            ReceiverStep::Deliver(has_space) => _ = self.deliver(has_space),
            ReceiverStep::Clear => {
                self.from_peer.clear();
                self.parked.clear();
            }
        }
        self.check();
    }

    fn check(&self) {
        let held = self.bytes() + self.parked.len() * ENTRY_OVERHEAD;
        assert_eq!(self.from_peer.held(), held);
        assert!(held <= WINDOW_BYTES + WINDOW * ENTRY_OVERHEAD);
        assert_eq!(self.from_peer.is_empty(), self.parked.is_empty());
    }
}

/// Returns the parked notifications of receivers that are empty, one short of full, or two bytes
/// short.
fn parked() -> [Vec<(u64, usize)>; 3] {
    [Vec::new(), vec![(7, 0); WINDOW - 1], vec![(7, NEARLY_ALL)]]
}

/// Proven for all sequences of 4 steps (in the whole tier 5) from three starts, with notifications
/// of up to 3 bytes, whose numbers are not checked and may repeat.
#[test]
fn every_short_sequence_of_a_peer_leaves_its_receiver_within_the_window() {
    let mut from_peer = NoticesFromPeer::default();
    from_peer.take(7, &zeros(NEARLY_ALL), |_| Err(QueueFull)).unwrap();
    assert_eq!(from_peer.bytes, ModelledReceiver::with_parked(parked()[2].clone()).from_peer.bytes);
    let mut all =
        vec![ReceiverStep::Deliver(false), ReceiverStep::Deliver(true), ReceiverStep::Clear];
    for (len, space) in [0, 1, 3].into_iter().flat_map(|len| [(len, false), (len, true)]) {
        all.push(ReceiverStep::Take(if space { u64::MAX } else { 0 }, len, space));
    }
    for start in parked() {
        for steps in sequences(&all, steps()) {
            let mut receiver = ModelledReceiver::with_parked(start.clone());
            steps.into_iter().for_each(|step| receiver.step(step));
        }
    }
}

/// A step of a link. The flag says whether the agent's queue has space.
#[derive(Clone, Copy, Debug)]
enum LinkStep {
    Add(usize),
    Send,
    Arrive(bool),
    Deliver(bool),
    Acknowledge,
}

/// A sender, a receiver, and the messages between them.
#[derive(Default)]
struct Link {
    sender: ModelledSender,
    receiver: ModelledReceiver,
    notices: VecDeque<(u64, Box<[u8]>)>,
    acknowledged: VecDeque<u64>,
    /// The number of the next notification to be delivered.
    next: u64,
}

impl Link {
    /// Creates a link to a receiver that has parked notifications of these lengths.
    fn with_parked(parked: &[(u64, usize)]) -> Self {
        let mut link = Link::default();
        for (_, len) in parked {
            link.sender.add(*len);
            link.sender.send().expect("it fits into the window");
        }
        let lengths = parked.iter().map(|(_, len)| *len);
        link.receiver = ModelledReceiver::with_parked((0..).zip(lengths).collect());
        link
    }

    fn delivered(&mut self, notice: u64) {
        assert_eq!(notice, self.next, "notifications are delivered in their order, and once");
        self.next += 1;
        self.acknowledged.push_back(notice);
    }

    fn step(&mut self, step: LinkStep) {
        match step {
            LinkStep::Add(len) => self.sender.add(len),
            LinkStep::Send => self.notices.extend(self.sender.send()),
            LinkStep::Arrive(has_space) => {
                let Some((notice, bytes)) = self.notices.pop_front() else { return };
                let taken = self.receiver.take(notice, &bytes, has_space);
                if taken.expect("a sender that keeps its window is never refused") {
                    self.delivered(notice);
                }
            }
            LinkStep::Deliver(has_space) => {
                let delivered = self.receiver.deliver(has_space);
                delivered.into_iter().for_each(|notice| self.delivered(notice));
            }
            LinkStep::Acknowledge => {
                let Some(notice) = self.acknowledged.pop_front() else { return };
                assert_eq!(self.sender.sent.first().map(|(oldest, ..)| *oldest), Some(notice));
                self.sender.acknowledge(notice);
            }
        }
        self.receiver.check();
    }

    /// Delivers and acknowledges everything that is left.
    fn finish(mut self) {
        let added = self.sender.added as u64;
        let rest = [
            LinkStep::Send,
            LinkStep::Arrive(true),
            LinkStep::Deliver(true),
            LinkStep::Acknowledge,
        ];
        while self.sender.settled.lock().unwrap().len() < self.sender.added {
            let before = (self.next, self.sender.next, self.notices.len(), self.acknowledged.len());
            rest.iter().for_each(|step| self.step(*step));
            let after = (self.next, self.sender.next, self.notices.len(), self.acknowledged.len());
            assert_ne!(before, after, "the link makes progress");
        }
        assert_eq!(self.next, added, "every notification is delivered");
        self.sender.finish();
    }
}

/// Proven for all sequences of 4 steps (in the whole tier 5) from three starts, with notifications
/// of up to 2 bytes.
#[test]
fn every_short_sequence_of_a_link_delivers_each_notification_once_and_in_order() {
    use LinkStep::{Acknowledge, Add, Arrive, Deliver, Send};
    let all = [
        Add(0),
        Add(2),
        Send,
        Arrive(false),
        Arrive(true),
        Deliver(false),
        Deliver(true),
        Acknowledge,
    ];
    for start in parked() {
        for steps in sequences(&all, steps()) {
            let mut link = Link::with_parked(&start);
            steps.into_iter().for_each(|step| link.step(step));
            link.finish();
        }
    }
}

/// Returns lengths of which a few fill a window, and those at its limits.
fn length() -> impl Strategy<Value = usize> {
    let limits = vec![0, 1, 64 << 10, 256 << 10, NEARLY_ALL, WINDOW_BYTES, WINDOW_BYTES + 1];
    prop_oneof![8 => 0..=16_usize, 4 => 0..=(64_usize << 10), 1 => select(limits)]
}

fn any_sender_step() -> impl Strategy<Value = SenderStep> {
    let notice =
        prop_oneof![4 => Just(0_u64), 1 => select(vec![1, 2, u64::MAX]), 1 => any::<u64>()];
    prop_oneof![
        8 => length().prop_map(SenderStep::Add),
        8 => Just(SenderStep::Send),
        6 => notice.prop_map(SenderStep::Acknowledge),
        1 => prop_oneof![Just(SenderStep::Pop), Just(SenderStep::End)],
    ]
}

fn any_receiver_step() -> impl Strategy<Value = ReceiverStep> {
    let take = (any::<u64>(), length(), prop::bool::weighted(0.1));
    prop_oneof![
        120 => take.prop_map(|(notice, len, space)| ReceiverStep::Take(notice, len, space)),
        49 => prop::bool::weighted(0.6).prop_map(ReceiverStep::Deliver),
        1 => Just(ReceiverStep::Clear),
    ]
}

fn any_link_step() -> impl Strategy<Value = LinkStep> {
    // A notification that is larger than the window would never be sent.
    let length = length().prop_map(|len| len.min(WINDOW_BYTES));
    prop_oneof![
        4 => length.prop_map(LinkStep::Add),
        4 => Just(LinkStep::Send),
        3 => prop::bool::weighted(0.2).prop_map(LinkStep::Arrive),
        2 => any::<bool>().prop_map(LinkStep::Deliver),
        2 => Just(LinkStep::Acknowledge),
    ]
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    /// Beyond these sizes: hundreds of steps, with notifications up to the window and any numbers.
    #[test]
    fn a_sender_keeps_its_window_after_any_steps(
        steps in prop::collection::vec(any_sender_step(), 0..400),
    ) {
        let mut sender = ModelledSender::default();
        steps.into_iter().for_each(|step| sender.step(step));
        sender.finish();
    }

    /// A receiver whose peer keeps no rules.
    #[test]
    fn a_receiver_stays_within_the_window_after_any_steps(
        steps in prop::collection::vec(any_receiver_step(), 0..200),
    ) {
        let mut receiver = ModelledReceiver::default();
        steps.into_iter().for_each(|step| receiver.step(step));
    }

    /// A link whose ends keep the rules.
    #[test]
    fn a_link_delivers_each_notification_once_and_in_order_after_any_steps(
        steps in prop::collection::vec(any_link_step(), 0..400),
    ) {
        let mut link = Link::default();
        steps.into_iter().for_each(|step| link.step(step));
        link.finish();
    }
}
