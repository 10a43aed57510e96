//! Both ends and a model number every message alike, across changes of the key.
//!
//! AES-GCM reveals plaintext and its authentication key if a key seals two messages with one nonce.
//! Then a third party could write frames, and with them memory of either end. So no two messages on
//! their way may have the same key and nonce, whatever was taken back before it was sent; and an
//! end may only open messages in their order, whatever a third party delivers. A peer chooses the
//! lengths of the pieces of a stream, which must not reach beyond the buffer.

use aes_gcm::aead::AeadInOut as _;
use aes_gcm::{Aes256Gcm, KeyInit as _};
use kvx_testkit::{Tier, sequences};
use proptest::prelude::*;

use super::*;

/// The first key of the tests, and that of the other direction.
const KEYS: [[u8; KEY]; 2] = [[1; KEY], [2; KEY]];
/// The starts of short sequences: the numbers of their first messages, around the first and the
/// last message of a key.
const STARTS: [u64; 9] =
    [0, 1, ONE_KEY - 6, ONE_KEY - 5, ONE_KEY - 4, ONE_KEY - 3, ONE_KEY - 2, ONE_KEY - 1, ONE_KEY];

/// The keys of one direction, each derived from the one before as Noise's `Rekey` defines it.
struct Model(Vec<Aes256Gcm>);

impl Model {
    fn of(first: [u8; KEY], keys: usize) -> Self {
        let mut next = first;
        let mut model = Model(Vec::new());
        while model.0.len() < keys {
            let cipher = Aes256Gcm::new(&next.into());
            next = [0; KEY];
            cipher
                .encrypt_inout_detached(&nonce(u64::MAX).into(), &[], (&mut next[..]).into())
                .unwrap();
            model.0.push(cipher);
        }
        model
    }

    /// Seals the message with this number, counted from the first message of the first key.
    fn seal(&self, number: u64, message: &[u8]) -> Vec<u8> {
        let cipher = &self.0[usize::try_from(number / ONE_KEY).unwrap()];
        let mut out = message.to_vec();
        let tag = cipher
            .encrypt_inout_detached(&nonce(number % ONE_KEY).into(), &[], (&mut out[..]).into())
            .unwrap();
        out.extend_from_slice(&tag);
        out
    }
}

/// Returns Noise's nonce for AES-GCM: 32 zero bits, and the number in 64 bits, most significant
/// byte first.
fn nonce(number: u64) -> [u8; 12] {
    let mut nonce = [0; 12];
    (0..8).for_each(|byte| nonce[11 - byte] = (number >> (8 * byte)) as u8);
    nonce
}

/// Returns both ends, whose next messages have this number.
fn ends(number: u64) -> (Seals, Seals) {
    let (mut ours, mut theirs) = (Seals::of(&KEYS[0], &KEYS[1]), Seals::of(&KEYS[1], &KEYS[0]));
    for seals in [&mut ours, &mut theirs] {
        (seals.sealer.0.number, seals.opener.0.number) = (number, number);
    }
    (ours, theirs)
}

fn sealed(sealer: &mut Sealer, message: &[u8]) -> Vec<u8> {
    let mut out = message.to_vec();
    sealer.seal_end(message.len(), &mut out);
    out
}

/// Proven for every message of the first key and the first ones of the second (in the whole tier,
/// of four keys): each has the model's key and nonce, and the other end opens it.
#[test]
fn every_message_of_a_key_has_the_next_nonce_at_both_ends() {
    let whole = Tier::Whole.runs_or_says("every message of four keys of a sealed connection");
    let keys = if whole { 4 } else { 1 };
    let (mut ours, mut theirs) = ends(0);
    let model = Model::of(KEYS[0], keys + 1);
    for number in 0..keys as u64 * ONE_KEY + 3 {
        let mut message = sealed(&mut ours.sealer, &[]);
        assert_eq!(message, model.seal(number, &[]), "message {number}");
        theirs.opener.open(&mut message).unwrap_or_else(|error| panic!("{number}: {error}"));
    }
}

/// Proven for all sequences of 12 messages that are sent or taken back, around both ends of a key.
#[test]
fn no_two_sent_messages_share_a_key_and_nonce_whatever_was_taken_back() {
    let model = Model::of(KEYS[0], 2);
    for start in STARTS {
        for sends in sequences(&[false, true], 12) {
            let (mut ours, mut theirs) = ends(start);
            let mut next = start;
            for (at, is_sent) in sends.iter().enumerate() {
                // Each message has other bytes, so that the model's is equal in key and nonce only.
                let message = [at as u8; 3];
                let mut out = sealed(&mut ours.sealer, &message);
                assert_eq!(out, model.seal(next, &message), "{sends:?} from {start}");
                if *is_sent {
                    theirs.opener.open(&mut out).expect("messages are numbered without gaps");
                    assert_eq!(out[..3], message);
                    next += 1;
                } else {
                    ours.sealer.take_back();
                }
            }
        }
    }
}

/// A delivery by a third party in place of the next message.
#[derive(Clone, Copy, Debug)]
enum Delivery {
    /// One of the messages, at any time.
    Message(usize),
    /// The next message with one bit changed.
    Altered,
    /// The next message without its last byte.
    Shortened,
    /// A message of the other direction with the same number.
    Reflected,
    Nothing,
}

