//! Messages between an engine's two halves: a message decodes as it was encoded, truncated or
//! altered bytes are an error, and decoding takes bounded memory.

use std::sync::Arc;
use std::time::Duration;

use kvx_testkit::{Random, most_allocated, test};
use kvx_vllm::engine::{
    Address, BlockLists, BlockReference, ClockOffset, ConnectorMeta, FailedLoad, FailureKind,
    Heartbeat, Kept, LoadFailure, ReceiveOrder, RemoteEngine, RemoteRequest, RequestId, SendOrder,
    Time, TransferFailure, Transferred, WorkerOutput, WorkerRank,
};

/// The memory that decoding may take: for each byte of the message, and in addition.
const EACH: usize = 64;
const ONCE: usize = 32 << 20;

struct Values(Random);

impl Values {
    fn below(&mut self, bound: usize) -> usize {
        self.0.below(bound)
    }

    fn number(&mut self) -> u32 {
        (self.0.word() >> (32 + self.0.below(32))) as u32
    }

    fn text(&mut self) -> String {
        (0..self.below(40)).map(|_| ['a', '-', '0', 'é', '\n', '界'][self.below(6)]).collect()
    }

    fn maybe<T>(&mut self, value: impl FnOnce(&mut Self) -> T) -> Option<T> {
        (self.below(2) == 1).then(|| value(self))
    }

    fn some<T>(&mut self, mut value: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.below(4)).map(|_| value(self)).collect()
    }

    fn request(&mut self) -> RequestId {
        self.text().into()
    }

    fn time(&mut self) -> Time {
        Time::from_origin(self.duration())
    }

    fn duration(&mut self) -> Duration {
        Duration::from_nanos(self.0.word() >> self.below(64))
    }

    fn seconds(&mut self) -> f64 {
        self.0.word() as f64 / 1e9 - 1e9
    }

    fn blocks(&mut self) -> BlockLists {
        BlockLists::new(
            self.some(|values| (0..values.below(20)).map(|_| values.number()).collect::<Vec<_>>()),
        )
    }

    fn address(&mut self) -> Address {
        Address { host: self.text().into(), port: self.number() as u16 }
    }

    fn peer(&mut self) -> Arc<RemoteEngine> {
        Arc::new(RemoteEngine {
            engine: self.text().into(),
            address: self.address(),
            tp_size: self.number(),
            pp_size: self.number(),
            dcp_size: self.number(),
            registration: self.0.word(),
        })
    }

    fn order(&mut self) -> ReceiveOrder {
        ReceiveOrder {
            request: self.request(),
            local: self.blocks(),
            remote: RemoteRequest {
                request: self.request(),
                peer: self.peer(),
                blocks: self.blocks(),
                expires_at_peer: self.maybe(Self::seconds),
                reference: self.maybe(|values| BlockReference {
                    pool: values.0.word(),
                    stamp: values.0.word(),
                }),
            },
            computed: self.number(),
            end: self.number(),
            held_there: self.number(),
            awaited: self.below(2) == 1,
            deadline: self.time(),
        }
    }

    fn meta(&mut self) -> ConnectorMeta {
        ConnectorMeta {
            registration: self.0.word(),
            built_at: self.time(),
            named: self.some(|values| (values.request(), values.request())),
            prefilling: self.some(Self::request),
            dropped: self.some(Self::request),
            send: self.some(|values| SendOrder {
                request: values.request(),
                expires: values.time(),
                push: values.maybe(Self::blocks),
            }),
            withdrawn: self.some(Self::request),
            receive: self.some(Self::order),
            cancel: self.some(Self::request),
            heartbeats: self.some(|values| Heartbeat {
                peer: values.peer(),
                requests: values.some(Self::request),
            }),
        }
    }

    fn failure(&mut self) -> LoadFailure {
        match self.below(9) {
            0 => LoadFailure::Handshake(self.text()),
            1 => LoadFailure::Transfer(self.text()),
            2 => LoadFailure::Stale,
            3 => LoadFailure::Corrupt,
            4 => LoadFailure::Refused(self.text()),
            5 => LoadFailure::Expiring,
            6 => LoadFailure::NotPushed,
            7 => LoadFailure::Deadline,
            _ => LoadFailure::Rank(self.text()),
        }
    }

    fn output(&mut self) -> WorkerOutput {
        let mut output = WorkerOutput {
            at: self.time(),
            finished_sending: self.some(Self::request),
            finished_recving: self.some(Self::request),
            failed_recving: self.some(|values| FailedLoad {
                request: values.request(),
                failure: values.failure(),
                invalid: values.some(Self::number),
            }),
            failing: self.some(|values| (values.request(), values.failure())),
            lost: self.some(|values| {
                (values.request(), if values.below(2) == 1 { Kept::Load } else { Kept::Request })
            }),
            clocks: self.some(|values| {
                let offset =
                    ClockOffset { seconds: values.seconds(), round_trip: values.duration() };
                (values.text().into(), offset)
            }),
            failures: self.some(|values| TransferFailure {
                kind: FailureKind::ALL[values.below(FailureKind::ALL.len())],
                request: values.maybe(Self::request),
                remote_request: values.maybe(Self::request),
                engine: values.maybe(|values| values.text().into()),
                address: values.maybe(Self::address),
                rank: values
                    .maybe(|values| WorkerRank { pp: values.number(), tp: values.number() }),
                blocks: values.some(|values| values.number() as usize),
                error: values.text(),
            }),
            ..WorkerOutput::default()
        };
        for _ in 0..self.below(4) {
            let (time, post) = (self.duration(), self.duration());
            let (bytes, descriptors) = (self.0.word(), self.0.word());
            output.stats.record(Transferred { time, post, bytes, descriptors });
            output.stats.record_failure(FailureKind::ALL[self.below(FailureKind::ALL.len())]);
            output.stats.record_expired();
            output.stats.record_after_expiry();
        }
        output
    }
}

