//! What a bootstrap server remembers: which worker of a prefill listens where, and for how long that is so.

use std::collections::BTreeMap;
use std::time::Duration;

use kvx_core::{Error, ErrorKind, Result};

use crate::ids::WorkerRank;
use crate::time::Time;
use crate::wire::mooncake::{Directory, WorkerRegistration};

/// The longest that a worker may promise to be alive.
const MAX_TTL: Duration = Duration::from_secs(3600);

#[derive(Debug)]
struct RegisteredWorker {
    engine_id: String,
    addr: String,
    /// When it is dead, unless it registers again. A vLLM says nothing of that.
    until: Option<Time>,
}

/// The register of one bootstrap server, without its socket.
///
/// A worker may register again as often as it likes, with the same address. Another address or another engine in its
/// place is refused as long as it is alive: a kvx worker that does not register again within its `kvx_ttl` is dead, one
/// of vLLM never is.
#[derive(Debug, Default)]
pub struct BootstrapRegister {
    workers: BTreeMap<(u32, WorkerRank), RegisteredWorker>,
}

impl BootstrapRegister {
    /// A worker says where it listens.
    ///
    /// # Errors
    ///
    /// `Invalid`: its place is taken. `Busy`: there are too many workers. vLLM answers 400 with the sentence.
    pub fn register(&mut self, now: Time, registration: WorkerRegistration) -> Result<()> {
        self.forget_dead(now);
        let WorkerRegistration { engine_id, dp_rank, rank, addr, kvx_ttl } = registration;
        let same_rank = |(dp, _): &(&(u32, WorkerRank), &RegisteredWorker)| dp.0 == dp_rank;
        let other = self.workers.iter().filter(same_rank).find(|((_, place), known)| {
            known.engine_id != engine_id || (*place == rank && known.addr != addr)
        });
        if let Some(((_, place), known)) = other {
            let cure = match known.until {
                Some(until) => format!(
                    "it is forgotten in {:.0} s unless it registers again",
                    until.since(now).as_secs_f64()
                ),
                None => "it is of a vLLM and never forgotten: restart this bootstrap server".into(),
            };
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "data-parallel rank {dp_rank} is engine {}, whose worker (tensor rank {}, pipeline rank {}) listens \
                     at {}; {cure}",
                    known.engine_id, place.tp, place.pp, known.addr
                ),
            ));
        }
        let key = (dp_rank, rank);
        if self.workers.len() >= Directory::MAX_WORKERS && !self.workers.contains_key(&key) {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("{} workers are registered here", self.workers.len()),
            ));
        }
        let until = kvx_ttl.map(|ttl| now + Duration::from_secs(ttl.into()).min(MAX_TTL));
        self.workers.insert(key, RegisteredWorker { engine_id, addr, until });
        Ok(())
    }

    /// What is told to who asks.
    pub fn directory(&mut self, now: Time) -> Directory {
        self.forget_dead(now);
        let mut directory = Directory::default();
        for ((dp, rank), worker) in &self.workers {
            let engine = directory.engines.entry(*dp).or_default();
            engine.engine_id.clone_from(&worker.engine_id);
            engine.is_kvx = worker.until.is_some();
            engine.workers.insert(*rank, worker.addr.clone());
        }
        directory
    }

    /// A worker of an engine is no longer there.
    pub fn forget(&mut self, engine_id: &str, dp_rank: u32, rank: WorkerRank) {
        let key = (dp_rank, rank);
        if self.workers.get(&key).is_some_and(|worker| worker.engine_id == engine_id) {
            self.workers.remove(&key);
        }
    }

    fn forget_dead(&mut self, now: Time) {
        self.workers.retain(|_, worker| worker.until.is_none_or(|until| !now.has_reached(until)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::from_origin(Duration::from_secs(seconds))
    }

    fn worker(
        engine: &str,
        dp_rank: u32,
        tp: u32,
        port: u32,
        kvx_ttl: Option<u32>,
    ) -> WorkerRegistration {
        let (engine_id, addr) = (engine.to_owned(), format!("tcp://h:{port}"));
        WorkerRegistration { engine_id, dp_rank, rank: WorkerRank { pp: 0, tp }, addr, kvx_ttl }
    }

    #[test]
    fn a_worker_registers_again_and_no_other_takes_its_place() {
        let mut register = BootstrapRegister::default();
        for tp in 0..2 {
            register.register(at(0), worker("e", 0, tp, 10 + tp, None)).unwrap();
            register.register(at(1), worker("e", 0, tp, 10 + tp, None)).unwrap();
        }
        register.register(at(1), worker("f", 1, 0, 20, None)).unwrap();
        for other in
            [worker("e", 0, 0, 99, None), worker("f", 0, 0, 10, None), worker("f", 0, 5, 10, None)]
        {
            let error = register.register(at(2), other).unwrap_err();
            assert!(
                error.kind() == ErrorKind::Invalid && error.to_string().contains("engine e"),
                "{error}"
            );
        }
        let directory = register.directory(at(1_000_000));
        assert_eq!(directory.engine("e").unwrap().sizes(), Ok((2, 1)), "a vLLM is never forgotten");
        assert_eq!(directory.engines[&1].workers.len(), 1);
    }

    #[test]
    fn an_engine_that_does_not_say_that_it_lives_makes_room_for_the_next() {
        let mut register = BootstrapRegister::default();
        register.register(at(0), worker("e", 0, 0, 10, Some(30))).unwrap();
        register.register(at(20), worker("e", 0, 0, 10, Some(30))).unwrap();
        let error = register.register(at(45), worker("next", 0, 0, 11, Some(30))).unwrap_err();
        assert!(error.to_string().contains("in 5 s"), "{error}");
        assert!(register.directory(at(49)).engine("e").is_some());
        assert_eq!(register.directory(at(50)), Directory::default());
        register.register(at(50), worker("gone", 0, 0, 11, Some(30))).unwrap();
        register.forget("other", 0, WorkerRank::default());
        assert!(register.directory(at(50)).engine("gone").is_some_and(|engine| engine.is_kvx));
        register.forget("gone", 0, WorkerRank::default());
        register.register(at(50), worker("next", 0, 0, 11, Some(u32::MAX))).unwrap();
        assert!(register.directory(at(3649)).engine("next").is_some());
        assert!(register.directory(at(3650)).engine("next").is_none(), "nobody lives for ever");
    }

    #[test]
    fn workers_are_bounded_and_the_known_ones_may_still_say_that_they_live() {
        let mut register = BootstrapRegister::default();
        let many = (0..Directory::MAX_WORKERS as u32)
            .map(|number| worker("e", number / 512, number % 512, 1, None));
        for each in many {
            register.register(at(0), each).unwrap();
        }
        assert_eq!(
            register.register(at(0), worker("e", 900, 0, 1, None)).unwrap_err().kind(),
            ErrorKind::Busy
        );
        register.register(at(0), worker("e", 0, 0, 1, None)).unwrap();
    }
}
