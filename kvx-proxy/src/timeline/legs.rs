//! The legs of a request, as they begin and end.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::fleet::instance::Role;
use crate::log::shown;

/// The most legs of a request that are kept.
const MOST: usize = 12;

/// What an instance tells about a leg.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) prompt_tokens: Option<u32>,
    pub(crate) cached_tokens: Option<u32>,
    /// The blocks that a decode instance may fetch.
    pub(crate) blocks: Option<u32>,
    /// `HOST:PORT` of the side channel where the decode instance asks for them.
    pub(crate) side_channel: Option<Arc<str>>,
}

/// The longest `HOST:PORT` that is kept.
const LONGEST_ADDRESS: usize = 256;

impl Told {
    /// Reads a prefill's answer.
    pub(crate) fn from_answer(answer: &serde_json::Value) -> Self {
        let number = |path| u32::try_from(answer.pointer(path)?.as_u64()?).ok();
        let params = |key: &str| answer.get("kv_transfer_params")?.get(key);
        let side_channel = || {
            let (host, port) = (params("remote_host")?.as_str()?, params("remote_port")?.as_u64()?);
            let address = if host.contains(':') {
                format!("[{host}]:{port}")
            } else {
                format!("{host}:{port}")
            };
            (address.len() <= LONGEST_ADDRESS).then(|| shown(&address).into())
        };
        let blocks = params("remote_block_ids");
        Told {
            side_channel: side_channel(),
            prompt_tokens: number("/usage/prompt_tokens"),
            cached_tokens: number("/usage/prompt_tokens_details/cached_tokens"),
            blocks: blocks.and_then(serde_json::Value::as_array).map(|ids| {
                // A list of block ids, or one such list for each group of layers.
                ids.iter().map(|id| id.as_array().map_or(1, Vec::len) as u32).sum()
            }),
        }
    }
}

/// A request to an instance. Times count from the arrival of the client's request.
#[derive(Clone, Debug)]
pub(crate) struct Leg {
    pub(crate) role: Role,
    pub(crate) instance: Arc<str>,
    pub(crate) start: Duration,
    /// When the answer of a decode leg began.
    pub(crate) first_byte: Option<Duration>,
    /// `None` while the leg runs.
    pub(crate) end: Option<Duration>,
    pub(crate) outcome: &'static str,
    /// True if the instance is to blame.
    pub(crate) failed: bool,
    pub(crate) told: Told,
}

/// How a leg ended, or its answer began.
#[derive(Clone, Debug, Default)]
pub(crate) struct LegEnd {
    pub(crate) outcome: &'static str,
    pub(crate) failed: bool,
    /// True if the answer has begun, and its rest follows.
    pub(crate) goes_on: bool,
    pub(crate) told: Told,
}

impl Leg {
    /// Returns the time until the leg's answer: a prefill's end, a decode's first byte.
    pub(crate) fn answer_time(&self) -> Option<Duration> {
        Some(self.first_byte.or(self.end)?.saturating_sub(self.start))
    }
}

/// The legs of one request. A prefill leg may end after its request.
#[derive(Debug)]
pub(crate) struct LegLog {
    arrived: Instant,
    legs: Mutex<Vec<Leg>>,
}

impl LegLog {
    pub(crate) fn new(arrived: Instant) -> Self {
        LegLog { arrived, legs: Mutex::default() }
    }

    fn legs(&self) -> MutexGuard<'_, Vec<Leg>> {
        self.legs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a leg that begins now, and returns its number. Further legs than the most are not kept.
    pub(crate) fn begin(&self, role: Role, instance: &Arc<str>) -> usize {
        let start = self.arrived.elapsed();
        let mut legs = self.legs();
        if legs.is_empty() {
            legs.reserve_exact(2);
        }
        let number = legs.len();
        if number < MOST {
            let (outcome, instance) = ("running", Arc::clone(instance));
            let (first_byte, end, failed, told) = (None, None, false, Told::default());
            legs.push(Leg { role, instance, start, first_byte, end, outcome, failed, told });
        }
        number
    }

    /// Records the end of a leg, or that its answer has begun.
    pub(crate) fn end(&self, number: usize, how: LegEnd) {
        let now = self.arrived.elapsed();
        if let Some(leg) = self.legs().get_mut(number) {
            (leg.outcome, leg.failed, leg.told) = (how.outcome, how.failed, how.told);
            *(if how.goes_on { &mut leg.first_byte } else { &mut leg.end }) = Some(now);
        }
    }

    /// Ends the answer that the client got. Earlier ones ended as they began: another instance
    /// replaced them.
    pub(crate) fn end_answers(&self, mut at: Duration) {
        for leg in self.legs().iter_mut().rev() {
            if let Some(first_byte) = leg.first_byte {
                leg.end.get_or_insert(at.max(first_byte));
                at = Duration::ZERO;
            }
        }
    }

    pub(crate) fn list(&self) -> Vec<Leg> {
        self.legs().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl super::super::Timeline {
        /// Returns the bytes that a request takes, with those of the allocator's headers.
        pub(crate) fn memory(&self) -> usize {
            const HEADER: usize = 16;
            let text = |text: Option<&String>| text.map_or(0, |text| text.capacity() + HEADER);
            let texts = [Some(&self.id), Some(&self.path), self.model.as_ref(), self.why.as_ref()];
            let legs = self.legs.legs();
            // Two counters for each Arc. The fleet has the names of instances.
            size_of::<Self>()
                + size_of::<LegLog>()
                + 2 * (16 + HEADER)
                + legs.capacity() * size_of::<Leg>()
                + HEADER
                + texts.into_iter().map(text).sum::<usize>()
        }
    }

    #[test]
    fn legs_are_recorded_as_they_begin_and_end() {
        let log = LegLog::new(Instant::now());
        let prefill = log.begin(Role::Prefill, &"p:1".into());
        let decode = log.begin(Role::Decode, &"d:1".into());
        log.end(decode, LegEnd { outcome: "ok", goes_on: true, ..LegEnd::default() });
        assert_eq!(log.list()[1].end, None, "its answer goes on");
        log.end_answers(Duration::from_secs(5));
        let told = Told { blocks: Some(3), ..Told::default() };
        log.end(prefill, LegEnd { outcome: "timeout", failed: true, goes_on: false, told });
        let [prefill, decode] = &log.list()[..] else { panic!("two legs") };
        assert_eq!((&*prefill.instance, prefill.told.blocks), ("p:1", Some(3)));
        assert!(prefill.failed && prefill.answer_time().is_some());
        assert_eq!((&*decode.instance, decode.end), ("d:1", Some(Duration::from_secs(5))));
        assert!(!decode.failed);
    }

    #[test]
    fn a_prefill_tells_its_tokens_and_blocks() {
        let answer = serde_json::json!({
            "usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 16}},
            "kv_transfer_params": {
                "remote_block_ids": [[1, 2, 3], [4]], "remote_host": "fd00::1", "remote_port": 5600,
            },
        });
        let told = Told {
            prompt_tokens: Some(40),
            cached_tokens: Some(16),
            blocks: Some(4),
            side_channel: Some("[fd00::1]:5600".into()),
        };
        assert_eq!(Told::from_answer(&answer), told);
        let flat = serde_json::json!({"kv_transfer_params": {"remote_block_ids": [7, 8]}});
        assert_eq!(Told::from_answer(&flat).blocks, Some(2));
        let push =
            serde_json::json!({"usage": null, "kv_transfer_params": {"remote_block_ids": null}});
        assert_eq!(Told::from_answer(&push), Told::default());
    }
}