/// Decodes the bytes, and checks the memory that this took.
fn within_the_bound(bytes: &[u8]) -> (Option<ConnectorMeta>, Option<WorkerOutput>) {
    let decode = || (ConnectorMeta::decode(bytes).ok(), WorkerOutput::decode(bytes).ok());
    let (read, took) = most_allocated(decode);
    assert!(
        took <= EACH * bytes.len() + ONCE,
        "{took} bytes of memory for a message of {}",
        bytes.len()
    );
    read
}

fn encoded_messages_decode(seed: u64) {
    let mut values = Values(Random::seeded(seed));
    let (meta, output) = (values.meta(), values.output());
    assert_eq!(within_the_bound(&meta.encode().unwrap()).0, Some(meta), "seed {seed}");
    assert_eq!(within_the_bound(&output.encode().unwrap()).1, Some(output), "seed {seed}");
}

fn truncated_or_altered_messages_are_not_misread(seed: u64) {
    let mut values = Values(Random::seeded(seed));
    for mut bytes in [values.meta().encode().unwrap(), values.output().encode().unwrap()] {
        let cut = values.below(bytes.len());
        assert_eq!(within_the_bound(&bytes[..cut]), (None, None), "seed {seed}");
        for _ in 0..1 + values.below(3) {
            let at = values.below(bytes.len());
            bytes[at] = values.number() as u8;
        }
        within_the_bound(&bytes);
        bytes.push(0);
        assert_eq!(within_the_bound(&bytes), (None, None), "seed {seed}: one extra byte");
    }
}

/// Checks lists that announce more items than there are, at every list of a message.
fn announced_lengths_take_no_memory() {
    let million = 1_000_000;
    for head in
        [&b"\x99\x00\xdd"[..], b"\x99\x00\x90\xdd", b"\x98\x00\xdd", b"\x98\x00\x90\x90\xdd"]
    {
        for (announced, filler) in
            [(u32::MAX, 0x90), (1 << 20, 0xa0), (1 << 16, 0x9c), (1 << 20, 0x00)]
        {
            let mut bytes = [head, &announced.to_be_bytes()[..]].concat();
            bytes.resize(million, filler);
            within_the_bound(&bytes);
        }
    }
    // The longest list that is accepted, of the items with the most memory per byte.
    let names = vec![RequestId::from(""); 1 << 20];
    let meta =
        ConnectorMeta { prefilling: names.clone(), dropped: names, ..ConnectorMeta::default() };
    let read = within_the_bound(&meta.encode().unwrap()).0;
    assert_eq!(read.map(|meta| meta.dropped.len()), Some(1 << 20));
    let longer =
        ConnectorMeta { cancel: vec!["".into(); (1 << 20) + 1], ..ConnectorMeta::default() };
    assert!(ConnectorMeta::decode(&longer.encode().unwrap()).is_err());
}

#[test]
fn steps_and_outputs_are_read_as_written_within_a_bound() {
    let mut random = Random::seeded(7);
    for seed in 0..2000 {
        encoded_messages_decode(seed);
        truncated_or_altered_messages_are_not_misread(seed);
        let noise: Vec<u8> = (0..random.below(200)).map(|_| random.word() as u8).collect();
        within_the_bound(&noise);
    }
    announced_lengths_take_no_memory();
}

#[test]
fn reasons_are_cut_and_steps_beyond_the_bound_are_refused() {
    let why = "é".repeat(3000);
    let failed =
        FailedLoad { request: "r".into(), failure: LoadFailure::Transfer(why), invalid: vec![] };
    let output = WorkerOutput { failed_recving: vec![failed], ..WorkerOutput::default() };
    let read = WorkerOutput::decode(&output.encode().unwrap()).unwrap();
    assert_eq!(read.failed_recving[0].failure, LoadFailure::Transfer("é".repeat(2048)));
    let blocks = BlockLists::single(vec![u32::MAX; 7 << 20]);
    let order = SendOrder { request: "r".into(), expires: Time::default(), push: Some(blocks) };
    let error =
        ConnectorMeta { send: vec![order], ..ConnectorMeta::default() }.encode().unwrap_err();
    assert!(error.to_string().contains("a step has"), "{error}");
}