/// Proven for all deliveries of 5 messages around both ends of a key: each message at any time,
/// altered, shortened, from the other direction, or empty. The first wrong one ends a connection.
#[test]
fn only_messages_in_their_order_are_opened_whatever_is_delivered() {
    const COUNT: usize = 5;
    let mut all: Vec<Delivery> = (0..COUNT).map(Delivery::Message).collect();
    all.extend([Delivery::Altered, Delivery::Shortened, Delivery::Reflected, Delivery::Nothing]);
    for start in STARTS {
        let (mut ours, mut theirs) = ends(start);
        let texts: Vec<[u8; 2]> = (0..COUNT).map(|at| [at as u8, 7]).collect();
        let seal = |sealer: &mut Sealer| -> Vec<Vec<u8>> {
            texts.iter().map(|text| sealed(sealer, text)).collect()
        };
        let (messages, others) = (seal(&mut ours.sealer), seal(&mut theirs.sealer));
        for deliveries in sequences(&all, COUNT) {
            let mut opener = Opener(Direction { cipher: AesGcm::new(&KEYS[0]), number: start });
            for (at, delivery) in deliveries.iter().enumerate() {
                let mut bytes = match *delivery {
                    Delivery::Message(number) => messages[number].clone(),
                    Delivery::Altered | Delivery::Shortened => messages[at].clone(),
                    Delivery::Reflected => others[at].clone(),
                    Delivery::Nothing => Vec::new(),
                };
                match *delivery {
                    Delivery::Altered => bytes[at] ^= 1 << at,
                    Delivery::Shortened => _ = bytes.pop(),
                    _ => {}
                }
                let opened = opener.open(&mut bytes);
                let is_next = matches!(*delivery, Delivery::Message(number) if number == at);
                assert_eq!(opened.is_ok(), is_next, "{deliveries:?} from {start}");
                if !is_next {
                    break;
                }
                assert_eq!(bytes[..2], texts[at]);
            }
        }
    }
}

/// Proven for all lengths before a piece of a stream, with none to 3 bytes of it and with all.
#[test]
fn every_length_of_a_piece_is_refused_or_waits_for_its_bytes() {
    let (_, mut theirs) = ends(0);
    for length in 0..=u16::MAX {
        let is_valid = (TAG..=RECORD + TAG).contains(&usize::from(length));
        for (start, len) in [(0, 0), (0, 1), (3, 2), (0, 3)] {
            let mut stream = [&length.to_be_bytes()[..], &vec![start; len]].concat();
            let before = stream.clone();
            let mut out = Vec::new();
            let opened = theirs.opener.open_stream(&mut stream, &mut out);
            assert_eq!(opened.is_ok(), is_valid, "a piece of {length} bytes");
            assert!(out.is_empty() && stream == before);
        }
    }
    for len in [1, 2, RECORD - 1, RECORD] {
        let (mut ours, mut theirs) = ends(0);
        let mut stream = Vec::new();
        ours.sealer.seal_stream(&vec![7; len], &mut stream);
        let last = stream.pop().expect("a piece has a tag");
        let mut out = Vec::new();
        theirs.opener.open_stream(&mut stream, &mut out).unwrap();
        assert!(out.is_empty());
        stream.push(last);
        theirs.opener.open_stream(&mut stream, &mut out).unwrap();
        assert!(out == vec![7; len] && stream.is_empty());
    }
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    /// Beyond these sizes: messages of several records from any number, of which some are taken
    /// back, are sent as a stream that arrives in any pieces.
    #[test]
    fn streams_from_any_number_arrive_unchanged_in_any_pieces(
        start in prop_oneof![0..=ONE_KEY, (ONE_KEY - 16)..=ONE_KEY],
        messages in prop::collection::vec((0..2 * RECORD + 2, any::<bool>()), 1..12),
        piece in prop_oneof![1..64_usize, 64..40_000_usize],
    ) {
        let (mut ours, mut theirs) = ends(start);
        let model = Model::of(KEYS[0], 2);
        let (mut said, mut stream, mut next) = (Vec::new(), Vec::new(), start);
        for (at, (len, is_sent)) in messages.into_iter().enumerate() {
            let text: Vec<u8> = (0..len).map(|byte| (byte + at) as u8).collect();
            if !is_sent {
                // Only a message of one record can be taken back.
                let record = &text[..len.min(RECORD)];
                let taken_back = sealed(&mut ours.sealer, record);
                prop_assert!(taken_back == model.seal(next, record));
                ours.sealer.take_back();
                continue;
            }
            let from = stream.len();
            ours.sealer.seal_stream(&text, &mut stream);
            let mut expected = Vec::new();
            for record in text.chunks(RECORD) {
                expected.extend_from_slice(&((record.len() + TAG) as u16).to_be_bytes());
                expected.extend_from_slice(&model.seal(next, record));
                next += 1;
            }
            prop_assert!(stream[from..] == expected);
            said.extend_from_slice(&text);
        }
        let (mut coming, mut heard) = (Vec::new(), Vec::new());
        for bytes in stream.chunks(piece) {
            coming.extend_from_slice(bytes);
            theirs.opener.open_stream(&mut coming, &mut heard).unwrap();
        }
        prop_assert!(heard == said && coming.is_empty());
    }
}
